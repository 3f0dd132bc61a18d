# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Classes that a YAML file may name without being trusted, and the fields of each.

Fields are checked against the types that Energon's parser fills, so the allowed fields are exactly
those that it accepts.
"""

import collections.abc
import dataclasses
import functools
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import megatron.energon
from megatron.energon.epathlib import EPath

from energon_ext.arguments import choices
from energon_ext.config.metadataset import ScheduledMetadataset
from energon_ext.errors import ConfigError
from energon_ext.weights.schedule import KINDS

#: Metadatasets by module and class; Energon reads a file without a class as its first format.
FIRST_FORMAT = ("megatron.energon", "Metadataset")
METADATASETS = {
    FIRST_FORMAT: megatron.energon.Metadataset,
    ("megatron.energon", "MetadatasetV2"): megatron.energon.MetadatasetV2,
    ("energon_ext", "ScheduledMetadataset"): ScheduledMetadataset,
}
# fmt: off
#: Classes of Energon that only load data; allowed at the top level of a dataset.yaml.
#: The second half are older formats, named after their samples.
DATASETS = {("megatron.energon", name) for name in (
    "CrudeWebdataset", "CrudeJsonlDatasetFactory", "DefaultCrudeJsonlDatasetFactory",
    "StandardWebdatasetFactory", "DefaultGenericWebdatasetFactory", "JoinedWebdatasetFactory",
    "CaptioningWebdataset", "ImageClassificationWebdataset", "ImageWebdataset",
    "InterleavedWebdataset", "MultiChoiceVQAWebdataset", "OCRWebdataset",
    "SimilarityInterleavedWebdataset", "TextWebdataset", "VQAWebdataset", "VQAOCRWebdataset",
    "VidQAWebdataset",
)}
#: Classes of Energon that only hold data; allowed anywhere.
SAMPLE_TYPES = {("megatron.energon", name) for name in (
    "Sample", "CaptioningSample", "ImageClassificationSample", "ImageSample", "InterleavedSample",
    "MultiChoiceVQASample", "OCRSample", "SimilarityInterleavedSample", "TextSample", "VQASample",
    "VidQASample",
)}
# fmt: on

_OURS = (
    "Use a metadataset with `__module__: energon_ext` and `__class__: ScheduledMetadataset` for it."
)

#: Names in messages of the types that a file can contain.
_WORDS = {str: "text", int: "an integer", float: "a number", bool: "true or false"}
_WORDS |= {dict: "a mapping", list: "a list", EPath: "a path"}
_WORDS |= {type: "a class (`__module__` and `__class__`)"}


def check_splits(splits: Any, metadataset_class: type, where: str) -> None:
    """Raise ConfigError if the ``splits`` of a file do not fit the types of a metadataset class."""
    kind = _type_of_splits(metadataset_class)
    _check(splits, kind, "splits", f"in a {metadataset_class.__name__}", where)


def _type_of_splits(metadataset_class: type) -> Any:
    return get_type_hints(vars(metadataset_class)["__init__"])["splits"]


def _check(node: Any, kind: Any, place: str, owner: str, where: str) -> None:
    kinds = _kinds(kind)
    fitting = [member for member in kinds if _fits(node, member)]
    if not fitting:
        needed = " or ".join(dict.fromkeys(filter(None, map(_word, kinds))))
        is_schedule = isinstance(node, dict) and bool(node.keys() & KINDS.keys())
        advice = f" {_OURS}" if is_schedule else ""
        raise ConfigError(f"{where}: {place}: {node!r:.80} found, {needed} is needed.{advice}")
    if isinstance(node, list):
        item_kinds = [get_args(member)[0] for member in fitting if get_origin(member) is list]
        tuples = [get_args(member) for member in fitting if get_origin(member) is tuple]
        inners = item_kinds * len(node) if item_kinds else tuples[0] if tuples else ()
        for index, (child, inner) in enumerate(zip(node, inners)):
            _check(child, inner, f"{place}[{index}]", owner, where)
    elif isinstance(node, dict):
        value_kinds = [get_args(member)[1] for member in fitting if get_origin(member) is dict]
        classes = [member for member in fitting if dataclasses.is_dataclass(member)]
        fields = {}
        if classes and not value_kinds:
            fields = _fields_for(node, classes, f"{where}: {place}", owner)
        for key, child in node.items():
            inner = value_kinds[0] if value_kinds else fields.get(key, Any)
            _check(child, inner, f"{place}.{key}", owner, where)


def _fields_for(node: dict[str, Any], classes: list[Any], where: str, owner: str) -> dict[str, Any]:
    """Return the fields of the class that a mapping describes, judged by its required fields."""
    matching = [cls for cls in classes if _required_fields(cls) & node.keys()]
    required = sorted({min(_required_fields(cls) & node.keys()) for cls in matching})
    if len(required) > 1:
        raise ConfigError(f"{where}: {' and '.join(required)} found; give only one of them.")
    best = max(matching or classes, key=lambda cls: len(_fields(cls).keys() & node.keys()))
    fields = _fields(best)
    if unknown := sorted(node.keys() - fields.keys()):
        has = choices(unknown[0], fields)
        if not has.endswith("?"):  # the field may belong to another class
            anywhere = choices(unknown[0], set().union(*map(_fields, classes)))
            has = anywhere if anywhere.endswith("?") else has
        advice = _advice(unknown[0], node, classes)
        raise ConfigError(f"{where}: no field {unknown[0]!r} {owner}; it has {has}{advice}")
    if not matching and (not node or all(map(_required_fields, classes))):
        needed = " or ".join(
            sorted({min(_required_fields(cls) or _fields(cls)) for cls in classes})
        )
        raise ConfigError(f"{where}: {node!r:.80} found, it needs {needed}.")
    if missing := sorted(_required_fields(best) - node.keys()):
        raise ConfigError(f"{where}: no {missing[0]}, which {required[0]} requires.")
    return fields


def _advice(unknown: str, node: dict[str, Any], classes: list[Any]) -> str:
    """Return the end of a message that tells where a misplaced field belongs."""
    members = [get_args(_fields(cls)["blend"])[0] for cls in classes if "blend" in _fields(cls)]
    references = [cls for member in members for cls in _kinds(member)]
    if "path" in node and unknown in set().union(*map(_fields, references)):
        return f" It belongs to a member of a blend: blend: [{{path: ..., {unknown}: ...}}]."
    if unknown in _only_ours() and "interleave" not in set().union(*map(_fields, classes)):
        return f" {_OURS}"
    return ""


@functools.cache
def _only_ours() -> set[str]:
    """Return the fields that Energon's own metadatasets do not have."""
    ours, energons = map(_type_of_splits, (ScheduledMetadataset, megatron.energon.MetadatasetV2))
    return _fields_below(ours) - _fields_below(energons)


