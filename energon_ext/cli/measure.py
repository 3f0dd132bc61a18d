# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext measure``: measure the lengths of samples before a run."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

from energon_ext.cli import echo, option
from energon_ext.cli.mix import named_encoder
from energon_ext.cli.tokenize import prepare_now
from energon_ext.config.mix import Entry, sample_entries
from energon_ext.config.yaml_file import splits_of
from energon_ext.encoders.cached_samples import cached_source
from energon_ext.encoders.load import load_split
from energon_ext.encoders.measured import cached_lengths, measure_again
from energon_ext.encoders.mixin import DynamicBlendMixin
from energon_ext.errors import ConfigError
from energon_ext.keyed import KeyedPermutation
from energon_ext.prepare.cache import Cached
from energon_ext.prepare.lengths import LengthTable
from energon_ext.samples.methods import SampleMethods
from energon_ext.storage.claim import Part


@click.command()
@option.metadataset
@click.option("--split", multiple=True, help="Split to measure; may be repeated.  [default: all]")
@click.option(
    "--encoder",
    metavar="MODULE:FUNCTION",
    required=True,
    help="Function that returns the task encoder of the run; the encoder needs a `length_of`.",
)
@option.jobs
@option.part
@click.option(
    "--check",
    metavar="COUNT",
    type=click.IntRange(1),
    help="Measure COUNT samples per source again, and encode them with other random numbers.",
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
    """Measure the sample lengths of METADATASET before a run.

    Whole samples are packed into rows by their lengths. The lengths are written to the folder given
    by ENERGON_EXT_CACHE, or to one next to METADATASET, where runs with the same encoder find them.
    Run the same command again to continue, to measure appended shards, or to try samples again that
    failed. To share the work among 20 processes, on any machines with access to the folder, give
    --part 0/20 to --part 19/20.

    Example: energon-ext measure mix.yaml --encoder my_vlm:encoder --jobs 16
    """
    task_encoder = named_encoder(encoder, DynamicBlendMixin)
    methods = SampleMethods.of(task_encoder)
    if not methods.are_packed:
        raise ConfigError(f"--encoder {encoder}: has no length_of, so it packs no samples.")
    sources: dict[Path, tuple[Entry, Cached]] = {}
    for name in split or splits_of(metadataset):
        for entry in sample_entries(
            load_split(metadataset, name, task_encoder.decoder, trusted_modules)
        ):
            cached = cached_lengths(methods, entry, cached_source(task_encoder, entry))
            sources[cached.folder] = entry, cached
    for entry, cached in sources.values():
        if not prepare_now(cached, jobs, part):
            continue
        table = cached.open()
        echo(f"{cached.name}: {_summary(table)} in {cached.folder}")
        if check is not None:
            _check(functools.partial(measure_again, task_encoder, methods), entry, table, check)


def _summary(table: LengthTable) -> str:
    lengths = table.measured[table.measured > 0]
    if not len(lengths):
        return f"{len(table):,} samples, none of which is in the split"
    numbers = f"{lengths.sum(dtype=np.int64):,} tokens, {lengths.mean():,.1f} on average"
    too_long = f", {table.num_too_long:,} longer than a row" if table.num_too_long else ""
    return f"{len(table):,} samples, {numbers}, {lengths.max():,} at most{too_long}"


def _check(measure: Callable[..., Any], entry: Entry, table: LengthTable, count: int) -> None:
    """Measure some samples again, and see how random their lengths are."""
    numbers = KeyedPermutation(len(table), "check")(np.arange(min(count, len(table))))
    measured = table.measured[numbers].astype(np.int64)
    again, in_a_run = (measure(entry, numbers.tolist(), in_a_run=each) for each in (False, True))
    different = np.flatnonzero(again != measured)
    if len(different):
        first = different[0]
        raise ConfigError(
            f"{entry.key}: {len(different)} of {len(numbers)} samples have changed; sample "
            f"{numbers[first]} now has {again[first]} tokens, {measured[first]} when "
            f"measured. Change the encoding_fingerprint of the encoder, and measure again."
        )
    echo(f"  {len(numbers)} samples measured again: no changes")
    is_failed = (in_a_run == 0) & (measured > 0)
    if is_failed.any():
        echo(f"  {is_failed.sum()} of them cannot be encoded, so a run skips them")
    difference = np.where(is_failed, 0, in_a_run - measured)
    longer, shorter = difference[difference > 0], difference[difference < 0]
    if len(longer):
        echo(
            f"  encoded with other random numbers, {len(longer)} are longer than measured, by up "
            f"to {longer.max()} tokens: full rows will leave out samples; let length_of return the "
            f"largest length"
        )
    if len(shorter):
        echo(
            f"  encoded with other random numbers, {len(shorter)} are shorter than measured, by "
            f"{-shorter.mean():.1f} tokens on average: this much of their rows stays empty"
        )
