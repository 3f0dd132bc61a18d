# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The documents with the highest mean loss, for ``energon-ext report``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from energon_ext.cli import option
from energon_ext.cli.mix import open_mix
from energon_ext.cli.saved import saved_cursors
from energon_ext.config.run_fields import MAX_EXCLUDED
from energon_ext.data_files import read_data
from energon_ext.encoders.written_tokenizer import tokenizer_of_plan
from energon_ext.errors import ConfigError
from energon_ext.metrics.document_losses import DocumentLoss, DocumentLosses
from energon_ext.plan.lookup import find_blend
from energon_ext.plan.run import Run
from energon_ext.state.files import write_file

HEAD = ("document", "mean loss", "tokens", "visits", "first step", "last step", "from")
MAX_BYTES = 2**30

document_options = option.together(
    click.option(
        "--documents", type=click.IntRange(1), help="List this many documents of highest loss."
    ),
    click.option("--after", type=option.Count(0), help="Count their losses after this step only."),
    click.option(
        "--min-tokens",
        type=option.Count(1),
        help="List only documents with at least this many labels.",
    ),
    click.option(
        "--metadataset", type=option.INPUT, help="Metadataset that says where documents come from."
    ),
    click.option(
        "--write-exclude", type=option.FILE, help="Add the documents to this file, for `exclude`."
    ),
)


def highest_documents(
    run_dir: Path,
    documents: int | None,
    after: int | None,
    min_tokens: int | None,
    metadataset: Path | None,
    write_exclude: Path | None,
) -> list[tuple[str, ...]]:
    """Return a table of the documents with the highest mean loss, header first; add them to a file.

    Returns an empty list if no number of ``documents`` is given.
    """
    if documents is None:
        further = (after, min_tokens, metadataset, write_exclude)
        for name, value in zip(("after", "min-tokens", "metadataset", "write-exclude"), further):
            if value is not None:
                raise ConfigError(f"--{name}: is for --documents; give a number of them as well.")
        return []
    losses = DocumentLosses(run_dir, after or 0)
    highest = losses.highest(documents, min_tokens or 1)
    origins = _origins(highest, metadataset, run_dir)
    if write_exclude is not None:
        _add_to(write_exclude, highest, origins)
    return [HEAD, *map(_cells, highest, origins)]


def _cells(each: DocumentLoss, origin: str) -> tuple[str, ...]:
    counts = (each.tokens, each.visits, each.first, each.last)
    name = f"{each.source}:{each.document}"
    return (name, f"{each.mean:.3f}", *(f"{count:,}" for count in counts), origin)


def _open(run_dir: Path, metadataset: Path) -> Run:
    """Open the data of a run: as its newest state says, or text if it has none here."""
    options: dict[str, Any] = {"split_part": "train", "trusted_modules": ()}
    if cursors := saved_cursors(run_dir, may_be_none=True):
        return cursors[-1].dataset(metadataset, **options)
    options |= dict.fromkeys(("tokenizer", "eos_token", "bos_token"))
    run: Run = find_blend(open_mix(metadataset, default_tokenizer=tokenizer_of_plan, **options)[0])
    return run


def _origins(highest: Sequence[DocumentLoss], metadataset: Path | None, run_dir: Path) -> list[str]:
    """Return where each document comes from; empty without a metadataset, or if it is unknown."""
    if metadataset is None:
        return [""] * len(highest)
    blend, found = _open(run_dir, metadataset), []
    for each in highest:
        if each.source not in blend.sources:
            raise ConfigError(
                f"{metadataset}: has no source {each.source}, which the run read; give the "
                f"metadataset of the run."
            )
        file, number, key = blend.sources[each.source].reader.origin(each.document)
        place = f"number {number} of {file}" if file else ""
        found.append(f"{place} (from {key})" if key else place)
    return found


def _add_to(path: Path, highest: Sequence[DocumentLoss], origins: Sequence[str]) -> None:
    """Add documents to a file for `exclude`, each below a comment, unless it has them."""
    is_there = path.exists()
    before = read_data(path, MAX_BYTES).decode(errors="surrogateescape") if is_there else ""
    known, lines = {line.strip() for line in before.splitlines()}, []
    for each, origin in zip(highest, origins):
        line = f"{each.source}:{each.document}"
        if line not in known:
            about = f"# mean loss {each.mean:.3f} over {each.tokens} tokens"
            lines += [f"{about}, {origin}" if origin else about, line]
    if len(known) + len(lines) > MAX_EXCLUDED:
        raise ConfigError(f"{path}: at most {MAX_EXCLUDED:,} lines are read; list fewer documents.")
    if before and not before.endswith("\n"):
        before += "\n"
    text = before + "".join(f"{line}\n" for line in lines)
    write_file(path, text.encode(errors="surrogateescape"))