def _fields_below(kind: Any) -> set[str]:
    """Return the names of the fields of all dataclasses that a type is made of."""
    found, seen, left = set[str](), set[Any](), [kind]
    while left:
        part = left.pop()
        has_fields = dataclasses.is_dataclass(part) and part not in seen
        if has_fields:
            seen.add(part)
            found.update(_fields(part))
            left.extend(_fields(part).values())
        left.extend(get_args(part))
    return found


def _kinds(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union, or a type that is not a union alone."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _fits(node: Any, kind: Any) -> bool:
    origin = get_origin(kind) or kind
    if kind is Any:
        return True
    if origin is Literal:
        return node in get_args(kind)
    if dataclasses.is_dataclass(kind):
        return isinstance(node, dict)
    if origin in (type, collections.abc.Callable):
        return isinstance(node, dict) and "__module__" in node
    if origin is tuple:
        return isinstance(node, list) and len(node) == len(get_args(kind))
    return isinstance(node, (int, float) if origin is float else origin)


def _word(kind: Any) -> str:
    """Return the name of a type in messages; empty if no file can contain the type."""
    origin = get_origin(kind) or kind
    if dataclasses.is_dataclass(kind):
        return "a mapping"
    if origin is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if origin is tuple:
        return f"a list of {len(get_args(kind))}"
    return _WORDS.get(origin, "")


@functools.cache
def _fields(kind: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that a file may set, with their types."""
    kinds = get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind) if field.init]
    return {name: kinds[name] for name in names if not name.startswith("_")}


@functools.cache
def _required_fields(kind: Any) -> frozenset[str]:
    """Return the fields of a dataclass that a file must set."""
    missing = dataclasses.MISSING
    return frozenset(
        field.name
        for field in dataclasses.fields(kind)
        if field.name in _fields(kind) and field.default is field.default_factory is missing
    )
