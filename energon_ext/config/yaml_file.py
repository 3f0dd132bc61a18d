# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""YAML and JSON files within limits of size, depth and number, as Energon's parser reads them."""

import json
import re
from collections import Counter
from typing import Any

import braceexpand
import ryml  # type: ignore[import-untyped]
from megatron.energon.epathlib import EPath
from megatron.energon.eyaml import load_yaml

from energon_ext.errors import ConfigError

MAX_YAML_BYTES = 4 * 2**20
MAX_JSON_BYTES = 32 * 2**20
MAX_YAML_DEPTH = 32
MAX_YAML_NODES = 250_000
MAX_SHARDS = 1_000_000
MAX_PATTERN_LENGTH, MAX_BRACES = 1000, 64

_RANGE = re.compile(r"\{(?:(-?\d+)\.\.(-?\d+)|[A-Za-z]\.\.[A-Za-z])(?:\.\.-?\d+)?\}")


def read_mapping(path: EPath, *, may_be_json: bool = False) -> dict[str, Any]:
    """The mapping in a YAML file, or in one whose name ends with ``.json`` where that may be.

    ConfigError where it is too large or too deep, gives a key twice, or is something else.
    """
    is_json = may_be_json and path.name.endswith(".json")
    most = MAX_JSON_BYTES if is_json else MAX_YAML_BYTES
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ConfigError(f"{path}: larger than {most:,} bytes; split it up.")
    try:
        data.decode("utf-8")
        content = json.loads(data) if is_json else _parse(data, path)
    except ConfigError:
        raise
    except (ValueError, RecursionError, ryml.ExceptionBasic) as error:
        first_line = (str(error).strip() or "bad syntax").splitlines()[0]
        kind = "JSON" if is_json else "YAML"
        raise ConfigError(f"{path}: not a {kind} file ({first_line}).") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: {content!r:.80} found, a mapping is needed.")
    return content


def _parse(data: bytes, path: EPath) -> Any:
    if not data.strip():
        raise ConfigError(f"{path}: empty.")
    _check_tree(ryml.parse_in_arena(data), path)
    try:
        return load_yaml(data)
    except AttributeError as error:  # what Energon's parser makes of a key without a value
        raise ConfigError(f"{path}: a key has no value; write `null` or leave it out.") from error


def _check_tree(tree: ryml.Tree, path: EPath) -> None:
    pending = [(tree.root_id(), 0)]
    nodes = 0
    while pending:
        node, depth = pending.pop()
        children = list(ryml.children(tree, node))
        nodes += len(children)
        if depth > MAX_YAML_DEPTH or nodes > MAX_YAML_NODES:
            limits = f"{MAX_YAML_DEPTH} levels or {MAX_YAML_NODES:,} entries"
            raise ConfigError(f"{path}: more than {limits}.")
        if tree.is_map(node):
            keys = Counter(bytes(tree.key(child)).decode() for child in children)
            if twice := [key for key, count in keys.items() if count > 1]:
                raise ConfigError(f"{path}: {', '.join(twice[:5])} given twice in one mapping.")
        pending.extend((child, depth + 1) for child in children)


def shards_of(patterns: Any, where: str) -> list[str]:
    """What patterns with braces stand for; ConfigError for other values, and for too many names."""
    if not isinstance(patterns, list) or not all(isinstance(each, str) for each in patterns):
        raise ConfigError(f"{where}: {patterns!r:.80} found, a list of shards is needed.")
    if sum(map(_most_names, patterns)) > MAX_SHARDS:
        raise ConfigError(
            f"{where}: more than {MAX_SHARDS:,} shards, or {MAX_PATTERN_LENGTH:,} characters or "
            f"{MAX_BRACES} braces in a name."
        )
    try:
        return [name for pattern in patterns for name in braceexpand.braceexpand(pattern)]
    except ValueError as error:
        raise ConfigError(f"{where}: braces that do not match in {patterns!r:.80}.") from error


def _most_names(pattern: str) -> int:
    """No fewer than a pattern stands for: groups multiply, also where one is inside another."""
    if len(pattern) > MAX_PATTERN_LENGTH or pattern.count("{") > MAX_BRACES:
        return MAX_SHARDS + 1
    most, open_groups = 1, [1]
    for first, last in _RANGE.findall(pattern):
        most *= abs(int(last) - int(first)) + 1 if first else 26 * 2
    for character in pattern:
        if character == "{":
            open_groups.append(1)
        elif character == ",":
            open_groups[-1] += 1
        elif character == "}" and len(open_groups) > 1:
            most *= open_groups.pop()
    return most
