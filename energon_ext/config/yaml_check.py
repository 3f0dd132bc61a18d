# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Checks every file that a dataset path refers to, before Energon instantiates any of it.

Energon imports and calls whatever metadatasets and the ``dataset.yaml`` of dataset folders name,
before it checks the result. The walk here reads the same files with the same parser, follows every
reference, and rejects untrusted code, unknown fields, files that are too large or damaged, and
paths without samples: ``docs/reference/yaml_safety.md`` has the full list.
"""

import difflib
import inspect
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Callable, Iterator, Mapping

from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.config import MAIN_FOLDER_NAME
from megatron.energon.flavors.webdataset.metadata import EnergonDatasetType, get_dataset_type

from energon_ext.arguments import choices
from energon_ext.config.yaml_classes import (
    DATASETS,
    FIRST_FORMAT,
    METADATASETS,
    SAMPLE_TYPES,
    check_splits,
)
from energon_ext.config.yaml_file import read_mapping, read_splits
from energon_ext.errors import ConfigError, printable
from energon_ext.samples.jsonl_index import ensure_index
from energon_ext.storage.object_store import as_msc
from energon_ext.tokens.formats import find_format

MAX_NESTED = 16
MAX_SOURCES = 100_000
MAX_SAMPLES = 2**40  # per shard

#: Characters that no path may have; other marks of text direction are in names of files.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")  # a byte that is not UTF-8, as Python writes it

#: Options that the caller sets, and that a dataset.yaml would override.
LOADER_FIELDS = (
    *("decoder", "path", "split_config", "split_part", "subset", "training", "worker_config"),
    *("max_samples_per_sequence", "parallel_shard_iters", "shuffle_over_epochs"),
)

#: Fields of a dataset.yaml that Energon reads as ``file.py:function`` or ``module:function``.
CODE_FIELDS = ("sample_loader", "part_filter")


@dataclass(frozen=True)
class YamlChecker:
    """Walks the files under the permissions of the caller; each file is checked only once."""

    trusted_modules: frozenset[str] = frozenset()  # exact names; files may name their classes
    allow_dataset_code: bool = False  # True if dataset folders may contain Python loaders
    _sources: dict[Any, int] = field(default_factory=dict, init=False)

    def check(self, path: Any, split_part: str, **files: str | None) -> EPath:
        """Check a dataset or metadataset and everything it refers to; ConfigError names the place.

        Returns the path as an EPath.

        The split must have samples. ``files``: ``dataset_config`` and ``split_config`` of a folder.
        """
        root = _resolve(EPath, path, "path")
        try:
            self._check_reference(root, split_part, files, found_in="", above=(), within=None)
        except RuntimeError as error:  # from EPath, if a name is too long or links form a loop
            raise ConfigError(f"{path}: {error!s:.500}") from error
        return root

    def _check_reference(
        self,
        path: EPath,
        split_part: str | None,
        reference: Mapping[str, Any],
        *,
        found_in: str,
        above: tuple[str, ...],
        within: tuple[str, str] | None,
    ) -> int:
        """Check a reference in a metadataset of the class ``within``, a pair of module and class.

        Returns the number of files that Energon will open for it.
        """
        if within == FIRST_FORMAT and path.is_file():
            # The first format treats every file as a metadataset, whatever its name.
            return self._check_metadataset(path, split_part, above)
        # Token files contain only numbers, which are checked when they are opened.
        if find_format(path) is not None:
            if within in METADATASETS and within[0] != "energon_ext":
                found = f"{found_in}{path}: token files, which {within[1]} cannot read"
                raise ConfigError(f"{found}; use energon_ext.ScheduledMetadataset.")
            return 1
        kind = get_dataset_type(path)
        if kind is EnergonDatasetType.METADATASET:
            return self._check_metadataset(path, split_part, above)
        if kind is EnergonDatasetType.WEBDATASET:
            self._check_webdataset(path, split_part, found_in, reference)
        elif kind is EnergonDatasetType.JSONL:
            ensure_index(path, found_in)
        else:
            raise ConfigError(f"{found_in}{_why_invalid(path)}")
        return 1

    def _check_metadataset(
        self, path: EPath, split_part: str | None, above: tuple[str, ...]
    ) -> int:
        if str(path) in above:
            raise ConfigError(f"{path} contains itself, through {' -> '.join(above)}.")
        if len(above) >= MAX_NESTED:
            raise ConfigError(f"{path}: nested more than {MAX_NESTED} deep, below {above[0]}.")
        key = (str(path), split_part, len(above))  # at another depth it may be nested too deep
        if key not in self._sources:
            self._sources[key] = self._walk(path, split_part, above)
        return self._sources[key]

    def _walk(self, path: EPath, split_part: str | None, above: tuple[str, ...]) -> int:
        content = read_mapping(path)
        splits, found = self._check_head(content, path)
        if split_part is not None and split_part not in splits:
            has = choices(split_part, splits)
            raise ConfigError(f"{path}: no split {split_part!r}; it has {has}")
        sources, folder = 1, path.parent
        for name, node in splits.items():
            for place, reference in _mappings(node, f"splits.{name}", _holds_references):
                if not _is_reference(reference):
                    continue
                part = str(reference.get("split_part") or name)
                sources += self._check_reference(
                    _resolve(folder.__truediv__, reference["path"], f"{path}: {place}.path"),
                    part if name == split_part else None,
                    reference,
                    found_in=f"{path}: {place}: ",
                    above=(*above, str(path)),
                    within=found,
                )
                if sources > MAX_SOURCES:
                    found_sources = f"more than {MAX_SOURCES:,} sources, repetitions included"
                    raise ConfigError(f"{path}: {place}: {found_sources}.")
        return sources

    def _check_head(self, content: dict[str, Any], path: EPath) -> tuple[dict[str, Any], Any]:
        """Return the splits of a metadataset, and its module and class."""
        given = (content.get("__module__"), content.get("__class__") or content.get("__function__"))
        found: Any = FIRST_FORMAT if None in given else given
        self._check_code(content, str(path), METADATASETS)
        splits = content.get("splits")
        if "splits" not in content:
            needed = "it needs `__module__`, `__class__` and `splits`"
            has = choices("splits", content)
            raise ConfigError(f"{path}: not a metadataset; {needed}, but has {has}")
        if not isinstance(splits, dict):
            raise ConfigError(f"{path}: splits: {splits!r:.80} found, a mapping is needed.")
        known = METADATASETS.get(found)
        fields = inspect.signature(known).parameters if known else ("splits",)
        allowed = {"__module__", "__class__", *fields} - {"path"}
        for name in content:
            if name == "path" or (known and name not in allowed):
                raise ConfigError(f"{path}: no field {name!r}; it has {choices(name, allowed)}")
        if None in given and not any("datasets" in node for _, node in _mappings(splits)):
            raise ConfigError(
                f"{path}: has no class; begin it with `__module__: energon_ext` and "
                f"`__class__: ScheduledMetadataset`."
            )
        if known:
            check_splits(splits, known, str(path))
        return splits, found

    def _check_webdataset(
        self, path: EPath, split_part: str | None, found_in: str, reference: Mapping[str, Any]
    ) -> None:
        names = [reference.get(name) for name in ("dataset_config", "split_config")]
        key = (str(path), split_part, *map(str, names))
        if key in self._sources:
            return
        config, split = (
            _resolve((path / MAIN_FOLDER_NAME).__truediv__, name or default, f"{found_in}{path}")
            for name, default in zip(names, ("dataset.yaml", "split.yaml"))
        )
        if not config.is_file():
            missing = f"no {MAIN_FOLDER_NAME}/{names[0] or 'dataset.yaml'}"
            advice = "which defines how to read a sample; prepare the folder again"
            raise ConfigError(f"{found_in}{path}: {missing}, {advice}.")
        content = read_mapping(config)
        self._check_code(content, str(config), DATASETS)
        for name in LOADER_FIELDS:
            if name in content:
                raise ConfigError(f"{config}: `{name}` may not be set in this file; remove it.")
        if split_part is not None:
            if names[1] is None and not split.is_file():
                split = split.parent / "split.json"
            _check_split(path / MAIN_FOLDER_NAME, split, split_part, f"{found_in}{path}")
        self._sources[key] = 1

    def _check_code(self, content: Any, where: str, at_the_top: Any) -> None:
        for place, node in _mappings(content):
            module, at = node.get("__module__"), place or "top level"
            for name_field in ("__class__", "__function__"):
                name = node.get(name_field)
                if name is None:
                    continue
                is_text = isinstance(module, str) and isinstance(name, str)
                safe = SAMPLE_TYPES.union(at_the_top) if node is content else SAMPLE_TYPES
                is_safe = is_text and name_field == "__class__" and (module, name) in safe
                if not is_safe and not (is_text and module in self.trusted_modules):
                    raise ConfigError(f"{where}: {at}: {_explain_untrusted(module, name, safe)}")
            for code in CODE_FIELDS:
                if isinstance(node.get(code), str) and not self.allow_dataset_code:
                    found = f"`{code}: {node[code]}` is Python code that would be run"
                    advice = "If you trust it, pass allow_dataset_code=True."
                    raise ConfigError(f"{where}: {at}: {found}. {advice}")


def _explain_untrusted(module: Any, name: Any, safe: set[tuple[str, str]]) -> str:
    found = str(name) if module is None else f"{module}.{name}"
    near = difflib.get_close_matches(found[:100], map(".".join, safe), n=1, cutoff=0.8)
    if module is None:
        return f"names {found} without a `__module__`, such as megatron.energon or energon_ext."
    if near and near[0] != found:
        return f"names {found}, which is unknown; did you mean {near[0]}?"
    return (
        f"names {found}, which would be called. If you trust this module, pass --trusted-module "
        f"{module}, or trusted_modules=({module!r},)."
    )


def _check_split(folder: EPath, split: EPath, split_part: str, where: str) -> None:
    if not split.is_file():
        raise ConfigError(f"{where}: no {MAIN_FOLDER_NAME}/split.yaml; prepare the folder again.")
    shards, excluded = read_splits(split)
    if split_part not in shards:
        raise ConfigError(f"{where}: no split {split_part!r}; it has {choices(split_part, shards)}")
    is_json = (folder / ".info.json").is_file()
    info = read_mapping(folder / f".info.{'json' if is_json else 'yaml'}", may_be_json=True)
    counts = info.get("shard_counts")
    counts = counts if isinstance(counts, dict) else {}
    for shard, count in counts.items():
        if type(count) is not int or not 0 <= count < MAX_SAMPLES:
            found = f"{MAIN_FOLDER_NAME}/.info gives {count!r:.40} samples for shard {shard!r:.80}"
            raise ConfigError(f"{where}: {found}; prepare the folder again.")
    num_excluded = Counter(
        name[: slash.start()] for name in excluded for slash in re.finditer("/", name)
    )
    for shard in shards[split_part]:
        count = counts.get(shard)
        # If all samples are excluded, Energon searches for one forever.
        if shard not in excluded and type(count) is int and count > num_excluded[shard]:
            return
    found = f"split {split_part!r} has no samples, or excludes all of them"
    raise ConfigError(f"{where}: {found}; remove the source, or prepare it with more samples.")


def _mappings(
    node: Any, place: str = "", enters: Callable[[Any, Any], bool] = lambda node, key: True
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every mapping of a tree with its place; visit only keys that ``enters`` allows."""
    if isinstance(node, dict):
        yield place, node
    for key, child in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(child, (dict, list)) and enters(node, key):
            name = f"[{key}]" if isinstance(node, list) else f".{key}"
            yield from _mappings(child, f"{place}{name}".lstrip("."), enters)


