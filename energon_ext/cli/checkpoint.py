# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext checkpoint``: what a checkpoint holds, before a run depends on it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from energon_ext.cli import echo, special_tokens, table
from energon_ext.cli.resume import NextRun, SavedData, data_states
from energon_ext.errors import ConfigError, EnergonExtError
from energon_ext.state.checkpoint_folder import CURSOR, newest_checkpoint
from energon_ext.state.match import ENCODER, SourceChange


@click.group()
def checkpoint() -> None:
    """Look into a checkpoint.

    Example: energon-ext checkpoint diff runs/a mix.yaml
    """


@checkpoint.command()
@click.argument("saved", metavar="CHECKPOINT", type=click.Path(path_type=Path))
@click.argument("metadataset", type=click.Path(path_type=Path))
@click.option("--split", default="train", help="Split of the metadataset.")
@click.option("--world-size", type=click.IntRange(1), help="Data-parallel ranks of the next run.")
@click.option("--num-workers", type=click.IntRange(0), help="Workers of a rank in the next run.")
@click.option("--tokenizer", help="Of the next run; text sources are then restored as well.")
@special_tokens
@click.option("--seq-length", type=click.IntRange(2), help="Positions of a row in the next run.")
@click.option("--packing", help="Of the next run.")
@click.option("--trusted-module", multiple=True, help="A module that the YAML may name.")
@click.pass_context
def diff(
    ctx: click.Context,
    /,
    saved: Path,
    metadataset: Path,
    split: str,
    world_size: int | None,
    num_workers: int | None,
    trusted_module: tuple[str, ...],
    **encoder: Any,
) -> None:
    """Show what a resume from CHECKPOINT does with every source of METADATASET.

    CHECKPOINT is the folder of a run (its newest checkpoint is taken), of one checkpoint, or of
    Megatron-LM's data states. The data is built and restored by the code that a run resumes with.
    What no option says of the next run is as the saved one had it. Ends with 1 where the resume
    would be refused.

    Example: energon-ext checkpoint diff runs/a mix.yaml --world-size 64
    """
    folder, cursor, states = _read(saved)
    options = {"path": metadataset, "split_part": split, "trusted_modules": trusted_module}
    try:
        data = SavedData(cursor, states)
        echo(f"{folder}: {data}")
        run = NextRun(data, options, world_size, num_workers, **encoder)
        echo(_changes(run.changes()))
        for line in run.left_out():
            echo(line)
        fixed = sorted((name, v) for name, v in data.fingerprint.items() if name != ENCODER)
        echo("must stay: " + ", ".join(f"{name}={value!r}" for name, value in fixed))
        echo(run.restore())
    except EnergonExtError as error:
        echo(f"refused: {' '.join(str(error).split())}")
        ctx.exit(1)


def _read(path: Path) -> tuple[Path, Any, dict[int, Any]]:
    """The folder of a checkpoint, the cursor in it, and the states of ranks in it."""
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder; name a checkpoint or the folder of a run.")
    folder = newest_checkpoint(path)
    states = data_states(folder) if folder is not None else {}
    if folder is None or not states:
        raise ConfigError(
            f"{path}: no {CURSOR}, data_rank00000.json or train_dataloader_dprank000.pt found. "
            f"Name the folder of a run or of one checkpoint."
        )
    cursor = states.pop(None, None)
    return folder, cursor, {rank: state for rank, state in states.items() if rank is not None}


def _changes(changes: Sequence[SourceChange]) -> str:
    rows = [("source", "resume", "documents read", "tokens read")]
    rows += [
        (
            change.key,
            change.change + (f" (was {change.saved_key})" if change.saved_key else ""),
            f"{change.documents:,}",
            f"{change.tokens:,}",
        )
        for change in changes
    ]
    return table(rows, left=2, indent="  ")
