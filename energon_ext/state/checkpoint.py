# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Model and data state on disk: one folder per save, its manifest written last.

A save goes in steps. After each, every rank waits for the slowest; if one fails, all raise:

1. rank 0 removes what unfinished saves left behind and makes ``step_00000010`` (a second save of
   the same step makes ``step_00000010.2``: nothing is ever replaced in place);
2. every rank writes its own files; then all write the model together, as the caller says;
3. rank 0 writes ``data.json``, the cursor that all ranks share, and ``manifest.json``, then removes
   all but the newest ``keep`` complete checkpoints, of each the manifest first.

A folder is a checkpoint if and only if it holds a manifest, so a process killed at any instant
leaves the previous checkpoint or the new one.

The manifest has the size of every file, and the SHA-256 of every file of the data. Of the model it
has that of files up to 16 MiB, which say where each tensor is. To read the tensors back as well,
hundreds of gigabytes, would double the time of a save: of a large file it is noticed that it is
missing or cut, and not that a bit has changed. Nothing falls back to an older checkpoint by itself.

Example:
    >>> import tempfile
    >>> root = tempfile.mkdtemp()
    >>> write_model = lambda folder: (folder / "weights").write_text("0.5")
    >>> with CheckpointStore(root, keep=2) as store:
    ...     for step in (10, 20, 30):
    ...         path = store.save(step, write_model=write_model, data={"row": 16 * step})
    >>> checkpoint = CheckpointStore(root).latest()
    >>> checkpoint.path.name, checkpoint.data(), (checkpoint.model() / "weights").read_text()
    ('step_00000030', {'row': 480}, '0.5')
    >>> CheckpointStore(root).open(20).step
    20
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections import ChainMap, Counter
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, Iterator, Mapping

import torch.distributed as dist

from energon_ext.arguments import check_integer
from energon_ext.errors import ConfigError, EnergonExtError, StateFormatError
from energon_ext.state.manifest import (
    MANIFEST,
    read_manifest,
    records_below,
    to_json,
    write_manifest,
)
from energon_ext.state.serialize import (
    check_record,
    first_line,
    fsync,
    read_file,
    read_state_file,
    write_file,
    write_state_file,
)
from energon_ext.state.together import on_all_ranks
from energon_ext.state.writer_lock import writer_lock

MODEL, DATA = "model", "data.json"

_DIRECTORY = re.compile(r"step_(\d{8,})(?:\.(\d+))?")
_FILE_NAME = re.compile(r"[\w-]+(\.[\w-]+)*(?<!\.tmp)", re.ASCII)


@dataclass(frozen=True)
class Checkpoint:
    """One complete save, as its manifest describes it.

    Attributes:
        path: its folder.
        step: step of the training run it was saved at.
        metadata: what the caller gave to :meth:`CheckpointStore.save`, as JSON.
        save_index: 1, 2, ... in the order of saving.
        files: ``{name: {"bytes": int, "sha256": hex}}`` of all ranks, of the model ``model/...``.
    """

    path: Path
    step: int
    metadata: dict[str, Any]
    save_index: int
    files: dict[str, dict[str, Any]]

    def data(self) -> Any:
        """The cursor that all ranks share, verified; None where the save had none.

        Raises:
            StateFormatError: the file is missing or damaged.
        """
        record = self.files.get(DATA)
        return json.loads(read_file(self.path / DATA, record)) if record else None

    def model(self) -> Path | None:
        """The folder of the model, verified; None where the save had none.

        Raises:
            StateFormatError: a file is missing, damaged, or was not saved.
        """
        saved = {name: rec for name, rec in self.files.items() if name.startswith(f"{MODEL}/")}
        found = records_below(self.path, MODEL)
        for name in sorted({*saved, *found}):
            check_record(self.path / name, found.get(name), saved.get(name))
        return self.path / MODEL if saved else None

    def load(self, name: str) -> Any:
        """Read the file of a rank, verified first; runs nobody's code. Tensors are on the CPU.

        Raises:
            ConfigError: the checkpoint has no such file.
            StateFormatError: the file is missing or damaged, or holds a class that is not allowed.
        """
        if name not in self.files or not _FILE_NAME.fullmatch(name):
            known = ", ".join(sorted(self.files)[:4])
            raise ConfigError(f"{self.path} has no file {name!r} of a rank; it has {known}, ...")
        return read_state_file(self.path / name, self.files[name])


