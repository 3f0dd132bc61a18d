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
    "token files": ("744b9dfe19ed", "16022f012c36", "df8428716a58"),
    "one stream": ("297a3c1c1c53", "bfce09e6c20c", "0fff86cfe408"),
    "text": ("8e0e3a98535b", "cd6844dd9aec", "e810ba8ff994"),
    "spliced": ("3a9f41ae43f5", "a215e31997f7", "999e1bcf890d"),
    "samples": ("4324ebc6151c", "324911dcdb5c", "7bccca6d0e9f"),
    "packed samples": ("3a3ba9f0ae3e", "23c3681c948d", "209b20072ea6"),
    "samples packed by their encoder": ("90bdd42ede35", "b747dd2525bc", "a8bcbc9c423e"),
    "tokens beside samples": ("4fef8bc0af55", "ce8143873b00", "c1ee0c14853a"),
    "chats": ("5af0262dc98d", "f007d736de42", "e456c7c3bb6c"),
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
