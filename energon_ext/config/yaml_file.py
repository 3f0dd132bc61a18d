# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Reads YAML and JSON files with Energon's parser, within limits on size, depth and count."""

import contextlib
import functools
import os
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any, Iterable, Iterator

import braceexpand
import ryml  # type: ignore[import-untyped]
from megatron.energon.epathlib import EPath
from megatron.energon.eyaml import load_yaml
from megatron.energon.flavors.webdataset.config import MAIN_FOLDER_NAME

from energon_ext.data_files import open_data, parse_json, read_to_limit
from energon_ext.errors import ConfigError, first_line
from energon_ext.storage.object_store import file_name

MAX_YAML_BYTES = 4 * 2**20
MAX_JSON_BYTES = 32 * 2**20
MAX_YAML_DEPTH = 32
MAX_YAML_NODES = 250_000
MAX_SHARDS = 1_000_000
MAX_PATTERN_LENGTH, MAX_BRACES, MAX_TAGS = 1000, 64, 2
MAX_LETTERS = 52  # in a range of letters, upper and lower case

_SILENT = threading.Lock()
_COMMENT_LINE = re.compile(rb"(?m)^[ \t]*#[^\r\n]*$")
_TAG = re.compile(rb"(?<![\w!])!")  # three on one value make rapidyaml 0.15 abort the process
_GROUP = re.compile(r"\{([^{}]*)\}")  # innermost braces
_RANGE = re.compile(r"(?:(-?\d+)\.\.(-?\d+)|[A-Za-z]\.\.[A-Za-z])(?:\.\.-?\d+)?$")


def read_mapping(path: EPath, *, may_be_json: bool = False) -> dict[str, Any]:
    """Return the mapping in a YAML file, or in a ``.json`` file if ``may_be_json``.

    ConfigError if it is too large or too deep, has a duplicate key, or contains no mapping.
    """
    is_json = may_be_json and path.name.endswith(".json")
    return _mapping_of(_read(path, is_json), str(path), is_json)


def _read(path: EPath, is_json: bool) -> bytes:
    most = MAX_JSON_BYTES if is_json else MAX_YAML_BYTES
    with open_data(file_name(path)) if path.is_local() else path.open("rb") as file:
        return read_to_limit(file, most, path)


def _mapping_of(data: bytes, path: str, is_json: bool) -> dict[str, Any]:
    try:
        data.decode("utf-8")
        content = parse_json(data) if is_json else _parse(data, path)
    except ConfigError:
        raise
    except ryml.ExceptionParse as error:
        number = min(error.errdata_parse.ymlloc.line, data.count(b"\n") + 1)
        line = data.decode().split("\n")[number - 1].strip() or "the end of the file"
        found = f"{path}:{number}: not a YAML file ({error.msg}), at {line!r:.60}"
        advice = "check this line and the one above for indentation, quotes and tabs"
        raise ConfigError(f"{found}; {advice}.") from error
    except (ValueError, RecursionError, ryml.ExceptionBasic) as error:
        kind = "JSON" if is_json else "YAML"
        raise ConfigError(f"{path}: not a {kind} file ({first_line(error)}).") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: {content!r:.80} found, a mapping is needed.")
    return content


