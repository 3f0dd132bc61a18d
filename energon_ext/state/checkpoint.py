# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Model and data state on disk: one folder per save, its manifest written last.

After each step of a save every rank waits for the slowest; if it fails on one, all raise:

1. rank 0 removes what unfinished saves left behind and makes ``step_00000010`` (a second save of
   the same step makes ``step_00000010.2``: nothing is ever replaced in place);
2. every rank writes its own files;
3. all ranks write the model together, as the caller says;
4. rank 0 writes ``data.json``, the cursor that all ranks share, and ``manifest.json``, then removes
   all but the newest ``keep`` complete checkpoints, of each the manifest first.

A folder is a checkpoint if and only if it holds a manifest, so a process killed at any instant
leaves the previous checkpoint or the new one.

The manifest lists every file with its size, and those of the data with their SHA-256. Of the model
the files up to 16 MiB are hashed, which say where each tensor is. Reading the tensors back as well,
hundreds of gigabytes, would double the time of a save: of a larger file it is noticed that it is
missing or cut, and not that a bit has changed. Nothing falls back to an older checkpoint by itself.

Example:
    >>> import tempfile
    >>> root = tempfile.mkdtemp()
    >>> def write_model(folder):
    ...     (folder / "weights").write_text("0.5")
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
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, Iterator, Mapping, TypeVar, cast

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

T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint:
    """One complete save, as its manifest describes it.

    Attributes:
        path: its folder.
        step: step of the training run it was saved at.
        metadata: what the caller gave to :meth:`CheckpointStore.save`, as JSON.
        save_index: 1, 2, ... in the order of saving.
        files: ``{name: {"bytes": int, "sha256": hex}}``, of all ranks; those of the model are named
            ``model/...``, and the large ones among them have no ``sha256``.
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
        if DATA not in self.files:
            return None
        return json.loads(read_file(self.path / DATA, self.files[DATA]))

    def model(self) -> Path | None:
        """The folder of the model, verified; None where the save had none. Looks at every file.

        Raises:
            StateFormatError: a file is missing or damaged, or was not there when it was saved.
        """
        saved = {name: rec for name, rec in self.files.items() if name.startswith(f"{MODEL}/")}
        found = records_below(self.path, MODEL)
        for name in sorted({*saved, *found}):
            check_record(self.path / name, found.get(name), saved.get(name))
        return self.path / MODEL if saved else None

    def load(self, name: str) -> Any:
        """Read the file of a rank, verified first; runs nobody's code.

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
                f"{self.path} has no file {name!r}, but {len(names)} others: "
                f"{', '.join(names[:4])}{', ...' if names[4:] else ''}. Load one of these."
            )
        return read_state_file(self.path / name, self.files[name])


class CheckpointStore:
    """The checkpoints of one run: the folders ``step_*`` of one root folder.

    Reading needs neither ``with`` nor a lock. Saving happens inside ``with``, where rank 0 holds
    the lock of the folder (``writer_lock.py``). Every rank must enter, and save.

    Args:
        root: a folder for this alone; the first writer makes it.
        group: the ranks that save together, a group of torch.distributed: the default one where it
            is None, and this process alone without torch.distributed.
        keep: complete checkpoints to keep, >= 1.

    Raises:
        ConfigError: ``keep`` is out of range; on entering: the root cannot be written, or another
            process writes to it.
    """

    def __init__(self, root: str | os.PathLike[str], *, group: Any = None, keep: int = 3):
        check_integer("CheckpointStore: keep", keep, 1)
        self.root = Path(root)
        self.group = group
        self.keep = keep
        self._lock: contextlib.ExitStack | None = None

    def __enter__(self) -> "CheckpointStore":
        lock = contextlib.ExitStack()
        self._on_rank_zero(lambda: lock.enter_context(writer_lock(self.root)))
        self._lock = lock
        return self

    def __exit__(self, *exception: object) -> None:
        if self._lock is not None:
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
        """Save one step; all ranks call this together.

        Args:
            step: step of the training run, >= 0.
            files: file name -> object, of this rank; no name on two ranks.
            write_model: writes the model into an empty folder, together with the other ranks: of
                all ranks or of none. ``megatron.core.dist_checkpointing`` does.
            data: JSON value, such as ``loader.state_dict()``; rank 0's is written.
            metadata: JSON object for the manifest; rank 0's is written.

        Returns:
            The folder of the new checkpoint, on every rank.

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
            written = on_all_ranks(lambda: _write_files(folder, files), self.group)
            records = dict(ChainMap(*written))
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
        return max(self._complete(), key=lambda found: found.save_index, default=None)

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

    def _complete(self, skip_damaged: bool = False) -> Iterator[Checkpoint]:
        for _, _, folder in _folders(self.root):
            try:
                yield _checkpoint(folder)
            except FileNotFoundError:
                continue  # unfinished, or removed by a writer since it was listed
            except StateFormatError:
                if not skip_damaged:
                    raise

    def _begin(self, step: int) -> Path:
        check_integer(f"{self.root}: step", step, 0)
        for _, _, folder in _folders(self.root):
            if not (folder / MANIFEST).exists():
                _remove(folder)
        repeats = [repeat for found, repeat, _ in _folders(self.root) if found == step]
        suffix = f".{max(repeats) + 1}" if repeats else ""
        folder = self.root / f"step_{step:08d}{suffix}"
        (folder / MODEL).mkdir(parents=True)
        fsync(self.root)
        return folder

    def _publish(
        self, folder: Path, step: int, files: dict[str, Any], data: Any, metadata: Any
    ) -> None:
        if data is not None:
            files[DATA] = write_file(folder / DATA, to_json("data", data))
        files |= records_below(folder, MODEL, settle=True)
        fsync(folder)
        newest_first = sorted(
            self._complete(skip_damaged=True), key=lambda found: found.save_index, reverse=True
        )
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

    def _on_rank_zero(self, work: Callable[[], T]) -> T:
        alone = not (dist.is_available() and dist.is_initialized())
        is_mine = alone or dist.get_rank(self.group) == 0
        result = on_all_ranks(lambda: work() if is_mine else None, self.group)[0]
        return cast(T, result)


def _folders(root: Path) -> list[tuple[int, int, Path]]:
    """(step, which save of this step, path) of every save in the root, unfinished ones too."""
    paths = list(root.iterdir()) if root.is_dir() else []
    named = [(_DIRECTORY.fullmatch(path.name), path) for path in paths]
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