def _is_reference(node: Any) -> bool:
    """Return True if a mapping below a split refers to a dataset.

    The key alone does not tell: a file may call a split or a member of a join ``path``, and then
    its value is a mapping.
    """
    return isinstance(node, dict) and not isinstance(node.get("path", {}), dict)


def _holds_references(node: Any, key: Any) -> bool:
    """Return True if a key may contain references; two fields of a reference may not."""
    return not (_is_reference(node) and key in ("aux", "subflavors"))


def _resolve(join: Callable[[Any], EPath], path: Any, where: str) -> EPath:
    """Return a joined path; ConfigError for control characters and what EPath only asserts."""
    if not isinstance(path, (str, PurePath, EPath)) or not str(path):
        raise ConfigError(f"{where}: {path!r:.80} found, a path is needed.")
    if _SURROGATE.search(str(path)):
        raise ConfigError(f"{where}: {path} found, whose bytes are not UTF-8; rename it.")
    if _CONTROL.search(str(path)):
        raise ConfigError(f"{where}: {path} found, which contains control characters.")
    try:
        return join(as_msc(path))
    except (AssertionError, ValueError) as error:
        has_login = printable(str(path)) != str(path)  # the library's message would repeat it
        reason = "name a profile, `msc://PROFILE/path`" if has_login else error
        cause = None if has_login else error
        raise ConfigError(f"{where}: {path} found, which is not a path ({reason}).") from cause


def _why_invalid(path: EPath) -> str:
    if path.is_file():
        return (
            f"{path}: neither a metadataset (.yaml) nor a .jsonl file; `energon-ext prepare "
            f"FOLDER --text {path} --tokenizer NAME` turns it into token files."
        )
    if path.is_dir():
        return (
            f"{path}: a folder that is not prepared (it has no {MAIN_FOLDER_NAME}); run "
            f"`energon-ext prepare` on text, or `energon prepare` on a webdataset."
        )
    return f"{path}: does not exist; check the path, which is relative to the YAML file."