def _parse(data: bytes, path: str) -> Any:
    if not data.strip():
        raise ConfigError(f"{path}: empty.")
    if len(_TAG.findall(_COMMENT_LINE.sub(b"", data))) > MAX_TAGS:
        raise ConfigError(f"{path}: more than {MAX_TAGS} tags (`!`); remove them, they are unused.")
    with _silent():
        tree = ryml.parse_in_arena(data)
    _check_tree(tree, path)
    return load_yaml(data)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Suppress the message that the parser's C++ code writes to file descriptor 2.

    Only one thread at a time: a second one would restore /dev/null instead of the original file.
    """
    with _SILENT, contextlib.ExitStack() as stack:
        try:
            kept = os.dup(2)
        except OSError:  # closed, so nothing can be written to it
            yield
            return
        stack.callback(os.close, kept)
        stack.callback(os.dup2, kept, 2)
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield


def _check_tree(tree: ryml.Tree, path: str) -> None:
    root = tree.root_id()
    if not tree.is_map(root) and not tree.is_seq(root) and tree.val(root) is None:
        raise ConfigError(f"{path}: empty.")
    pending = [(root, 0)]
    nodes = 0
    while pending:
        node, depth = pending.pop()
        children = list(ryml.children(tree, node))
        nodes += len(children)
        if depth > MAX_YAML_DEPTH or nodes > MAX_YAML_NODES:
            most = f"{MAX_YAML_DEPTH} levels or {MAX_YAML_NODES:,} entries"
            raise ConfigError(f"{path}: more than {most}.")
        if tree.is_map(node):
            keys = Counter(bytes(tree.key(child) or b"").decode() for child in children)
            if twice := [key for key, count in keys.items() if count > 1]:
                raise ConfigError(f"{path}: {', '.join(twice[:5])} given twice in one mapping.")
        for child in children:
            if tree.has_val(child) and tree.val(child) is None:
                name = f"`{bytes(tree.key(child)).decode()}`" if tree.has_key(child) else "an entry"
                raise ConfigError(f"{path}: {name} has no value; give it one or remove it.")
        pending.extend((child, depth + 1) for child in children)


def read_splits(path: EPath) -> tuple[dict[str, list[str]], set[str]]:
    """Return the shards of every split in a ``split.yaml`` or ``split.json``, and its exclusions.

    An exclusion is a shard, or ``SHARD/KEY`` for a sample.
    """
    is_json = path.name.endswith(".json")
    return _splits_of(_read(path, is_json), str(path), is_json)


@functools.lru_cache(4)  # a start asks several times, and 100,000 shards take a second
def _splits_of(data: bytes, path: str, is_json: bool) -> tuple[dict[str, list[str]], set[str]]:
    content = _mapping_of(data, path, is_json)
    excluded = {*expand_shards(content.get("exclude") or [], f"{path}: exclude")}
    parts = content.get("split_parts")
    parts = parts.items() if isinstance(parts, dict) else ()
    splits = {name: expand_shards(patterns, f"{path}: {name}") for name, patterns in parts}
    for name, shards in splits.items():
        if len({*shards}) < len(shards):
            twice = Counter(shards).most_common(1)[0][0]
            raise ConfigError(f"{path}: {name}: {twice} is listed twice; remove one.")
    return splits, excluded


def splits_in(folder: EPath) -> dict[str, list[str]]:
    """Return the shards of every split of a prepared folder; empty without a split file."""
    for name in ("split.yaml", "split.json"):
        path = folder / MAIN_FOLDER_NAME / name
        if path.is_file():
            return read_splits(path)[0]
    return {}


def splits_of(path: Path | str) -> list[str]:
    """Return the splits of a metadataset or prepared folder; ``train`` for JSON Lines."""
    if Path(path).suffix in (".yaml", ".yml"):
        return list(read_mapping(EPath(path)).get("splits") or {})
    return [split for split, shards in splits_in(EPath(path)).items() if shards] or ["train"]


def expand_shards(patterns: Any, where: str) -> list[str]:
    """Expand brace patterns; ConfigError for values of another type and for too many names."""
    if not isinstance(patterns, list) or not all(isinstance(name, str) for name in patterns):
        raise ConfigError(f"{where}: {patterns!r:.80} found, a list of shards is needed.")
    if sum(map(_most_names, patterns)) > MAX_SHARDS:
        name = f"a name has a backslash, {MAX_BRACES} braces or {MAX_PATTERN_LENGTH:,} characters"
        raise ConfigError(f"{where}: more than {MAX_SHARDS:,} shards, or {name}.")
    try:
        return [name for pattern in patterns for name in _expand(pattern)]
    except ValueError as error:
        raise ConfigError(f"{where}: unbalanced braces in {patterns!r:.80}.") from error


def _expand(pattern: str) -> Iterable[str]:
    has_braces = "{" in pattern or "}" in pattern
    return braceexpand.braceexpand(pattern) if has_braces else (pattern,)


def _most_names(pattern: str) -> int:
    """Return an upper bound on the names in a pattern: the product over groups, even if nested."""
    too_long = len(pattern) > MAX_PATTERN_LENGTH or pattern.count("{") > MAX_BRACES
    if too_long or "\\" in pattern:  # a backslash would hide a brace
        return MAX_SHARDS + 1
    most = 1
    while groups := _GROUP.findall(pattern):
        for group in groups:
            bounds = _RANGE.match(group)
            if bounds is None:
                most *= group.count(",") + 1
            else:
                most *= abs(int(bounds[2]) - int(bounds[1])) + 1 if bounds[1] else MAX_LETTERS
        pattern = _GROUP.sub("", pattern)
    return most
