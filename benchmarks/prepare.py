# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Text into token files: ours, datatrove's tokenizer, and a loop like Megatron's own.

All contenders tokenize the same 8 JSON Lines files with the same BPE; each run has a separate
process, whose imports are not timed. `wall` is elapsed time; `core` counts the processor time of
all processes, which hardly depends on other work on the machine. Contenders that are not installed
are omitted.
"""

import contextlib
import importlib.util
import io
import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path

import numpy as np
from text_source import processor_seconds, texts_of, train_tokenizer
from timing import fresh_process, markdown

from energon_ext.cli.prepare import prepare
from energon_ext.tokenizers.tokenizers import HFTokenizer

FILES = 8
CHARACTERS = {"documents of up to 16,000 characters": 16_000, "of 80 characters": 80}
INPUT_CHARACTERS = 8_000_000
JOBS = (1, 2)
TURNS = 2


def run():
    rows = []
    with tempfile.TemporaryDirectory() as name:
        texts = texts_of(16_000)
        for what, length in CHARACTERS.items():
            folder = Path(name) / str(length)
            write_input(folder, texts, length)
            train_tokenizer(texts, folder / "tokenizer.json")
            rows += compared(what, folder)
    header = ("contender, jobs, input", "million tokens/s", "per core", "ratio per core", "2 jobs")
    return markdown("Preparing text", header, rows)


def write_input(folder, texts, length):
    """Write the same characters for every length of documents."""
    (folder / "input").mkdir(parents=True)
    pieces = [text[at : at + length] for text in texts for at in range(0, len(text), length)]
    total = np.cumsum([len(piece) for piece in pieces])
    pieces = pieces[: int(np.searchsorted(total, INPUT_CHARACTERS))]
    for number in range(FILES):
        lines = (json.dumps({"text": piece}) + "\n" for piece in pieces[number::FILES])
        (folder / "input" / f"{number}.jsonl").write_text("".join(lines))


def compared(what, folder):
    best = {}
    for _ in range(TURNS):
        for name, contender in contenders().items():
            for jobs in JOBS:
                found = fresh_process(timed, contender, folder, jobs)
                before = best.get((name, jobs), (float("inf"), float("inf")))
                best[name, jobs] = tuple(map(min, before, found))
    prepared = json.loads(next(folder.glob("ours-*/out/prepared.json")).read_text())
    tokens = sum(prepared["tokens"].values())
    rates = {key: (tokens / wall / 1e6, tokens / core / 1e6) for key, (wall, core) in best.items()}
    return [
        (
            f"{name}, {jobs}, {what}",
            f"{wall:.2f}",
            f"{core:.2f}",
            f"{core / rates['ours', jobs][1]:.2f}x",
            f"{wall / rates[name, 1][0]:.2f}x" if jobs == 2 else "",
        )
        for (name, jobs), (wall, core) in rates.items()
    ]


def contenders():
    found = {"ours": ours}
    if importlib.util.find_spec("datatrove") and importlib.util.find_spec("orjson"):
        found["datatrove"] = datatrove
    if importlib.util.find_spec("megatron.core"):
        found["loop like Megatron's"] = loop_like_megatrons
    return found


def timed(contender, folder, jobs):
    """Return elapsed seconds, and processor seconds of all processes."""
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")
    output = Path(tempfile.mkdtemp(prefix=f"{contender.__name__}-", dir=folder)) / "out"
    prepared = contender(folder, output, jobs)
    begin, processor = time.perf_counter(), processor_seconds()
    prepared()
    return time.perf_counter() - begin, processor_seconds() - processor


def ours(folder, output, jobs):
    options = ("--jsonl", folder / "input", "--tokenizer", folder / "tokenizer.json")
    call = [str(each) for each in (output, *options, "--eos-token", "<eos>", "--jobs", jobs)]

    def run():
        with contextlib.redirect_stdout(io.StringIO()):
            prepare.main(call, standalone_mode=False)

    return run


def datatrove(folder, output, jobs):
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens.megatron_tokenizer import MegatronDocumentTokenizer

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # it logs every task
    steps = [
        JsonlReader(str(folder / "input")),
        MegatronDocumentTokenizer(
            str(output),
            tokenizer_name_or_path=str(folder / "tokenizer.json"),
            eos_token="<eos>",
        ),
    ]
    logs = str(output) + "-logs"
    executor = LocalPipelineExecutor(
        steps, tasks=FILES, workers=jobs, logging_dir=logs, start_method="fork"
    )
    return executor.run


def loop_like_megatrons(folder, output, jobs):
    """Send lines to a pool that tokenizes them, and write tokens with one builder in the parent."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    tokenizer = HFTokenizer(folder / "tokenizer.json", eos_token="<eos>")

    def run():
        builder = IndexedDatasetBuilder(str(output) + ".bin", dtype=np.uint16)
        lines = (line for path in sorted((folder / "input").iterdir()) for line in path.open("rb"))
        fork = multiprocessing.get_context("fork")
        with fork.Pool(jobs, use, (tokenizer,)) as pool:
            for tokens in pool.imap(encoded, lines, 32):
                builder.add_document(tokens, [len(tokens)])
            pool.close()
            pool.join()
        builder.finalize(str(output) + ".idx")

    return run


def use(tokenizer):
    global used
    used = tokenizer


def encoded(line):
    return used.encode(json.loads(line)["text"])
