# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Opens the local pairs of a source: checked now, or as its catalog says.

A few small pairs are simply read and checked at every start. Otherwise a catalog saves that: the
``prepared.json`` of `energon-ext prepare`, or a file in the cache that the first process to need it
writes, while the others wait. For prepared pairs such a file remembers when their indices were
compared with their digests: one process does it for all that share the cache, so that every node
with a copy of the data compares all of its own. No collective is used.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from energon_ext.data_files import CACHE_VARIABLE, read_data, reading
from energon_ext.errors import ConfigError, log_of
from energon_ext.storage.checked_array import CheckedArray
from energon_ext.storage.claim import UnwritableError, make_once
from energon_ext.tokens.catalog import (
    Catalog,
    Listing,
    Stamp,
    catalog_path,
    check_pair,
    digest_of,
    lengths_path,
    read_catalog,
    read_lengths,
    root_of,
    times_of,
    write_catalog,
    write_lengths,
)
from energon_ext.tokens.index import (
    ALL_SUFFIXES,
    META_SUFFIX,
    PREPARED,
    Pair,
    check_columns,
    check_index,
    index_bytes,
    open_index,
    pair_of,
    read_pair,
)
from energon_ext.tokens.meta import read_meta
from energon_ext.tokens.prepared import Prepared, parse_prepared
from energon_ext.tokens.unchanged import Share, check_digest, check_unchanged

logger = log_of(__name__)

#: Sources with at most this many pairs and bytes of indices need no catalog.
FEW_PAIRS, FEW_BYTES = 64, 64 * 2**20

#: Approximate speed of a check, and the longest one that starts automatically.
BYTES_PER_SECOND, PAIRS_PER_SECOND = 200e6, 1000
MAX_SECONDS = 60.0

#: Indices whose digests are computed at the same time.
_THREADS = 8

_MAX_PREPARED_BYTES = 2**30


def open_pairs(
    path: str, listing: Listing, share: Share | None
) -> tuple[list[Pair], CheckedArray | None, list[str] | None]:
    """Return the pairs of a listing, checked, and what is known of them without their indices.

    This is the length of each of their documents, uint32 [documents], and the SHA-256 of each
    index; either is None if it is read from the indices.

    Args:
        path: what the listing was made from, for messages.
        share: the part of the files that this process asks about, or None if other processes do.

    Raises:
        ConfigError: a file is missing, damaged, or not the one that was checked before; or the
            pairs were never checked, and that would take long.
    """
    if len(listing) <= FEW_PAIRS:
        pairs = [read_pair(prefix, files) for prefix, files in listing.items()]
        if not needs_catalog(pairs):
            return [check_now(pair) for pair in pairs], None, None
    file, catalog = catalog_path(listing), prepared_catalog(path, listing)
    if catalog is None:
        catalog = _cached_catalog(path, listing, file)
    else:
        catalog = _compare_once(catalog, path, listing, file)
    if share is not None:
        check_unchanged(catalog, share)
    lengths = _column(file, catalog) if needs_lengths(catalog.pairs) else None
    return list(catalog.pairs), lengths, [stamp.digest for stamp in catalog.stamps]


def needs_catalog(pairs: Sequence[Pair]) -> bool:
    """Return True if pairs are too many or too large to be checked at every start."""
    return len(pairs) > FEW_PAIRS or sum(map(index_bytes, pairs)) > FEW_BYTES


def needs_lengths(pairs: Sequence[Pair]) -> bool:
    """Return True if a plan should not have to open each pair for the lengths of its documents."""
    return len(pairs) > FEW_PAIRS


def check_now(pair: Pair) -> Pair:
    """Check the index of a pair, and return the pair with what that found."""
    is_one = check_index(pair, open_index(pair))
    # A copy of the pair would map the index again.
    object.__setattr__(pair, "one_sequence_each", is_one)
    return pair


def prepared_catalog(path: str, listing: Listing) -> Catalog | None:
    """Return what `energon-ext prepare` wrote about pairs; None if it did not write all of them."""
    root = root_of(listing)
    above = os.path.dirname(root)
    file = os.path.join(above, PREPARED)
    try:
        prepared = parse_prepared(read_data(file, _MAX_PREPARED_BYTES), above)
    except (OSError, ConfigError):
        return None
    if not all(prefix in prepared.counts for prefix in listing):
        return None
    if os.path.realpath(path) == os.path.realpath(root):
        _check_complete(root, file, prepared, listing)
    for prefix, files in listing.items():
        if files != {each for each in files.union(ALL_SUFFIXES) if prefix + each in prepared.files}:
            return None  # something was removed or added, which a check of the pairs finds
    metas = {
        prepared.files[prefix + META_SUFFIX].sha256: prefix + META_SUFFIX
        for prefix, files in listing.items()
        if META_SUFFIX in files
    }
    read = {digest: read_meta(meta, meta) for digest, meta in metas.items()}
    pairs, stamps = [], []
    for prefix, files in listing.items():
        header, known = prepared.header(prefix), prepared.files
        meta = known.get(prefix + META_SUFFIX)
        content = None if meta is None else read[meta.sha256]
        pairs.append(pair_of(prefix, header, header[-1], content, None, True))
        check_columns(pairs[-1], files, prepared.size_of)
        stamps.append(Stamp((), str(known[prefix + ".idx"].sha256)))
    return Catalog(file, pairs, stamps, "prepare it again")


