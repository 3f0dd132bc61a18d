# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Model and data state on disk: one directory per save, its manifest written last.

A save has three steps; every rank waits for the slowest after each, and if one fails, all raise:

1. rank 0 removes what unfinished saves left behind and makes ``step_00000010`` (a second save of
   the same step makes ``step_00000010.2``: nothing is ever replaced in place);
2. every rank writes its own files (``state_file.py``: temporary name, fsync, rename);
3. rank 0 writes ``manifest.json`` in the same way, then removes all but the newest ``keep``
   complete checkpoints, of each the manifest first.

A directory is a checkpoint if and only if it holds a manifest, so a process killed at any instant
leaves the previous checkpoint or the new one.

The manifest (``manifest.py``) lists every file with size and SHA-256, and checks itself: a bit
changed anywhere is a :class:`StateFormatError` that names the file. Nothing falls back to an older
checkpoint by itself.

What is in the files is the caller's choice. The state of a stock Energon loader takes 7 kB for
each of its random generators (one a source, one a shuffle buffer), 13 kB more for each worker
process, and 20 to 80 bytes for each sample that waits in a shuffle or packing buffer: its place is
saved, not its content. The state does not grow with what was consumed. The stock command
``energon checkpoint redist`` reads the files.

Example:
    >>> import tempfile
    >>> root = tempfile.mkdtemp()
    >>> with CheckpointStore(root, keep=2) as store:
    ...     for step in (10, 20, 30):
    ...         path = store.save(step, {"model_rank00000.pt": {"w": 0.5}}, metadata={"lr": 0.1})
    >>> checkpoint = CheckpointStore(root).latest()
    >>> checkpoint.path.name, checkpoint.metadata, checkpoint.load("model_rank00000.pt")
    ('step_00000030', {'lr': 0.1}, {'w': 0.5})
    >>> CheckpointStore(root).open(20).step
    20
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator

import torch

from energon_ext.errors import ConfigError, EnergonExtError, StateFormatError
from energon_ext.state.manifest import MANIFEST, read_manifest, write_manifest
from energon_ext.state.serialize import first_line, fsync, read_state_file, write_state_file
from energon_ext.state.writer_lock import writer_lock

_DIRECTORY = re.compile(r"step_(\d{8,})(?:\.(\d+))?")
_FILE_NAME = re.compile(r"[\w-]+(\.[\w-]+)*(?<!\.tmp)", re.ASCII)


@dataclass(frozen=True)
class Checkpoint:
    """One complete save, as its manifest describes it.

    Attributes:
        path: its directory.
        step: step of the training run it was saved at.
        metadata: what the caller gave to :meth:`CheckpointStore.save`, as JSON.
        world_size: number of ranks that wrote it.
        save_index: 1, 2, ... in the order of saving.
        files: ``{name: {"bytes": int, "sha256": hex}}``, of all ranks.
    """

    path: Path
    step: int
    metadata: dict[str, Any]
    world_size: int
    save_index: int
    files: dict[str, dict[str, Any]]

    def load(self, name: str) -> Any:
        """Read one file, verified first; runs nobody's code.

        Args:
            name: one of ``files``.

        Returns:
            A new object at every call; tensors are on the CPU.

        Raises:
            ConfigError: the checkpoint has no such file.
            StateFormatError: the file is missing or damaged, or holds a class that is not allowed.
        """
        if name not in self.files or not _FILE_NAME.fullmatch(name):
            names = sorted(self.files)
            raise ConfigError(
                f"{self.path} has no file {name!r}, but {len(names)} of {self.world_size} rank(s): "
                f"{', '.join(names[:4])}{', ...' if names[4:] else ''}. Load one of these."
            )
        return read_state_file(self.path / name, self.files[name])