class CheckpointStore:
    """The checkpoints of one run: the folders ``step_*`` of one root folder.

    Reading needs no ``with``. Saving does: inside, rank 0 holds the lock of the folder
    (``writer_lock.py``). Every rank must enter, and save.

    Args:
        root: a folder for this alone; the first writer makes it.
        group: of torch.distributed, the ranks that save together; by default all, and without
            torch.distributed this process alone.
        keep: complete checkpoints to keep, >= 1.

    Raises:
        ConfigError: ``keep`` is no integer >= 1; on entering: another process writes to the root.
    """

    def __init__(self, root: str | os.PathLike[str], *, group: Any = None, keep: int = 3):
        check_integer("CheckpointStore: keep", keep, 1)
        self.root, self.group, self.keep = Path(root), group, keep
        self._lock: contextlib.ExitStack | None = None

    def __enter__(self) -> "CheckpointStore":
        lock = contextlib.ExitStack()
        self._on_rank_zero(lambda: lock.enter_context(writer_lock(self.root)))
        self._lock = lock
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._lock is not None  # entered
        self._lock.close()
        self._lock = None

    def save(
        self,
        step: int,
        files: Mapping[str, Any] = MappingProxyType({}),
        *,
        write_model: Callable[[Path], None] | None = None,
        data: Any = None,
        metadata: Any = None,
    ) -> Path:
        """Save one step, all ranks together, and return its folder.

        Args:
            step: step of the training run, >= 0.
            files: file name -> object, of this rank; no name on two ranks.
            write_model: writes the model into an empty folder, together with the other ranks: of
                all ranks or of none. ``megatron.core.dist_checkpointing`` does.
            data: JSON value, such as ``loader.state_dict()``; rank 0's is written.
            metadata: JSON object for the manifest; rank 0's is written.

        Raises:
            ConfigError: outside ``with``; a bad step, name or metadata; a name on two ranks; an
                object that :meth:`Checkpoint.load` would refuse.
            EnergonExtError: a file could not be written, or another rank failed.
        """
        if self._lock is None:
            raise ConfigError(f"{self.root}: save() works only inside `with CheckpointStore(...)`.")
        try:
            _check_names([*chain(*on_all_ranks(lambda: list(files), self.group))])
            folder = self._on_rank_zero(lambda: self._begin(step))
            records = ChainMap(*on_all_ranks(lambda: _write_files(folder, files), self.group))
            if write_model is not None:
                on_all_ranks(lambda: write_model(folder / MODEL), self.group)
            self._on_rank_zero(lambda: self._publish(folder, step, records, data, metadata))
        except (OSError, RuntimeError) as error:
            raise EnergonExtError(
                f"{self.root}: saving step {step} failed ({first_line(error)}); earlier "
                "checkpoints are whole. Make room or mend the folder, then save again."
            ) from error
        return folder

    def latest(self) -> Checkpoint | None:
        """The checkpoint saved last, or None where there is none.

        Raises:
            StateFormatError: a manifest is damaged, so that the newest is not known.
        """
        return max(self.complete(), key=attrgetter("save_index"), default=None)

    def open(self, step: int) -> Checkpoint:
        """The checkpoint of one step; of several saves of that step the last.

        Raises:
            ConfigError: there is no complete checkpoint of this step.
            StateFormatError: its manifest is damaged.
        """
        saves = [save for save in _folders(self.root) if (save[-1] / MANIFEST).exists()]
        for found, _, folder in reversed(saves):
            if found == step:
                return _checkpoint(folder)
        raise ConfigError(
            f"{self.root} has no complete checkpoint of step {step!r}, but of steps "
            f"{[found for found, _, _ in saves]}. Open one of these."
        )

    def complete(self, skip_damaged: bool = False) -> Iterator[Checkpoint]:
        """All checkpoints, by their steps.

        Raises:
            StateFormatError: a manifest is damaged, and is not to be skipped.
        """
        for _, _, folder in _folders(self.root):
            # Without a manifest it is unfinished, or was removed since it was listed.
            with contextlib.suppress(FileNotFoundError, *[StateFormatError] * skip_damaged):
                yield _checkpoint(folder)

    def _begin(self, step: int) -> Path:
        check_integer(f"{self.root}: step", step, 0)
        for _, _, folder in _folders(self.root):
            if not (folder / MANIFEST).exists():
                _remove(folder)
        repeats = [repeat for found, repeat, _ in _folders(self.root) if found == step]
        folder = self.root / (f"step_{step:08d}" + (f".{max(repeats) + 1}" if repeats else ""))
        (folder / MODEL).mkdir(parents=True)
        fsync(self.root)
        return folder

    def _publish(self, folder: Path, step: int, records: Any, data: Any, metadata: Any) -> None:
        files = {**records, **records_below(folder, MODEL, settle=True)}
        if data is not None:
            files[DATA] = write_file(folder / DATA, to_json("data", data))
        fsync(folder)
        complete = self.complete(skip_damaged=True)
        newest_first = sorted(complete, key=attrgetter("save_index"), reverse=True)
        write_manifest(
            folder,
            step=step,
            save_index=newest_first[0].save_index + 1 if newest_first else 1,
            files=files,
            metadata={} if metadata is None else metadata,
        )
        for old in reversed(newest_first[self.keep - 1 :]):
            (old.path / MANIFEST).unlink()
            fsync(old.path)
            _remove(old.path)

    def _on_rank_zero(self, work: Callable[[], Any]) -> Any:
        alone = not (dist.is_available() and dist.is_initialized())
        is_mine = alone or dist.get_rank(self.group) == 0
        return on_all_ranks(work if is_mine else lambda: None, self.group)[0]


def _folders(root: Path) -> list[tuple[int, int, Path]]:
    """(step, which save of this step, path) of every save in the root, unfinished ones too."""
    named = [(_DIRECTORY.fullmatch(path.name), path) for path in root.glob("step_*")]
    return sorted((int(match[1]), int(match[2] or 1), path) for match, path in named if match)


def _remove(folder: Path) -> None:
    # What cannot be removed (a reader may hold it open) has no manifest: the next save tries again.
    shutil.rmtree(folder, ignore_errors=True)


def _check_names(names: list[str]) -> None:
    for name, ranks in Counter(names).items():
        if not _FILE_NAME.fullmatch(name) or name in (MANIFEST, DATA, MODEL):
            raise ConfigError(
                f"Found file name {name!r}; allowed are letters, digits, '_', '-' and single dots "
                f"between them, but not {MANIFEST}, {DATA}, {MODEL} or *.tmp."
            )
        if ranks > 1:
            raise ConfigError(f"{ranks} ranks save {name!r}; name it by the rank.")


def _write_files(folder: Path, files: Mapping[str, Any]) -> dict[str, Any]:
    records = {name: write_state_file(folder / name, value) for name, value in files.items()}
    fsync(folder)
    return records


def _checkpoint(folder: Path) -> Checkpoint:
    manifest = read_manifest(folder)
    names = ("step", "metadata", "save_index", "files")
    return Checkpoint(folder, **{name: manifest[name] for name in names})
