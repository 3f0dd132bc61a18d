# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext prepare``: text of any kind into an Energon dataset."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from energon_ext.errors import ConfigError

if TYPE_CHECKING:
    from energon_ext.cli.counts import DatasetCounts
    from energon_ext.cli.documents import Corpus

FILE = click.Path(path_type=Path)


@click.command()
@click.argument("output", type=FILE)
@click.argument("files", type=FILE, nargs=-1)
@click.option("--text", type=FILE, multiple=True, help="UTF-8 text files, one document each.")
@click.option("--separator", help="Text between two documents of one --text file.")
@click.option("--folder", type=FILE, help="Read the files of a folder.")
@click.option("--glob", default="**/*.txt", help="Which files of --folder.")
@click.option("--jsonl", type=FILE, multiple=True, help="JSON Lines files, one document a line.")
@click.option("--key", default="text", help="Where the text is in JSON or HF.")
@click.option("--hf-dataset", metavar="NAME", help="A Hugging Face dataset or its local folder.")
@click.option("--hf-config", metavar="NAME", help="Configuration of --hf-dataset.")
@click.option("--hf-split", default="train", help="Split of --hf-dataset.")
@click.option("--hf-streaming", is_flag=True, help="Read --hf-dataset without downloading it all.")
@click.option(
    "--val",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.05,
    help="Share of the documents for the split val, chosen by a hash of the text.",
)
@click.option("--seed", type=click.IntRange(0, 2**32), default=0, help="Selects another val split.")
@click.option(
    "--shard-documents", type=click.IntRange(1), default=10_000, help="Documents per tar."
)
@click.option("--min-chars", type=click.IntRange(1), default=1, help="Leave shorter documents out.")
@click.option("--tokenizer", metavar="NAME", help="Write tokens: 'bytes', a name or a local file.")
@click.option("--workers", type=click.IntRange(1), default=1, help="Processes that index shards.")
@click.option("--force", is_flag=True, help="Replace the dataset at OUTPUT.")
def prepare(
    output: Path,
    files: tuple[Path, ...],
    val: float,
    seed: int,
    shard_documents: int,
    min_chars: int,
    tokenizer: str | None,
    workers: int,
    force: bool,
    **inputs,
) -> None:
    """Write text to OUTPUT as an Energon dataset, or with --tokenizer as Megatron's token files.

    One kind of input: --text, --folder, --jsonl or --hf-dataset. FILES are further files of --text
    or --jsonl, so a shell pattern works.

    \b
    energon-ext prepare data/books --text books/*.txt
    energon-ext prepare data/code --folder src --glob '**/*.py'
    energon-ext prepare data/web --jsonl web-*.jsonl --key content
    energon-ext prepare data/web --jsonl web-*.jsonl --tokenizer my/tokenizer.json

    Token files are OUTPUT/train.bin and .idx, and the same for val; a metadataset names them as
    `path: data/web/train`.
    """
    from energon_ext.cli.dataset_writer import WriteOptions, write_text_dataset
    from energon_ext.encoders.tokenizers import load_tokenizer

    options = WriteOptions(
        val_fraction=val,
        seed=seed,
        shard_documents=shard_documents,
        min_chars=min_chars,
        workers=workers,
        force=force,
        tokenizer=load_tokenizer(tokenizer) if tokenizer else None,
    )
    counts = write_text_dataset(_corpus(files, **inputs), output, options)
    click.echo(summary(output, counts, tokenizer))


def summary(output: Path, counts: "DatasetCounts", tokenizer: str | None = None) -> str:
    """What was written, as a table for people."""
    columns = ["documents", "characters", "tokens" if tokenizer else "shards"]
    lines = [f"{output}:", " " * 9 + "".join(f"{column:>16}" for column in columns)]
    for split, numbers in counts.splits.items():
        cells = "".join(f"{getattr(numbers, column):>16,}" for column in columns)
        lines.append(f"  {split:<7}{cells}")
    if counts.skipped:
        lines.append(f"  left out as too short: {counts.skipped:,}")
    return "\n".join(lines)


def _corpus(
    files: tuple[Path, ...],
    *,
    text: tuple[Path, ...],
    separator: str | None,
    folder: Path | None,
    glob: str,
    jsonl: tuple[Path, ...],
    key: str,
    hf_dataset: str | None,
    hf_config: str | None,
    hf_split: str,
    hf_streaming: bool,
) -> "Corpus":
    from energon_ext.cli import documents

    given = {"--text": text, "--folder": folder, "--jsonl": jsonl, "--hf-dataset": hf_dataset}
    kinds = [option for option, value in given.items() if value]
    if len(kinds) != 1:
        raise ConfigError(
            f"Give one kind of input of {', '.join(given)}; found {' and '.join(kinds) or 'none'}."
        )
    if files and not (text or jsonl):
        raise ConfigError(f"{files[0]}: further files go with --text or --jsonl, not {kinds[0]}.")
    if text:
        return documents.text_files([*text, *files], separator)
    if folder:
        return documents.text_files(documents.folder_files(folder, glob), separator)
    if jsonl:
        return documents.jsonl_files([*jsonl, *files], key)
    return documents.hugging_face_dataset(
        hf_dataset, config=hf_config, split=hf_split, streaming=hf_streaming, key=key
    )
