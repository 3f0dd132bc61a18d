# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext checkpoint``: what a checkpoint holds, before a run depends on it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator, Sequence

import click

from energon_ext.errors import ConfigError, EnergonExtError

if TYPE_CHECKING:
    from megatron.energon.savable_loader import SavableDataLoaderState

    from energon_ext.state.match import SourceChange

#: Of a data state: one of this package's store, one of Megatron-LM's.
_DATA_FILE = re.compile(r"(data_rank|train_dataloader_dprank)(\d+)\.pt")

_REFUSED_EXIT_CODE = 1


@click.group()
def checkpoint() -> None:
    """Look into a checkpoint."""


@checkpoint.command()
@click.argument("saved", metavar="CHECKPOINT", type=click.Path(path_type=Path))
@click.argument("metadataset", type=click.Path(path_type=Path))
@click.option("--split", default="train", help="Split of the metadataset.")
@click.option("--world-size", type=click.IntRange(1), help="Data-parallel ranks of the next run.")
@click.option("--num-workers", type=click.IntRange(0), help="Workers of a rank in the next run.")
@click.option("--trusted-module", multiple=True, help="A module that the YAML may name.")
@click.pass_context
def diff(
    ctx: click.Context,
    saved: Path,
    metadataset: Path,
    split: str,
    world_size: int | None,
    num_workers: int | None,
    trusted_module: tuple[str, ...],
) -> None:
    """Show what a resume from CHECKPOINT does with every source of METADATASET.

    CHECKPOINT is the folder of a run (its newest checkpoint is taken), of one checkpoint, or of
    Megatron-LM's data states. Ends with 1 where the resume would be refused.
    """
    from energon_ext.encoders.load import source_names
    from energon_ext.state.match import compare_sources
    from energon_ext.state.regroup import check_nothing_waits, choices_in, workers_of

    folder, states = _read_states(saved)
    names = source_names(metadataset, split_part=split, trusted_modules=trusted_module)
    layout = (len(states), workers_of(states[0]))
    click.echo(f"{folder}: {layout[0]} rank(s) with {layout[1]} worker(s)")
    try:
        choices = [choice for state in states for choice in choices_in(state).values()]
        if not choices:
            raise ConfigError(f"{folder}: no worker had begun when this was saved.")
        changes = compare_sources(choices, names)
        click.echo(_table(changes))
        click.echo(_fixed(choices[0]["fingerprint"]))
        for state in states:
            check_nothing_waits(state, changes)
        now = (world_size or layout[0], layout[1] if num_workers is None else num_workers)
        _check_layout(changes, layout, now)
    except EnergonExtError as error:
        click.echo(f"refused: {' '.join(str(error).split())}")
        ctx.exit(_REFUSED_EXIT_CODE)


def _read_states(path: Path) -> tuple[Path, list[SavableDataLoaderState]]:
    """The data states of all ranks, and the folder they were found in."""
    from megatron.energon.savable_loader import SavableDataLoaderState

    from energon_ext.state.manifest import MANIFEST, read_manifest
    from energon_ext.state.serialize import read_state_file

    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder; name a checkpoint or the folder of a run.")
    folder = _newest(path)
    records = {}
    if (folder / MANIFEST).exists():
        records = read_manifest(folder)["files"]
    found = sorted(
        (int(match[2]), file)
        for file in folder.rglob("*.pt")
        if (match := _DATA_FILE.fullmatch(file.name))
    )
    ranks = [rank for rank, _ in found]
    if not found or ranks != list(range(len(found))):
        raise ConfigError(
            f"{folder}: data states of the ranks {ranks} found; those of all ranks are needed, "
            f"as data_rank00000.pt or train_dataloader_dprank000.pt and so on. Name the folder of "
            f"one checkpoint."
        )
    states = []
    for _, file in found:
        content = read_state_file(file, records.get(file.name))
        if isinstance(content, dict) and "dataloader_state_dict" in content:
            content = content["dataloader_state_dict"]
        if not isinstance(content, SavableDataLoaderState):
            raise ConfigError(f"{file}: holds a {type(content).__name__}, no data state.")
        states.append(content)
    return folder, states


def _newest(path: Path) -> Path:
    from energon_ext.state.checkpoint import CheckpointStore

    newest = CheckpointStore(path).latest()
    return path if newest is None else newest.path


def _check_layout(
    changes: Sequence[SourceChange], saved: tuple[int, int], now: tuple[int, int]
) -> None:
    bound = [change.key for change in changes if not change.any_workers]
    before, after = (ranks * max(1, workers) for ranks, workers in (saved, now))
    if before != after and bound:
        raise ConfigError(
            f"{saved[0]} x {saved[1]} became {now[0]} x {now[1]} ranks x workers, and text sources "
            f"({', '.join(bound)}) continue with as many workers in all as before only."
        )


def _table(changes: Sequence[SourceChange]) -> str:
    rows = [("source", "resume", "documents read", "tokens read", "other ranks and workers")]
    rows += [
        (
            change.key,
            change.change + (f" (was {change.saved_key})" if change.saved_key else ""),
            f"{change.rows:,}",
            f"{change.tokens:,}",
            "possible" if change.any_workers else "not possible",
        )
        for change in changes
    ]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        f"  {key:<{widths[0]}}  {change:<{widths[1]}}  {rows:>{widths[2]}}  {tokens:>{widths[3]}}"
        f"  {elsewhere}"
        for key, change, rows, tokens, elsewhere in rows
    )


def _fixed(fingerprint: dict[str, Any]) -> str:
    """What the next run must have as the saved one had it."""
    fields: Iterator[str] = (f"{name}={value!r}" for name, value in sorted(fingerprint.items()))
    return "must stay: " + ", ".join(fields)
