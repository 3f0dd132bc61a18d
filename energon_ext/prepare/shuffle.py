# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Puts all documents of an input in one random order, in two passes over units.

The first pass writes the documents of each unit of the input sorted by random keys. The units of
the second one are buckets of keys, which are parts of the output. Both are done by any processes,
and continued, like other units. The order depends on the input and the seed; the number of buckets
on the size of the documents. So neither depends on who does what.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from energon_ext.batch.columns import columns_in
from energon_ext.keyed import sha256
from energon_ext.prepare.accounts import Preparation, name_units, plain_json
from energon_ext.prepare.documents import Documents, InputDocument, Unit
from energon_ext.prepare.job import Encoded, Record
from energon_ext.prepare.sorted_documents import SortedWriter, read_bucket
from energon_ext.tokens.index import SHUFFLED

#: Most bytes of documents in a bucket, on average; a process keeps one bucket in memory.
BUCKET_BYTES = 2**29


@dataclass(frozen=True, kw_only=True)
class Merging(Preparation):
    """The second pass.

    Attributes:
        inputs: the records of the units of the first pass, in order.
    """

    inputs: Sequence[Record]

    def merge(self, records: Mapping[str, Record]) -> Record:
        """Return the content of PREPARED, with what the first pass counted."""
        counts = {
            name: sum((Counter[str](unit[name]) for unit in self.inputs), Counter[str]())
            for name in ("characters", "notes")
        }
        merged = {**super().merge(records), **counts}
        return {"shuffled": self.job.shuffle, **merged, "inputs": list(self.inputs)}


def passes_of(preparation: Preparation) -> Iterator[Preparation]:
    """Yield the passes of a preparation, whose units may be prepared in any order.

    The second pass is yielded only if all units of the first one are prepared, by this process or
    by others. Without ``Job.shuffle`` there is one pass.
    """
    if preparation.job.shuffle is None:
        yield preparation
        return
    if merging := _finished_before(preparation):
        yield merging
        return
    sorting = _sorting(preparation)
    yield sorting
    if sorting.is_complete():
        records = sorting.finished_units(sorting.units)
        yield _merging(preparation, [records[name] for name in sorting.units])


def _sorting(preparation: Preparation) -> Preparation:
    """Return the first pass."""
    job = preparation.job
    assert job.shuffle is not None, "without a seed there is one pass"
    columns = columns_in(job.meta, "the input")
    size = job.meta["vocab_size"]
    writer = partial(SortedWriter, vocab_size=size, seed=job.shuffle, columns=columns)
    units = {f"{name}-sorted": unit for name, unit in preparation.units.items()}
    return replace(preparation, job=replace(job, writer=writer), units=units, is_last=False)


def _finished_before(preparation: Preparation) -> Merging | None:
    """Return the second pass if it is complete; the files of the first one may be gone by then."""
    units = [plain_json(unit.description) for unit in preparation.units.values()]
    for prepared in preparation.saved_records():
        inputs = prepared.get("inputs", [])
        if [each["unit"] for each in inputs] == units:
            merging = _merging(preparation, inputs)
            if merging.is_complete():
                return merging
    return None


def _merging(preparation: Preparation, inputs: Sequence[Record]) -> Merging:
    """Return the second pass over the files of the first one."""
    job = preparation.job
    files = {path: known for each in inputs for path, known in each["files"].items()}
    contents = json.dumps([[path, known["sha256"]] for path, known in files.items()])
    digest = sha256(contents)[:16]
    num_bytes = sum(known["bytes"] for known in files.values())
    buckets = _count_buckets(num_bytes)
    units = [
        Unit(
            {"path": "the input", "digest": digest, "bucket": [bucket, buckets]},
            partial(_read, preparation.work, [*files], bucket, buckets, job.meta),
            num_bytes // buckets,
        )
        for bucket in range(buckets)
    ]
    shuffled = {"seed": job.shuffle, "input": digest}
    return Merging(
        job=replace(job, encode=_take_encoded, min_chars=0, meta={**job.meta, SHUFFLED: shuffled}),
        units=name_units(units),
        output=preparation.output,
        force=preparation.force,
        title="shuffling",
        inputs=inputs,
    )


def _count_buckets(num_bytes: int) -> int:
    """Return the smallest power of two that is enough."""
    return 1 << max(0, -(-num_bytes // BUCKET_BYTES) - 1).bit_length()


def _read(
    folder: Path, files: Sequence[str], bucket: int, buckets: int, meta: Mapping[str, Any]
) -> Documents:
    """Yield the documents of a bucket, one split after the other."""
    columns = columns_in(meta, "the input")
    by_split: dict[str, list[Path]] = {}
    for file in files:
        by_split.setdefault(file.partition("/")[0], []).append(folder / file)
    for split, paths in sorted(by_split.items()):
        for document in read_bucket(paths, bucket, buckets, meta["vocab_size"], columns):
            encoded = Encoded([(document.tokens, document.weights, document.columns)])
            yield InputDocument("", document.origin, document.num_bytes, encoded, split)


def _take_encoded(documents: Sequence[InputDocument]) -> list[Encoded]:
    return [document.sample for document in documents]