class CheckpointStore:
    """The checkpoints of one run: the directories ``step_*`` of one root folder.

    Reading needs neither ``with`` nor a lock. Saving happens inside ``with``, where rank 0 holds
    the lock of the folder (``writer_lock.py``). Every rank must enter, and save.

    Args:
        root: a folder for this alone; the first writer makes it.
        rank: index of this process in ``group``.
        world_size: number of processes that save together.
        group: their ``torch.distributed`` group; None is the default one, or none at all where
            ``world_size`` is 1.
        keep: complete checkpoints to keep, >= 1.

    Raises:
        ConfigError: an argument is out of range; on entering: the group disagrees with ``rank``
            and ``world_size``, the root cannot be written, or another process writes to it.
    """

    def __init__(
        self,
        root: str | os.PathLike,
        *,
        rank: int = 0,
        world_size: int = 1,
        group: Any = None,
        keep: int = 3,
    ):
        if not 0 <= rank < world_size or keep < 1:
            raise ConfigError(
                f"CheckpointStore: found rank {rank}, world_size {world_size}, keep {keep}; "
                "allowed are 0 <= rank < world_size and keep >= 1."
            )
        self.root = Path(root)
        self.rank = rank
        self.world_size = world_size
        self.group = group
        self.keep = keep
        self._lock: contextlib.ExitStack | None = None

    def __enter__(self) -> "CheckpointStore":
        self._check_group()
        lock = contextlib.ExitStack()
        self._on_rank_zero(lambda: lock.enter_context(writer_lock(self.root)))
        self._lock = lock
        return self

    def __exit__(self, *exception) -> None:
        self._lock.close()
        self._lock = None

    def save(self, step: int, objects: dict[str, Any], *, metadata: dict[str, Any]) -> Path:
        """Save one step; every rank calls this, with its own objects.

        Args:
            step: step of the training run, >= 0.
            objects: file name -> object, such as ``{"model_rank00000.pt": model.state_dict(),
                "data_rank00000.pt": loader.save_state_rank()}``; no name on two ranks.
            metadata: JSON object for the manifest; rank 0's is written.

        Returns:
            The directory of the new checkpoint, on every rank.

        Raises:
            ConfigError: outside ``with``; a bad step, name or metadata; a name on two ranks; an
                object that :meth:`Checkpoint.load` would refuse.
            EnergonExtError: a file could not be written, or another rank failed.
        """
        if self._lock is None:
            raise ConfigError(f"{self.root}: save() works only inside `with CheckpointStore(...)`.")
        try:
            _check_distinct(self._on_all_ranks(lambda: _check_names(objects)))
            directory = self._on_rank_zero(lambda: self._begin(step))
            written = self._on_all_ranks(lambda: _write_files(directory, objects))
            self._on_rank_zero(lambda: self._publish(directory, step, written, metadata))
        except (OSError, RuntimeError) as error:  # torch.save raises the latter on a full disk
            raise EnergonExtError(
                f"{self.root}: saving step {step} failed ({first_line(error)}); earlier "
                "checkpoints are whole. Make room or mend the folder, then save again."
            ) from error
        return directory

    def latest(self) -> Checkpoint | None:
        """The checkpoint saved last, or None where there is none.

        Raises:
            StateFormatError: a manifest is damaged, so that the newest is not known.
        """
        return max(self._complete(), key=lambda found: found.save_index, default=None)

    def open(self, step: int) -> Checkpoint:
        """The checkpoint of one step; of several saves of that step the last.

        Raises:
            ConfigError: there is no complete checkpoint of this step.
            StateFormatError: its manifest is damaged.
        """
        saves = [save for save in _directories(self.root) if (save[-1] / MANIFEST).exists()]
        for found, _, directory in reversed(saves):
            if found == step:
                return _checkpoint(directory)
        raise ConfigError(
            f"{self.root} has no complete checkpoint of step {step!r}, but of steps "
            f"{[found for found, _, _ in saves]}. Open one of these."
        )

    def _complete(self, skip_damaged: bool = False) -> Iterator[Checkpoint]:
        for _, _, directory in _directories(self.root):
            try:
                yield _checkpoint(directory)
            except FileNotFoundError:
                continue  # unfinished, or removed by a writer since it was listed
            except StateFormatError:
                if not skip_damaged:
                    raise

    def _begin(self, step: int) -> Path:
        if type(step) is not int or step < 0:
            raise ConfigError(f"{self.root}: found step {step!r}, allowed are integers >= 0.")
        for _, _, directory in _directories(self.root):
            if not (directory / MANIFEST).exists():
                _remove(directory)
        repeats = [repeat for found, repeat, _ in _directories(self.root) if found == step]
        suffix = f".{max(repeats) + 1}" if repeats else ""
        directory = self.root / f"step_{step:08d}{suffix}"
        directory.mkdir()
        fsync(self.root)
        return directory

    def _publish(self, directory: Path, step: int, written: list[dict], metadata: dict) -> None:
        newest_first = sorted(
            self._complete(skip_damaged=True), key=lambda found: found.save_index, reverse=True
        )
        write_manifest(
            directory,
            step=step,
            save_index=newest_first[0].save_index + 1 if newest_first else 1,
            world_size=self.world_size,
            files={name: record for records in written for name, record in records.items()},
            metadata=metadata,
        )
        for old in reversed(newest_first[self.keep - 1 :]):
            (old.path / MANIFEST).unlink()
            fsync(old.path)
            _remove(old.path)

    def _check_group(self) -> None:
        if self.world_size == 1:
            return
        distributed = torch.distributed
        found = None
        if distributed.is_initialized():
            found = (distributed.get_rank(self.group), distributed.get_world_size(self.group))
        if found != (self.rank, self.world_size):
            raise ConfigError(
                f"{self.root}: the store has (rank, world_size) {(self.rank, self.world_size)}, "
                f"its torch.distributed group {found}. Initialize the group, give its numbers."
            )

    def _on_rank_zero(self, work: Callable[[], Any]) -> Any:
        return self._on_all_ranks(work if self.rank == 0 else lambda: None)[0]

    def _on_all_ranks(self, work: Callable[[], Any]) -> list:
        """Run ``work`` and give back the results of all ranks; if it fails on one, all raise."""
        try:
            outcome = (work(), None)
        except BaseException as error:  # Ctrl-C as well: the other ranks wait to hear from us
            self._gather((None, _portable(error)))
            raise
        outcomes = self._gather(outcome)
        for rank, (_, error) in enumerate(outcomes):
            if error is not None:
                raise type(error)(f"On rank {rank}: {error}")
        return [result for result, _ in outcomes]

    def _gather(self, value: Any) -> list:
        values = [value] * self.world_size
        if self.world_size > 1:
            torch.distributed.all_gather_object(values, value, group=self.group)
        return values


