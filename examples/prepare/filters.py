# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Filter documents with datatrove before they become token files.

    python examples/prepare/filters.py data/web web-*.jsonl --tokenizer tokenizer.json --tasks 4

With N tasks, each task reads every N-th unit of the input, filters its documents, and writes the
rest as one part. A filter may depend on earlier documents, as deduplication does here, so the
result depends on N. An unfinished task runs again from its start. Remove the output after changing
a filter.

Without --partition the tasks run here, one after another; with it they run on SLURM.
"""

import argparse
import functools
import hashlib
import importlib
import sys
from pathlib import Path

from datatrove.data import Document
from datatrove.executor.slurm import SlurmPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.filters import LambdaFilter
from datatrove.pipeline.filters.base_filter import BaseFilter

from energon_ext.cli.mix import make_encoder
from energon_ext.encoders.text_sources import encode_all
from energon_ext.encoders.written_tokenizer import FIELD, tokenizer_arguments
from energon_ext.errors import ConfigError
from energon_ext.prepare.documents import InputDocument, Unit, text_under
from energon_ext.prepare.inputs import jsonl_units
from energon_ext.prepare.job import Job
from energon_ext.prepare.token_writer import TokenWriter
from energon_ext.prepare.units import run_part
from energon_ext.storage.claim import Part
from energon_ext.tokenizers.tokenizers import load_tokenizer

LEAST_WORDS = 5
VAL_FRACTION = 0.05


class ReadUnits(PipelineStep):
    """Reads units of JSON Lines as datatrove documents; raises if a line cannot be read."""

    type, name = "READER", "energon_ext units"

    def __init__(self, paths):
        super().__init__()
        self.paths = paths

    def run(self, data=None, rank=0, world_size=1):
        for unit in jsonl_units(self.paths, text_under("text"))[rank::world_size]:
            for found in unit.read():
                if isinstance(found, ConfigError):
                    raise found
                yield Document(text=found.text, id=found.origin)


class Deduplicate(BaseFilter):
    """Drops documents whose text the task has seen before."""

    name = "exact deduplication"

    def __init__(self):
        super().__init__()
        self.seen = set()

    def filter(self, doc):
        digest = hashlib.sha256(doc.text.encode()).digest()
        is_first = digest not in self.seen
        self.seen.add(digest)
        return is_first


class WriteTokens(PipelineStep):
    """Writes a task's documents as one part of the output; the last task publishes it."""

    type, name = "WRITER", "energon_ext token files"

    def __init__(self, output, tokenizer):
        super().__init__()
        self.output, self.tokenizer = output, tokenizer

    def run(self, data=None, rank=0, world_size=1):
        def read():
            for document in data:
                yield InputDocument(document.text, document.id, len(document.text))

        tasks = [Unit({"path": f"task {n} of {world_size}"}, read) for n in range(world_size)]
        run_part(job_of(self.tokenizer), tasks, self.output, Part(rank, world_size))


def job_of(tokenizer):
    """Return the job that encodes documents as `energon-ext prepare` does."""
    encoder = make_encoder(load_tokenizer(tokenizer))
    meta = encoder.token_file_meta()
    return Job(
        encode=functools.partial(encode_all, encoder),
        writer=functools.partial(TokenWriter, vocab_size=encoder.tokenizer.vocab_size),
        meta={**meta, FIELD: tokenizer_arguments(tokenizer, None, None)},
        options={"val": VAL_FRACTION, "least_words": LEAST_WORDS, **meta},
        val_fraction=VAL_FRACTION,
        min_chars=1,
    )


def is_long_enough(document):
    return len(document.text.split()) >= LEAST_WORDS


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("files", type=Path, nargs="+", help="JSON Lines")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--tasks", type=int, default=1)
    parser.add_argument("--partition", help="SLURM partition; by default the tasks run here")
    parser.add_argument("--time", default="4:00:00", help="time limit of a task on SLURM")
    args = parser.parse_args()

    def pipeline():
        return [
            ReadUnits([path.absolute() for path in args.files]),
            LambdaFilter(is_long_enough),
            Deduplicate(),
            WriteTokens(args.output.absolute(), args.tokenizer),
        ]

    if args.partition:
        here, programs = Path(__file__).parent.absolute(), Path(sys.executable).parent
        SlurmPipelineExecutor(
            pipeline(),
            tasks=args.tasks,
            time=args.time,
            partition=args.partition,
            qos=None,
            env_command=f"export PATH={programs}:$PATH PYTHONPATH={here}:$PYTHONPATH",
            skip_completed=False,  # each part records whether it is finished
            logging_dir=str(args.output.absolute()) + "-logs",
        ).run()
        return
    for rank in range(args.tasks):
        documents = None
        for step in pipeline():
            documents = step(documents, rank, args.tasks)


if __name__ == "__main__":
    # Import this module by name, as the SLURM tasks import the steps from it.
    importlib.import_module("filters").main()
