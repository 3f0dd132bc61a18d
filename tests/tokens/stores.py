# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The same documents in every format that a metadataset may name, each as a folder of two files."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from energon_ext import SFTTaskEncoder
from energon_ext.tokens.documents import Documents
from energon_ext.tokens.formats import FORMATS, register_documents
from tests.plan.runs import SEQ_LEN, Run
from tests.support import LargeTokenizer, write_mix, write_tokens

#: Suffix of the registered store.
OWN = ".own"


def write_parquet(path, documents, *, kind=None, rows=4, column="input_ids", **columns):
    """Write documents to a Parquet file with small row groups; ``columns`` are further ones."""
    kind = kind or pa.list_(pa.int32())
    arrays = {column: pa.array(documents, kind)}
    arrays.update((name, pa.array(*values)) for name, values in columns.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(arrays), path, row_group_size=rows)
    return path


def write_shard(path, documents, dtype="<u4"):
    """Write documents to a bare array, as OLMo-core does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.array([token for tokens in documents for token in tokens], dtype).tofile(path)
    return path


def write_table(path, documents):
    """Write the .csv.gz next to a shard, as dolma does."""
    end = 0
    with gzip.open(f"{str(path).removesuffix('.npy')}.csv.gz", "wt") as file:
        for number, tokens in enumerate(documents):
            file.write(f"{end},{end + len(tokens)},id-{number},web.jsonl.gz,{number}\n")
            end += len(tokens)


class OwnDocuments(Documents):
    """A registered store: one JSON file of lists."""

    def __init__(self, folder):
        files = sorted(folder.glob(f"*{OWN}"))
        self._documents = [tokens for file in files for tokens in json.loads(file.read_text())]

    def __len__(self):
        return len(self._documents)

    def lengths(self, numbers):
        return np.array([len(self._documents[number]) for number in numbers], np.int64)

    def tokens(self, number, start, stop):
        return np.array(self._documents[number][start:stop], np.int64)


def register_own():
    """Register the store; return a function that forgets it again."""
    from pathlib import Path

    before = list(FORMATS)
    register_documents(OWN, lambda path: OwnDocuments(Path(path)))
    return lambda: FORMATS.__setitem__(slice(None), before)


def _halves(documents):
    middle = len(documents) // 2
    return documents[:middle], documents[middle:]


def _pairs(folder, documents):
    for name, half in zip("ab", _halves(documents)):
        write_tokens(folder / name, half, np.int32)


def _parquet(folder, documents):
    for name, half in zip("ab", _halves(documents)):
        write_parquet(folder / f"{name}.parquet", half)


def _npy(folder, documents):
    for name, half in zip("ab", _halves(documents)):
        write_table(write_shard(folder / f"{name}.npy", half), half)


def _npy_split(folder, documents):
    """Write shards whose documents end with the largest token of all, which they must have."""
    for name, half in zip("ab", _halves(documents)):
        write_shard(folder / f"{name}.npy", half)
    end = documents[0][-1]
    assert all(tokens[-1] == end and end not in tokens[:-1] for tokens in documents)
    (folder / "shards.json").write_text(json.dumps({"dtype": "uint32", "end_token": end}))


def _own(folder, documents):
    folder.mkdir(parents=True)
    for name, half in zip("ab", _halves(documents)):
        (folder / f"{name}{OWN}").write_text(json.dumps(half))


STORES = {
    "pairs": _pairs,
    "parquet": _parquet,
    "npy": _npy,
    "npy split at a token": _npy_split,
    "own": _own,
}


def steps_of_chats(folder):
    """Return the first steps of fine-tuning on the chats in ``folder / "chat"``."""
    mix = write_mix(folder / "mix.yaml", [("chat", 1)])
    encoder = SFTTaskEncoder(LargeTokenizer(), SEQ_LEN, train_on_eos=False)
    return Run(mix, rows=1, encoder=encoder).steps(2)
