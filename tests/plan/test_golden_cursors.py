# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The rows and cursors of every kind of source are those recorded here.

A change of these values is a change of the iteration order or of the content of a state: give it a
tagged line in the changelog, and then print the new values with
`python -m tests.plan.test_golden_cursors`.
"""

import hashlib
import json
import tempfile
from pathlib import Path

import pytest

from energon_ext import PackedBatch, SFTTaskEncoder
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.plan.test_questions import KINDS, SEQ_LEN, open_loader, seen, write, write_sources
from tests.support import take

#: Kind of source -> digests of its first 14 batches, and of the cursors after 5 and 14.
GOLDEN = {
    "token files": ("5d23934edb40", "723f9cc55851", "be2e07d12f9d"),
    "one stream": ("297a3c1c1c53", "066b876ffc14", "6386b5080352"),
    "text": ("8e0e3a98535b", "74c9686f8f58", "df9e785a1732"),
    "spliced": ("a6a0b0937860", "27cfb04c52c1", "05b792023659"),
    "samples": ("4324ebc6151c", "c9097aed7d23", "66d81302e80d"),
    "packed samples": ("3a3ba9f0ae3e", "811b4e47a4f4", "7e08e7c3a846"),
    "samples packed by their encoder": ("90bdd42ede35", "1c8ef662fd62", "caaa9cb69234"),
    "tokens beside samples": ("4fef8bc0af55", "6bf2d535702d", "03214cce610a"),
    "chats": ("5af0262dc98d", "a0e78301a649", "648d6b74af44"),
}

CHATS = ["chats.jsonl"], lambda: SFTTaskEncoder(ByteTokenizer(), SEQ_LEN), "blend"


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def cursor(loader, folder):
    """Return the digest of a cursor, without the names of folders."""
    state = {k: v for k, v in loader.state_dict().items() if k != "energon_ext_digest"}
    return digest(json.dumps(state, sort_keys=True).replace(str(folder), ""))


def content(batch):
    """Return what a batch contains, as text; fields that are added later are not part of it."""
    if not isinstance(batch, PackedBatch):
        return seen(batch)
    fields = ("tokens", "labels", "token_weights", "position_ids", "cu_seqlens", "source_ids")
    return repr([getattr(batch, name).tolist() for name in fields])


def measure(folder, kind):
    path, encoder = write(folder, kind)
    loader = open_loader(path, encoder)
    batches = take(loader, 5)
    early = cursor(loader, folder)
    batches += take(loader, 9)
    return digest("".join(map(content, batches))), early, cursor(loader, folder)


def write_data(folder):
    write_sources(folder)
    records = [{"prompt": f"{n}?", "response": "x" * (n * 5 % 30)} for n in range(50)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    KINDS.setdefault("chats", CHATS)
    yield write_data(tmp_path_factory.mktemp("golden"))
    KINDS.pop("chats")


@pytest.mark.parametrize("kind", [*KINDS, "chats"])
def test_rows_and_cursors_are_those_recorded(folder, kind):
    assert measure(folder, kind) == GOLDEN[kind]


if __name__ == "__main__":
    KINDS["chats"] = CHATS
    with tempfile.TemporaryDirectory() as root:
        data = write_data(Path(root))
        for name in KINDS:
            print(f"    {name!r}: {measure(data, name)!r},")