def _portable(error: BaseException) -> EnergonExtError:
    if isinstance(error, EnergonExtError):
        return error
    return EnergonExtError(f"{type(error).__name__}: {first_line(error)}")


def _directories(root: Path) -> list[tuple[int, int, Path]]:
    """(step, which save of this step, path) of every save in the root, unfinished ones too."""
    paths = list(root.iterdir()) if root.is_dir() else []
    named = [(_DIRECTORY.fullmatch(path.name), path) for path in paths]
    return sorted((int(match[1]), int(match[2] or 1), path) for match, path in named if match)


def _remove(directory: Path) -> None:
    # What cannot be removed (a reader may hold it open) has no manifest: the next save tries again.
    shutil.rmtree(directory, ignore_errors=True)


def _check_names(objects: dict[str, Any]) -> list[str]:
    for name in objects:
        if not _FILE_NAME.fullmatch(name) or name == MANIFEST:
            raise ConfigError(
                f"Found file name {name!r}; allowed are letters, digits, '_', '-' and single dots "
                f"between them, but not {MANIFEST} or *.tmp."
            )
    return list(objects)


def _check_distinct(names_of_ranks: list[list[str]]) -> None:
    rank_of: dict[str, int] = {}
    for rank, names in enumerate(names_of_ranks):
        for name in names:
            if rank_of.setdefault(name, rank) != rank:
                raise ConfigError(
                    f"Ranks {rank_of[name]} and {rank} both save {name!r}; name it by its rank."
                )


def _write_files(directory: Path, objects: dict[str, Any]) -> dict[str, dict]:
    records = {name: write_state_file(directory / name, objects[name]) for name in objects}
    fsync(directory)
    return records


def _checkpoint(directory: Path) -> Checkpoint:
    manifest = read_manifest(directory)
    names = ("step", "metadata", "world_size", "save_index", "files")
    return Checkpoint(directory, **{name: manifest[name] for name in names})
