# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Looks at everything a dataset path pulls in, before Energon instantiates any of it.

Energon imports and calls whatever a YAML file names, metadatasets and the ``dataset.yaml`` of
every dataset folder alike, before it looks at the result. The walk here reads the same files with
the same parser, follows every reference, and refuses:

* a ``__module__``/``__class__``/``__function__`` that is not on an exact list or in a module the
  caller trusts;
* Python loaders that lie in a dataset folder;
* files that are too large, too deep, not YAML, or that give a key twice;
* paths that do not exist, folders that are not prepared, splits without samples, metadatasets that
  contain themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterator

import braceexpand
import ryml  # type: ignore[import-untyped]
from megatron.energon.epathlib import EPath
from megatron.energon.eyaml import load_yaml, load_yaml_json
from megatron.energon.flavors.webdataset.config import MAIN_FOLDER_NAME
from megatron.energon.flavors.webdataset.metadata import (
    EnergonDatasetType,
    get_dataset_info,
    get_dataset_type,
)

from energon_ext.documents.token_paths import is_token_file
from energon_ext.errors import ConfigError

MAX_YAML_BYTES = 16 * 1024 * 1024
MAX_YAML_DEPTH = 32
MAX_YAML_NODES = 1_000_000

#: Classes of Energon that do nothing but hold or load data.
SAFE_ENERGON_CLASSES = (
    # metadatasets and dataset formats
    "Metadataset",
    "MetadatasetV2",
    "CrudeWebdataset",
    "CrudeJsonlDatasetFactory",
    "DefaultCrudeJsonlDatasetFactory",
    "StandardWebdatasetFactory",
    "DefaultGenericWebdatasetFactory",
    "JoinedWebdatasetFactory",
    # sample types, and the older formats that are named after them
    "Sample",
    "CaptioningSample",
    "CaptioningWebdataset",
    "ImageClassificationSample",
    "ImageClassificationWebdataset",
    "ImageSample",
    "ImageWebdataset",
    "InterleavedSample",
    "InterleavedWebdataset",
    "MultiChoiceVQASample",
    "MultiChoiceVQAWebdataset",
    "OCRSample",
    "OCRWebdataset",
    "SimilarityInterleavedSample",
    "SimilarityInterleavedWebdataset",
    "TextSample",
    "TextWebdataset",
    "VQASample",
    "VQAWebdataset",
    "VQAOCRWebdataset",
    "VidQASample",
    "VidQAWebdataset",
)
SAFE_CLASSES = {("megatron.energon", name) for name in SAFE_ENERGON_CLASSES} | {
    ("energon_ext", "ScheduledMetadataset")
}

#: Fields of a dataset.yaml that Energon reads as ``file.py:function`` or ``module:function``.
CODE_FIELDS = ("sample_loader", "part_filter")


@dataclass(frozen=True)
class YamlChecker:
    """The walk, with what the caller allows.

    Args:
        trusted_modules: modules, by their exact names, whose classes a YAML file may name.
        allow_dataset_code: whether dataset folders may bring Python loaders.
    """

    trusted_modules: frozenset[str] = frozenset()
    allow_dataset_code: bool = False

    def check(self, path: EPath, split_part: str) -> None:
        """Check a dataset or metadataset and all it refers to.

        Args:
            path: what is to be loaded.
            split_part: the split that is to be loaded; it must have samples.

        Raises:
            ConfigError: names the file, the place in it, what was found and what to do.
        """
        self._check_reference(path, split_part, found_in="", above=())

    def _check_reference(
        self,
        path: EPath,
        split_part: str | None,
        *,
        found_in: str,
        above: tuple[str, ...],
        dataset_config: str = "dataset.yaml",
    ) -> None:
        if is_token_file(path):
            return  # holds numbers only, and says itself what is wrong with them
        kind = get_dataset_type(path)
        if kind is EnergonDatasetType.METADATASET:
            self._check_metadataset(path, split_part, above)
        elif kind is EnergonDatasetType.WEBDATASET:
            self._check_webdataset(path, split_part, found_in, dataset_config)
        elif kind is not EnergonDatasetType.JSONL or not EPath(f"{path}.idx").is_file():
            raise ConfigError(f"{found_in}{_why_invalid(path)}")

    def _check_metadataset(
        self, path: EPath, split_part: str | None, above: tuple[str, ...]
    ) -> None:
        if str(path) in above:
            raise ConfigError(f"{path} contains itself, by way of {' -> '.join(above)}.")
        content = _read_yaml(path)
        if not isinstance(content, dict) or not isinstance(content.get("splits"), dict):
            raise ConfigError(
                f"{path}: not a metadataset; it needs `__module__`, `__class__` and `splits`."
            )
        self._check_code(content, str(path))
        splits = content["splits"]
        if split_part is not None and split_part not in splits:
            raise ConfigError(f"{path}: no split {split_part!r}; it has {', '.join(splits)}.")
        for name, node in splits.items():
            for place, reference in _references(node, f"splits.{name}"):
                part = reference.get("split_part") or name
                self._check_reference(
                    _resolve(path, reference["path"], place),
                    part if name == split_part else None,
                    found_in=f"{path}: {place}: ",
                    above=(*above, str(path)),
                    dataset_config=reference.get("dataset_config") or "dataset.yaml",
                )

    def _check_webdataset(
        self, path: EPath, split_part: str | None, found_in: str, dataset_config: str
    ) -> None:
        config = path / MAIN_FOLDER_NAME / dataset_config
        if not config.is_file():
            raise ConfigError(
                f"{found_in}{path}: no {MAIN_FOLDER_NAME}/{dataset_config}, which says how to read "
                f"a sample; prepare the folder again."
            )
        content = _read_yaml(config)
        self._check_code(content, str(config))
        if split_part is not None:
            self._check_split(path, split_part, found_in)

    def _check_split(self, path: EPath, split_part: str, found_in: str) -> None:
        for name in ("split.yaml", "split.json"):
            if (path / MAIN_FOLDER_NAME / name).is_file():
                parts = load_yaml_json(path / MAIN_FOLDER_NAME / name).get("split_parts") or {}
                break
        else:
            raise ConfigError(f"{found_in}{path}: no {MAIN_FOLDER_NAME}/split.yaml; prepare again.")
        if split_part not in parts:
            raise ConfigError(
                f"{found_in}{path}: no split {split_part!r}; it has {', '.join(parts)}."
            )
        counts = get_dataset_info(path)["shard_counts"]
        shards = [s for pattern in parts[split_part] for s in braceexpand.braceexpand(pattern)]
        if not sum(counts.get(shard, 0) for shard in shards):
            raise ConfigError(
                f"{found_in}{path}: split {split_part!r} has no samples; leave the source out, or "
                f"prepare it with more."
            )

    def _check_code(self, content: Any, where: str) -> None:
        for place, node in _mappings(content):
            module = node.get("__module__")
            for name_field in ("__class__", "__function__"):
                name = node.get(name_field)
                if name is None:
                    continue
                safe = name_field == "__class__" and (module, name) in SAFE_CLASSES
                if not safe and module not in self.trusted_modules:
                    raise ConfigError(
                        f"{where}: {place}: names {module}.{name}, which would be called. If you "
                        f"trust that module, pass trusted_modules=({module!r},)."
                    )
            for field in CODE_FIELDS:
                if isinstance(node.get(field), str) and not self.allow_dataset_code:
                    raise ConfigError(
                        f"{where}: {place}: `{field}: {node[field]}` is Python code that would be "
                        f"run. If you trust it, pass allow_dataset_code=True."
                    )


