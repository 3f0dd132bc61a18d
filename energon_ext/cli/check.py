# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext check``: check all token files of a source, and write its catalog."""

import functools
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import click

from energon_ext.cli import echo, option, plural
from energon_ext.data_files import CACHE_VARIABLE
from energon_ext.errors import ConfigError, WorkerError
from energon_ext.prepare.pool import end_with_parent
from energon_ext.progress import progress_bar
from energon_ext.storage.claim import Part
from energon_ext.storage.object_store import file_name, is_remote
from energon_ext.tokens.catalog import (
    Stamp,
    catalog_path,
    lengths_path,
    read_catalog,
    write_catalog,
    write_lengths,
)
from energon_ext.tokens.faults import Report, examine_pair, tokenizer_faults, vocabulary_of
from energon_ext.tokens.index import Pair
from energon_ext.tokens.opening import needs_catalog, needs_lengths, prepared_catalog
from energon_ext.tokens.paths import list_files

#: Pairs with their stamps.
_Checked = list[tuple[Pair, Stamp]]


@click.command()
@click.argument("path", type=option.INPUT)
@click.option("--tokens", is_flag=True, help="Also read all tokens and label weights.")
@click.option(
    "--vocab-size",
    type=option.Count(1),
    help="Number of token ids, for --tokens.  [default: as in the .meta.json of a pair]",
)
@option.jobs
@option.part
def check(
    path: Path | str, tokens: bool, vocab_size: int | None, jobs: int, part: Part | None
) -> None:
    """Check all token files that PATH names, and write their catalog.

    PATH is a pair, a folder of pairs or a pattern, as in a metadataset. Every entry of every index
    is checked: no gaps, no overlaps, no bytes beyond the end of a file; sizes of all files; one
    tokenizer. With --tokens, ids must be in the vocabulary, and weights finite and not negative.
    Every fault is one line, and the command then ends with status 2.

    Without a fault, a run starts from the catalog and does not read the indices again. It is
    written to the folder given by ENERGON_EXT_CACHE, or to one next to the data. A run writes it by
    itself if that takes less than about a minute. To share the work among 20 processes, on any
    machines with access to that folder, give --part 0/20 to --part 19/20.

    Example: energon-ext check data/web --jobs 16
    """
    name = file_name(path)
    if is_remote(name):
        raise ConfigError(f"{path}: indices in an object store are checked when they are copied.")
    listing = list_files(name)
    own = _part_of(listing, part)
    reports = _examine(own, jobs, tokens=tokens, vocab_size=vocab_size)
    checked = [report.checked for report in reports if report.checked is not None]
    faults = [fault for report in reports for fault in report.faults]
    faults += tokenizer_faults([pair for pair, _ in checked])
    prepared = None if faults else prepared_catalog(name, listing)
    if prepared is not None:
        faults += _differences(checked, dict(zip(listing, prepared.stamps)), prepared.path)
    for fault in faults:
        echo(fault)
    if faults:
        raise ConfigError(f"{path}: {plural(len(faults), 'fault')} in {len(own):,} pairs.")
    echo(f"{path}: {_summary([pair for pair, _ in checked])}, no fault")
    unnamed = sum(vocabulary_of(pair) is None for pair, _ in checked)
    if tokens and vocab_size is None and unnamed:
        echo(f"  {unnamed:,} of them name no vocabulary; --vocab-size gives its number of ids")
    _keep(listing, checked, part)


def _part_of(listing: Mapping[str, set[str]], part: Part | None) -> dict[str, set[str]]:
    """Return every N-th pair of a listing; all of it without a part."""
    return dict(listing if part is None else part.of(listing.items()))


def _summary(pairs: Sequence[Pair]) -> str:
    documents, tokens = sum(pair.documents for pair in pairs), sum(pair.tokens for pair in pairs)
    return f"{plural(len(pairs), 'pair')}, {documents:,} documents, {tokens:,} tokens"


