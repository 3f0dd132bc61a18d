# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A binary file next to a state, for the tensors of answers."""

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from energon_ext.errors import StateFormatError
from energon_ext.keyed import sha256
from energon_ext.state.files import read_small_file, write_file

#: Key of a mapping in place of a tensor in the file.
_TENSOR = "__tensor__"


def write_tensors(values: Any, folder: Path, rank: int) -> tuple[Any, dict[str, str]]:
    """Write the tensors in lists and mappings to a new file, named by its content.

    Returns:
        The values with references in place of tensors, and the file's ``name`` and ``digest``.
    """
    arrays: list[np.ndarray] = []

    def replace(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            arrays.append(value.numpy())
            return {_TENSOR: len(arrays) - 1}
        if isinstance(value, dict):
            return {key: replace(each) for key, each in value.items()}
        return [replace(each) for each in value] if isinstance(value, list) else value

    values = replace(values)
    buffer = io.BytesIO()
    np.savez(buffer, *arrays)
    content = buffer.getvalue()
    digest = sha256(content)
    name = f"answers_rank{rank:05d}_{digest[:16]}.npz"
    write_file(folder / name, content)
    return values, {"name": name, "digest": digest}


def read_tensors(values: Any, folder: Path | None, file: dict[str, str]) -> Any:
    """Return the values of :func:`write_tensors` with their tensors.

    Raises:
        StateFormatError: the file is missing or was changed, or its folder was not given.
    """
    name = file["name"]
    if folder is None:
        raise StateFormatError(
            f"The state has its answers in {name}; give the folder of this file."
        )
    path = folder / Path(name).name
    content = read_small_file(path, path.stat().st_size if path.is_file() else 0)
    if sha256(content) != file["digest"]:
        raise StateFormatError(
            f"{path}: is damaged, or belongs to another state. Copy it again, or resume from "
            f"another checkpoint."
        )
    try:
        tensors = _tensors_in(content)
    except Exception as error:  # NumPy's reader raises anything for a file that others wrote
        raise StateFormatError(
            f"{path}: has no tensors ({type(error).__name__}); resume from another checkpoint."
        ) from error

    def replace(value: Any) -> Any:
        if isinstance(value, dict):
            if {*value} == {_TENSOR}:
                number = value[_TENSOR]
                if type(number) is not int or not 0 <= number < len(tensors):
                    raise StateFormatError(f"{path}: has no tensor {number!r:.40}.")
                return tensors[number]
            return {key: replace(each) for key, each in value.items()}
        return [replace(each) for each in value] if isinstance(value, list) else value

    return replace(values)


def _tensors_in(content: bytes) -> list[torch.Tensor]:
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        if any(each.compress_type != zipfile.ZIP_STORED for each in file.infolist()):
            raise ValueError("compressed, which no state is")
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return [torch.from_numpy(arrays[f"arr_{n}"]) for n in range(len(arrays.files))]