def _read_yaml(path: EPath) -> Any:
    """The content of a YAML file within the limits, keys given twice refused."""
    with path.open("rb") as file:
        data = file.read(MAX_YAML_BYTES + 1)
    if len(data) > MAX_YAML_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_YAML_BYTES} bytes; split it up.")
    try:
        data.decode("utf-8")
        tree = ryml.parse_in_arena(data)
        if not data.strip():
            raise ConfigError(f"{path}: empty.")
    except (UnicodeDecodeError, ryml.ExceptionParse) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else "bad syntax"
        raise ConfigError(f"{path}: not a YAML file ({first_line}).") from error
    _check_tree(tree, path)
    try:
        return load_yaml(data)
    except AttributeError as error:  # what Energon's parser makes of a key without a value
        raise ConfigError(f"{path}: a key has no value; write `null` or leave it out.") from error


def _check_tree(tree: ryml.Tree, path: EPath) -> None:
    pending = [(tree.root_id(), 0)]
    nodes = 0
    while pending:
        node, depth = pending.pop()
        nodes += 1
        if depth > MAX_YAML_DEPTH or nodes > MAX_YAML_NODES:
            raise ConfigError(
                f"{path}: more than {MAX_YAML_DEPTH} levels or {MAX_YAML_NODES} entries."
            )
        children = list(ryml.children(tree, node))
        if tree.is_map(node):
            keys = [bytes(tree.key(child)).decode() for child in children]
            twice = sorted({key for key in keys if keys.count(key) > 1}) if _repeats(keys) else []
            if twice:
                raise ConfigError(f"{path}: {', '.join(twice)} given twice in one mapping.")
        pending.extend((child, depth + 1) for child in children)


def _repeats(keys: list[str]) -> bool:
    return len(set(keys)) != len(keys)


def _mappings(node: Any, place: str = "top level") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every mapping in a tree, with its place."""
    if isinstance(node, dict):
        yield place, node
    items = node.items() if isinstance(node, dict) else enumerate(node)
    prefix = "" if place == "top level" else place
    for key, child in items:
        if isinstance(child, (dict, list)):
            name = f"[{key}]" if isinstance(node, list) else f".{key}"
            yield from _mappings(child, f"{prefix}{name}".lstrip("."))


def _references(node: Any, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every mapping below a split that names a dataset."""
    is_reference = isinstance(node, dict) and "path" in node
    if is_reference:
        yield place, node
    if isinstance(node, list):
        for index, child in enumerate(node):
            yield from _references(child, f"{place}[{index}]")
    elif isinstance(node, dict):
        for key, child in node.items():
            if not (is_reference and key == "aux"):  # names files beside a dataset
                yield from _references(child, f"{place}.{key}")


def _resolve(metadataset: EPath, path: Any, place: str) -> EPath:
    if not isinstance(path, str) or not path:
        raise ConfigError(f"{metadataset}: {place}.path: {path!r} found, a path is needed.")
    return metadataset.parent / path


def _why_invalid(path: EPath) -> str:
    if path.is_file() and path.name.endswith(".jsonl"):
        return f"{path}: a JSON Lines file without an index; run `energon prepare` on it."
    if path.is_file():
        return f"{path}: neither a metadataset (.yaml), nor a .jsonl file."
    if path.is_dir():
        return (
            f"{path}: a folder that is not prepared (no {MAIN_FOLDER_NAME} in it); run "
            f"`energon-ext prepare` on the text, or `energon prepare` on a webdataset."
        )
    return f"{path}: does not exist; check the path, which is relative to the YAML file."