def _compare_once(prepared: Catalog, path: str, listing: Listing, file: Path) -> Catalog:
    """Return a prepared catalog with the times at which its digests were those of the files.

    The first process that needs them compares all indices. A catalog without times is returned if
    that would take long, or cannot be remembered: its files count as touched at every start.
    """

    def read() -> Catalog | None:
        found = read_catalog(file, listing)
        digests = [stamp.digest for stamp in prepared.stamps]
        is_same = found is not None and [stamp.digest for stamp in found.stamps] == digests
        return replace(prepared, stamps=found.stamps) if found and is_same else None

    def compare(beat: Callable[[], None]) -> Catalog:
        compared = _compare_all(prepared, beat)
        write_catalog(file, listing, [*zip(compared.pairs, compared.stamps)])
        logger.info("%s: compared its %d indices with %s.", path, len(listing), prepared.path)
        return compared

    if (known := read()) is not None:
        return known
    if _seconds_of_work(listing) > MAX_SECONDS:
        reason = f"run `energon-ext check {path}` once, which remembers it"
    else:
        try:
            return make_once(file, read, compare)
        except OSError as error:
            reason = f"set {CACHE_VARIABLE} to a writable folder to remember it ({error})"
    logger.warning("%s: indices are compared at every start; %s.", path, reason)
    return prepared


def _compare_all(prepared: Catalog, beat: Callable[[], None]) -> Catalog:
    """Compare the digest of every index; return the catalog with the times of the files."""
    prefixes = [pair.prefix for pair in prepared.pairs]
    # The times come first: a file that is replaced meanwhile is then compared again.
    times = [times_of(prefix) for prefix in prefixes]
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = pool.map(lambda prefix: digest_of(f"{prefix}.idx", beat), prefixes)
        for number, digest in enumerate(digests):
            check_digest(prepared, number, digest)
    stamps = [Stamp(each, stamp.digest) for each, stamp in zip(times, prepared.stamps)]
    return replace(prepared, stamps=stamps)


def _check_complete(root: str, file: str, prepared: Prepared, listing: Listing) -> None:
    """Raise ConfigError if a prepared folder lacks pairs."""
    folder = os.path.join(root, "")
    missing = sorted(
        prefix for prefix in prepared.counts if prefix.startswith(folder) and prefix not in listing
    )
    if missing:
        raise ConfigError(
            f"{root}: {len(missing)} of the pairs in {file} are missing, the first: {missing[0]}; "
            f"copy the folder again, or name the pairs to read by a pattern."
        )


def _cached_catalog(path: str, listing: Listing, file: Path) -> Catalog:
    """Return the catalog in the cache; make it if there is none, or wait for another process."""
    try:
        return make_once(
            file,
            lambda: read_catalog(file, listing),
            lambda beat: _keep(path, listing, check_all(path, listing, beat), file),
        )
    except UnwritableError as error:
        return _keep(path, listing, check_all(path, listing), None, error)


def _column(path: Path, catalog: Catalog) -> CheckedArray | None:
    """Return the lengths of all documents in one file, so that a plan opens no other one.

    None if that file is missing and cannot be written, or would take long to write.
    """
    pairs, file = catalog.pairs, lengths_path(path, catalog.stamps)
    documents = sum(pair.documents for pair in pairs)
    if len(pairs) / PAIRS_PER_SECOND > MAX_SECONDS:
        return read_lengths(file, documents)
    try:
        return make_once(
            file,
            lambda: read_lengths(file, documents),
            lambda beat: write_lengths(file, pairs, beat),
        )
    except OSError:
        return None  # lengths are then read from the indices


def check_all(
    path: str, listing: Listing, beat: Callable[[], None] = lambda: None
) -> list[tuple[Pair, Stamp]]:
    """Check all pairs at once; ConfigError with the command to run if that takes long."""
    seconds = _seconds_of_work(listing)
    if seconds > MAX_SECONDS:
        num_bytes = sum(_size(f"{prefix}.idx") for prefix in listing)
        raise ConfigError(
            f"{path}: its {len(listing):,} indices with {num_bytes / 1e9:,.1f} GB have not been "
            f"checked yet (about {seconds:,.0f} s of work). Run `energon-ext check {path}` first; "
            f"{CACHE_VARIABLE} sets the folder for the result."
        )
    checked = []
    for prefix, files in listing.items():
        checked.append(check_pair(prefix, files, lambda num_bytes: beat()))
        beat()
    return checked


def _keep(
    path: str,
    listing: Listing,
    checked: list[tuple[Pair, Stamp]],
    file: Path | None,
    error: OSError | None = None,
) -> Catalog:
    """Write the catalog of checked pairs to a file; warn if there is none that can be written."""
    try:
        if file is not None:
            catalog = write_catalog(file, listing, checked)
            logger.info("%s: checked its %d pairs once, see %s.", path, len(checked), file)
            return catalog
    except OSError as raised:
        error = raised
    logger.warning(
        "%s: its %d pairs are checked at every start, since the result cannot be kept (%s); set %s "
        "to a writable folder.",
        *(path, len(listing), error, CACHE_VARIABLE),
    )
    pairs, stamps = zip(*checked)
    return Catalog(path, pairs, stamps, "start again")


def _seconds_of_work(listing: Listing) -> float:
    """Estimate how long one process takes to read all indices."""
    num_bytes = sum(_size(f"{prefix}.idx") for prefix in listing)
    return num_bytes / BYTES_PER_SECOND + len(listing) / PAIRS_PER_SECOND


def _size(path: str) -> int:
    with reading(path):
        return os.stat(path).st_size
