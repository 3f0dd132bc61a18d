# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext tokenize``: tokenize text into its cache before a run."""

from pathlib import Path
from typing import Any

import click

from energon_ext.cli import echo, option
from energon_ext.cli.mix import SET_BY_ENCODER, make_encoder, named_encoder, refuse_given
from energon_ext.config.mix import sample_entries
from energon_ext.config.yaml_file import splits_of
from energon_ext.encoders.load import load_split
from energon_ext.encoders.pretrain import PackedTaskEncoder
from energon_ext.encoders.text_sources import cached_text
from energon_ext.errors import ConfigError
from energon_ext.prepare.cache import (
    Cached,
    prepare_entry,
    prepare_part_of_entry,
    try_failures_again,
)
from energon_ext.storage.claim import Part
from energon_ext.tokenizers.tokenizers import load_tokenizer


@click.command()
@option.metadataset
@click.option("--split", multiple=True, help="Split to tokenize; may be repeated.  [default: all]")
@click.option("--tokenizer", metavar="NAME", help="Tokenizer: 'bytes', a name or a file.")
@option.special_tokens
@click.option("--task", type=click.Choice(["text", "chat"]), default="text", help="Kind of data.")
@option.answers
@click.option(
    "--encoder",
    metavar="MODULE:FUNCTION",
    help="Function that returns the task encoder of the run; replaces --tokenizer and --task.",
)
@option.jobs
@option.part
@option.trusted_module
def tokenize(
    metadataset: Path,
    split: tuple[str, ...],
    tokenizer: str | None,
    encoder: str | None,
    jobs: int,
    part: Part | None,
    trusted_modules: tuple[str, ...],
    **options: Any,
) -> None:
    """Tokenize the text of METADATASET before a run.

    The tokens are written to the folder given by ENERGON_EXT_CACHE, or to one next to METADATASET,
    where runs with the same tokenizer find them. Run the same command again to continue, or to try
    samples again that failed. To share the work among 20 processes, on any machines with access to
    the folder, give --part 0/20 to --part 19/20.

    Example: energon-ext tokenize mix.yaml --tokenizer my/tokenizer.json --jobs 16
    """
    if encoder is not None:
        refuse_given(["tokenizer", *options], SET_BY_ENCODER)
        task_encoder = named_encoder(encoder, PackedTaskEncoder)
    elif tokenizer is not None:
        special = {token: options.pop(token) for token in ("eos_token", "bos_token")}
        task_encoder = make_encoder(load_tokenizer(tokenizer, **special), **options)
    else:
        raise ConfigError("Give the --tokenizer or the --encoder of the run.")
    texts: dict[Path, Cached] = {}
    for name in split or splits_of(metadataset):
        entries = load_split(metadataset, name, task_encoder.decoder, trusted_modules)
        for entry in sample_entries(entries):
            text = cached_text(task_encoder, entry)
            texts[text.folder] = text
    if not texts:
        raise ConfigError(f"{metadataset}: contains no text, only token files; nothing to do.")
    for text in texts.values():
        if prepare_now(text, jobs, part):
            files = text.open()
            count = f"{len(files):,} documents, {files.num_tokens:,} tokens"
            echo(f"{text.name}: {count} in {text.folder}")


def prepare_now(cached: Cached, jobs: int, part: Part | None) -> bool:
    """Prepare the missing units of a source or part; return True if the source is complete.

    If it is complete already, the samples that failed are tried again.
    """
    if cached.is_complete:
        try_failures_again(cached, jobs, part)
        return True
    if part is None:
        prepare_entry(cached, jobs, wait_seconds=0.0)
        return True
    prepare_part_of_entry(cached, part, jobs)
    if not cached.is_complete:
        echo(f"{cached.name}: part {part} is {cached.verb}, other parts are not.")
    return cached.is_complete
