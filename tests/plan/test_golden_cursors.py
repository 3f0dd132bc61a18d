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
    "token files": ("5d23934edb40", "e9ea261b9670", "2817a2dcab58"),
    "one stream": ("297a3c1c1c53", "a23d6be6d7b8", "3b84ac49d17c"),
    "text": ("8e0e3a98535b", "191a25df45e2", "52a15635aa64"),
    "spliced": ("a6a0b0937860", "b5d0d071a815", "7ff7113a7e60"),
    "samples": ("4324ebc6151c", "4460bfe53cd3", "75a6eccd5cbc"),
    "packed samples": ("3a3ba9f0ae3e", "1cde13f5ac65", "c57b6cc4087f"),
    "samples packed by their encoder": ("90bdd42ede35", "01d3bf5fbb75", "e302d1daf6ad"),
    "tokens beside samples": ("4fef8bc0af55", "1ed6d9bfe460", "30bca257cd90"),
    "chats": ("5af0262dc98d", "d629baa5c09d", "468a730ca4da"),
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
