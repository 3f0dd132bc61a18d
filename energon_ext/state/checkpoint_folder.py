# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Data states in folders of checkpoints, as the examples and Megatron-LM write them.

A save is a folder ``iter_0000030``; the tracker file beside it names the newest whole one.
"""

import io
import json
import re
import zipfile
from pathlib import Path
from typing import Any, Iterator, Mapping

import torch

from energon_ext.errors import StateFormatError
from energon_ext.state.files import first_line, read_json, read_small_file, write_file
from energon_ext.state.plain import from_plain
from energon_ext.state.schema import STOCK_RUN, check_seal, sealed

TRACKER, CURSOR = "latest_checkpointed_iteration.txt", "data.json"
MOST_BYTES = 2**30
_RANK_FILE = re.compile(r"(?:data_rank|train_dataloader_dprank)(\d+)\.(?:json|pt)")


def tracked_iteration(folder: Path) -> int | None:
    """Return the iteration that the tracker file of a folder names; None without one."""
    if not (folder / TRACKER).exists():
        return None
    text = read_small_file(folder / TRACKER, 100).decode(errors="replace").strip()
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise StateFormatError(f"{folder / TRACKER} holds {text!r}, not the number of a save.")
    return int(text)


def checkpoints_in(run_or_folder: Path) -> list[Path]:
    """Return the folders that hold data states, oldest first, up to the one that is tracked.

    Args:
        run_or_folder: of a run, of its checkpoints, of one save; ``--save`` or
            ``--dataloader-save`` of Megatron-LM.
    """
    found, tracked = {}, None
    for place in (".", "checkpoints", "data", "checkpoints/data"):
        tracked = tracked_iteration(run_or_folder / place) if tracked is None else tracked
        for folder in (run_or_folder / place).glob("iter_*"):
            if folder.name[5:].isdecimal() and any(_files(folder)):
                found[int(folder.name[5:])] = folder
    if not found and any(_files(run_or_folder)):
        return [run_or_folder]
    if tracked is not None and tracked not in found:
        raise StateFormatError(f"{run_or_folder}: save {tracked}, which is tracked, has no state.")
    return [found[each] for each in sorted(found) if tracked is None or each <= tracked]


def newest_checkpoint(run_or_folder: Path) -> Path | None:
    """Return the last of :func:`checkpoints_in`, None where there is none."""
    return next(reversed(checkpoints_in(run_or_folder)), None)


def cursors_in(folder: Path) -> Iterator[tuple[int | None, Any]]:
    """Read the data states of one save: (None, the cursor of all ranks), or (rank, its state)."""
    for rank, path in _files(folder):
        if path.suffix == ".pt":
            yield rank, read_megatron_lm_state(path)
        else:
            yield rank, read_sealed(path) if rank is None else read_state(path)


def write_sealed(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object with a digest of itself."""
    write_file(path, json.dumps(sealed(content)).encode())


def read_sealed(path: Path) -> dict[str, Any]:
    """Read a JSON object that carries a digest, which is verified and stays in it."""
    content: dict[str, Any] = read_json(path, MOST_BYTES)
    try:
        check_seal(content)
        return content
    except StateFormatError as error:
        raise StateFormatError(f"{path}: {error}") from error


def write_state(path: Path, state: Any) -> None:
    """Write the data state of one rank, JSON values."""
    write_sealed(path, {"state": state})


def read_state(path: Path) -> Any:
    """Read what :func:`write_state` wrote; StateFormatError where that is missing or damaged."""
    content = read_sealed(path)
    if "state" not in content:
        raise StateFormatError(f"{path} holds no data state of a rank.")
    return content["state"]


def read_megatron_lm_state(path: Path) -> Any:
    """Read the data state that Megatron-LM saved for one rank, running nobody's code.

    StateFormatError where it is missing, damaged, or holds objects.
    """
    content = read_small_file(path, MOST_BYTES)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > len(content):
                raise ValueError("it unpacks to more than its size")  # torch.save does not pack
        saved = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        if not isinstance(saved, dict) or "dataloader_state_dict" not in saved:
            raise ValueError("it has no dataloader_state_dict, so Megatron-LM did not write it")
        state = saved["dataloader_state_dict"]
        from_plain(state, most_values=len(content))  # refuses what is larger than its file
        return state
    except Exception as error:  # a malformed pickle can raise anything
        # torch wraps its reason in many lines of advice on how to switch the check off
        reason = first_line(error.__context__ or error).split(" by default")[0]
        advice = STOCK_RUN if "megatron.energon" in reason else "Copy it again from where it came."
        raise StateFormatError(
            f"{path} cannot be loaded, and nothing in it was run: {reason}. {advice}"
        ) from error


def _files(folder: Path) -> list[tuple[int | None, Path]]:
    """The cursor, or the file of each rank; of a rank that has several, the first."""
    if (folder / CURSOR).exists():
        return [(None, folder / CURSOR)]
    paths = sorted(folder.rglob("*rank*"), reverse=True)
    ranks = {int(match[1]): path for path in paths if (match := _RANK_FILE.fullmatch(path.name))}
    return sorted(ranks.items())
