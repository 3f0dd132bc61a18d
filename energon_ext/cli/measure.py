# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext measure``: the lengths of samples, made before a run."""

from pathlib import Path
from typing import Any

import click
import numpy as np

from energon_ext.cli import echo, option
from energon_ext.cli.mix import named_encoder
from energon_ext.cli.tokenize import make_now, splits_of
from energon_ext.config.mix import Entry
from energon_ext.documents.permutation import KeyedPermutation
from energon_ext.encoders.measured import cached_lengths, measure_again
from energon_ext.encoders.mixin import DynamicBlendMixin
from energon_ext.encoders.text_sources import load_split, of_samples
from energon_ext.errors import ConfigError
from energon_ext.prepare.cache import Cached
from energon_ext.prepare.claim import Part
from energon_ext.prepare.lengths import LengthTable


@click.command()
@option.metadataset
@click.option("--split", multiple=True, help="A split.  [default: all of METADATASET]")
@click.option(
    "--encoder",
    metavar="MODULE:FUNCTION",
    required=True,
    help="Makes the task encoder of the run, which has a `length_of`.",
)
@option.jobs
@option.part
@click.option(
    "--check",
    metavar="COUNT",
    type=click.IntRange(1),
    help="Measure this many samples of each source again, and compare.",
)
@option.trusted_module
def measure(
    metadataset: Path,
    split: tuple[str, ...],
    encoder: str,
    jobs: int,
    part: Part | None,
    check: int | None,
    trusted_modules: tuple[str, ...],
) -> None:
    """Measure the samples of METADATASET once, for rows of whole samples.

    The lengths go to the folder that ENERGON_EXT_CACHE names, else to one beside METADATASET, where
    a run with the same encoder finds them. The same command again continues, and measures shards
    that were appended. --part 0/20 to --part 19/20 measure in 20 processes, on any machines that
    share the folder.

    Example: energon-ext measure mix.yaml --encoder my_vlm:encoder --jobs 16
    """
    made = named_encoder(encoder, DynamicBlendMixin)
    if not hasattr(made, "length_of"):
        raise ConfigError(f"--encoder {encoder}: has no length_of, so it packs no samples.")
    found: dict[Path, tuple[Entry, Cached]] = {}
    for name in split or splits_of(metadataset):
        for entry in of_samples(load_split(metadataset, name, made, trusted_modules)):
            cached = cached_lengths(made, entry)
            found[cached.folder] = entry, cached
    for entry, cached in found.values():
        if not make_now(cached, jobs, part):
            continue
        table = cached.open()
        echo(f"{cached.name}: {_summary(table)} in {cached.folder}")
        if check is not None:
            _check(made, entry, table, check)


def _summary(table: LengthTable) -> str:
    lengths = table.lengths[table.lengths > 0]
    if not len(lengths):
        return f"{len(table):,} samples, none of which can be measured"
    numbers = f"{lengths.sum(dtype=np.int64):,} tokens, {lengths.mean():,.1f} on average"
    too_long = f", {table.num_too_long:,} longer than a row" if table.num_too_long else ""
    return f"{len(table):,} samples, {numbers}, {lengths.max():,} at most{too_long}"


def _check(encoder: Any, entry: Entry, table: LengthTable, count: int) -> None:
    numbers = KeyedPermutation(len(table), "check")(np.arange(min(count, len(table))))
    again = measure_again(encoder, entry, numbers.tolist())
    different = np.flatnonzero(again != table.lengths[numbers])
    if len(different):
        first = different[0]
        raise ConfigError(
            f"{entry.key}: {len(different)} of {len(numbers)} samples have other lengths now; "
            f"sample {numbers[first]} has {again[first]} tokens, {table.lengths[numbers[first]]} "
            f"were measured. Change the encoding_fingerprint of the encoder, and measure again."
        )
    echo(f"  {len(numbers)} samples measured again: all as before")
