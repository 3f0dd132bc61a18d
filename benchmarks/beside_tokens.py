# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What numbers beside tokens and changes of documents cost when batches are read."""

import json
import tempfile
import time
from itertools import islice
from pathlib import Path

import numpy as np
from corpora import random_documents
from megatron.energon import WorkerConfig
from timing import markdown, microseconds

from energon_ext import PackedTaskEncoder, get_train_dataset
from energon_ext.batch.columns import Column
from energon_ext.prepare.columns import write_columns
from energon_ext.prepare.token_writer import TokenWriter
from energon_ext.tokenizers.protocol import UnknownTokenizer

ROWS, SEQ_LEN, BATCHES = 8, 4096, 24
TEACHER = {
    "teacher_ids": Column("int32", (8,), fill=-1),
    "teacher_log_probs": Column("float16", (8,), fill=-10000),
}
FILL = {"fill_in_the_middle": {"prefix": 1, "suffix": 2, "middle": 3, "rate": 0.5}}


class Anonymous(UnknownTokenizer):
    """Reads tokens of any vocabulary."""

    def fingerprint(self):
        return {"kind": "anonymous"}


def run():
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write(root / "plain", {})
        write(root / "experts", {"experts": Column("int16", (8,), at="input", fill=-1)})
        write_columns(root / "plain", root / "teacher", TEACHER, produce)
        columns = dict.fromkeys(TEACHER, "teacher")
        rounds = {
            "tokens alone": rounds_of(root, "plain"),
            "a column of eight int16 a token": rounds_of(root, "experts"),
            "eight words of a teacher a label": rounds_of(root, "plain", columns=columns),
            "fill-in-the-middle, half of the documents": rounds_of(root, "plain", transform=FILL),
            "noise": rounds_of(root, "plain", transform={"token_noise": {"rate": 0.1, "token": 3}}),
            "a weight of the source in the loss": rounds_of(root, "plain", loss_weight=2),
            "means of documents": rounds_of(root, "plain", document_means=True),
            "numbers of documents": rounds_of(root, "plain", document_numbers=True),
        }
        contenders = {name: reader(*each) for name, each in rounds.items()}
        times = microseconds(contenders, calls=BATCHES, rounds=9, clock=time.process_time)
    base = times["tokens alone"]
    table = [(name, f"{each / 1000:.2f}", f"{each / base:.2f}") for name, each in times.items()]
    title = f"Reading a batch of [{ROWS}, {SEQ_LEN}]"
    return markdown(title, ("", "processor time, ms", "of tokens alone"), table)


def write(prefix, columns):
    writer = TokenWriter(prefix, 50_000, columns)
    for tokens in random_documents(2000, seed=0):
        values = {name: np.zeros((len(tokens), *c.item), c.dtype) for name, c in columns.items()}
        writer.write(tokens, columns=values)
    described = {name: column.to_json() for name, column in columns.items()}
    writer.close({"tokenizer": Anonymous().fingerprint(), "columns": described})


def produce(texts):
    return {
        name: [np.zeros((len(tokens), *column.item), column.dtype) for tokens in texts]
        for name, column in TEACHER.items()
    }


def rounds_of(root, name, *, document_means=False, document_numbers=False, **fields):
    """Return a dataset, and rounds of its rows."""
    entry = {"path": name, "weight": 1, **fields}
    content = {"__module__": "energon_ext", "__class__": "ScheduledMetadataset"}
    path = root / "mix.yaml"
    path.write_text(json.dumps({**content, "splits": {"train": {"blend": [entry]}}}))
    options = {"document_means": document_means, "document_numbers": document_numbers}
    dataset = get_train_dataset(
        path,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=ROWS,
        task_encoder=PackedTaskEncoder(Anonymous(), SEQ_LEN, **options),
    )
    drawn = dataset.run.rounds(dataset.run.draw_own_steps())
    return dataset, [round_.rows for round_ in islice(drawn, BATCHES)]


def reader(dataset, rounds):
    def read(calls):
        for number in range(calls):
            dataset.batches.read(rounds[number % BATCHES])

    return read
