# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Reads and writes data states in checkpoint folders of the examples and of Megatron-LM.

A save is a folder ``iter_0000030``; the tracker file next to it names the newest complete save.
"""

import io
import json
import re
import zipfile
from pathlib import Path
from typing import Any, Iterator, Mapping

import torch

from energon_ext.errors import StateFormatError, first_line
from energon_ext.state.files import read_small_file, read_small_json, write_file
from energon_ext.state.plain import from_plain
from energon_ext.state.schema import STOCK_RUN, check_seal, seal

TRACKER, CURSOR = "latest_checkpointed_iteration.txt", "data.json"
MAX_BYTES = 2**30
_RANK_FILE = re.compile(r"(?:data_rank|train_dataloader_dprank)(\d+)\.(?:json|pt)")


def tracked_iteration(folder: Path) -> int | None:
    """Return the iteration in the tracker file of a folder; None if there is no such file."""
    if not (folder / TRACKER).exists():
        return None
    text = read_small_file(folder / TRACKER, 100).decode(errors="replace").strip()
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise StateFormatError(f"{folder / TRACKER}: contains {text!r}, not the number of a save.")
    return int(text)


def checkpoints_in(run_or_folder: Path) -> list[Path]:
    """Return the folders with data states, oldest first, up to the tracked one.

    Args:
        run_or_folder: folder of a run, of its checkpoints or of one save; ``--save`` or
            ``--dataloader-save`` of Megatron-LM.
    """
    saves, tracked = {}, None
    for place in (".", "checkpoints", "data", "checkpoints/data"):
        tracked = tracked_iteration(run_or_folder / place) if tracked is None else tracked
        for folder in (run_or_folder / place).glob("iter_*"):
            if folder.name[5:].isdecimal() and any(_files(folder)):
                saves[int(folder.name[5:])] = folder
    if not saves and any(_files(run_or_folder)):
        return [run_or_folder]
    if tracked is not None and tracked not in saves:
        raise StateFormatError(f"{run_or_folder}: the tracked save {tracked} has no data state.")
    return [saves[each] for each in sorted(saves) if tracked is None or each <= tracked]


def newest_checkpoint(run_or_folder: Path) -> Path | None:
    """Return the last of :func:`checkpoints_in`, None if there is none."""
    return next(reversed(checkpoints_in(run_or_folder)), None)


def cursors_in(folder: Path) -> Iterator[tuple[int | None, Any]]:
    """Yield the data states of a save: (None, cursor of all ranks), or (rank, state) for each."""
    for rank, path in _files(folder):
        if path.suffix == ".pt":
            yield rank, read_megatron_lm_state(path)
        else:
            yield rank, read_sealed(path) if rank is None else read_state(path)


def write_sealed(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object with a digest of itself."""
    write_file(path, json.dumps(seal(content)).encode())


def read_sealed(path: Path) -> dict[str, Any]:
    """Read a JSON object and verify its digest, which is kept."""
    content: dict[str, Any] = read_small_json(path, MAX_BYTES)
    try:
        check_seal(content)
        return content
    except StateFormatError as error:
        raise StateFormatError(f"{path}: {error}") from error


def write_state(path: str | Path, state: Any) -> None:
    """Write the data state of one rank, given as JSON values, and its folder if it is missing."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_sealed(path, {"state": state})


def read_state(path: str | Path) -> Any:
    """Read what :func:`write_state` wrote; StateFormatError if it is missing or damaged."""
    content = read_sealed(Path(path))
    if "state" not in content:
        raise StateFormatError(f"{path}: contains no data state of a rank.")
    return content["state"]


def read_megatron_lm_state(path: Path) -> Any:
    """Read the data state that Megatron-LM saved for one rank, without running code in it.

    StateFormatError if it is missing, damaged, or contains objects.
    """
    content = read_small_file(path, MAX_BYTES)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > len(content):
                raise ValueError("it unpacks to more than its size")  # torch.save never compresses
        saved = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        if not isinstance(saved, dict) or "dataloader_state_dict" not in saved:
            raise ValueError("it has no dataloader_state_dict, so Megatron-LM did not write it")
        state = saved["dataloader_state_dict"]
        from_plain(state, max_values=len(content))  # rejects a state larger than its file
        return state
    except Exception as error:  # a malformed pickle can raise anything
        # torch wraps the reason in many lines of advice on how to disable the check
        reason = first_line(error.__context__ or error).split(" by default")[0]
        advice = STOCK_RUN if "megatron.energon" in reason else "Copy it again."
        raise StateFormatError(
            f"{path}: cannot be loaded, and no code in it was run: {reason}. {advice}"
        ) from error


def _files(folder: Path) -> list[tuple[int | None, Path]]:
    """Return the cursor, or the first file of each rank."""
    if (folder / CURSOR).exists():
        return [(None, folder / CURSOR)]
    paths = sorted(folder.rglob("*rank*"), reverse=True)
    ranks = {int(match[1]): path for path in paths if (match := _RANK_FILE.fullmatch(path.name))}
    return sorted(ranks.items())