def _differences(checked: _Checked, stamps: Mapping[str, Stamp], file: str) -> list[str]:
    """Return a fault for each index that is not the one that a file describes."""
    return [
        f"{pair.prefix}.idx: is not the one in {file}; copy the pair again, or prepare it again."
        for pair, stamp in checked
        if stamp.digest != stamps[pair.prefix].digest
    ]


# Processes --------------------------------------------------------------------------------------


def _examine(
    listing: Mapping[str, set[str]], jobs: int, *, tokens: bool, vocab_size: int | None
) -> list[Report]:
    """Examine pairs in several processes, with a bar of the bytes that they read."""
    suffixes = (".idx", ".bin", ".weights.bin") if tokens else (".idx",)
    num_bytes = sum(_size(prefix + suffix) for prefix in listing for suffix in suffixes)
    examine = functools.partial(examine_pair, tokens=tokens, vocab_size=vocab_size)
    with progress_bar("checking", num_bytes) as bar:
        if min(jobs, len(listing)) <= 1:  # a part may have no pairs
            return [examine(prefix, files, advance=bar.update) for prefix, files in listing.items()]
        found = []
        for report in _examine_together(examine, listing, jobs):
            found.append(report)
            bar.update(num_bytes / len(listing))
        return found


def _examine_together(
    examine: "functools.partial[Report]", listing: Mapping[str, set[str]], jobs: int
) -> Iterator[Report]:
    context = multiprocessing.get_context("fork")
    call = functools.partial(_call, examine)
    try:
        with ProcessPoolExecutor(min(jobs, len(listing)), context, end_with_parent) as pool:
            yield from pool.map(call, listing.items(), chunksize=max(1, len(listing) // (8 * jobs)))
    except BrokenProcessPool as error:
        raise WorkerError("A worker was killed; use fewer --jobs if memory is short.") from error


def _call(examine: "functools.partial[Report]", item: tuple[str, set[str]]) -> Report:
    return examine(*item, advance=lambda num_bytes: None)


def _size(path: str) -> int:
    return os.path.getsize(path) if os.path.isfile(path) else 0


# The catalog ------------------------------------------------------------------------------------


def _keep(listing: Mapping[str, set[str]], checked: _Checked, part: Part | None) -> None:
    """Write the catalog, or that of a part; with the last part, merge them."""
    file = catalog_path(listing)
    if not checked:  # a part without pairs
        return
    parts = [Part(number, part.count) for number in range(part.count)] if part else []
    try:
        if part is not None:
            write_catalog(_path_of(file, part), _part_of(listing, part), checked)
            merged = _merge(listing, file, parts)
            if merged is None:
                echo(f"  part {part} is checked, other parts are not")
                return
            checked = merged
            for fault in tokenizer_faults([pair for pair, _ in checked]):
                raise ConfigError(fault)
        if needs_catalog([pair for pair, _ in checked]):
            pairs = [pair for pair, _ in checked]
            if needs_lengths(pairs):
                write_lengths(lengths_path(file, [stamp for _, stamp in checked]), pairs)
            write_catalog(file, listing, checked)
            echo(f"  the catalog is {file}")
        for each in parts:
            _path_of(file, each).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{file.parent}: cannot be written to ({error.strerror or error}); set "
            f"{CACHE_VARIABLE} to a writable folder."
        ) from error


def _path_of(file: Path, part: Part) -> Path:
    return file.with_name(f".{file.name}.{part.number}-of-{part.count}")


def _merge(listing: Mapping[str, set[str]], file: Path, parts: Sequence[Part]) -> _Checked | None:
    """Return what all parts found, in the order of the listing; None if one is missing."""
    found: dict[str, tuple[Pair, Stamp]] = {}
    for part in parts:
        own = _part_of(listing, part)
        catalog = read_catalog(_path_of(file, part), own) if own else None
        if own and catalog is None:
            return None
        if catalog is not None:
            found.update(zip(own, zip(catalog.pairs, catalog.stamps)))
    return [found[prefix] for prefix in listing]
