# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a YAML file may name: classes, without anybody's word for them, and the keys of each.

Keys are looked up in the types that Energon's parser fills, as it walks them, so what is allowed is
what it takes.
"""

import dataclasses
import functools
from typing import Any, Union, get_args, get_origin, get_type_hints

import megatron.energon

from energon_ext.arguments import choices
from energon_ext.config.metadataset import ScheduledMetadataset
from energon_ext.errors import ConfigError

#: Metadatasets by what a file calls them; Energon takes one that says nothing for its first format.
FIRST_FORMAT = ("megatron.energon", "Metadataset")
METADATASETS = {
    FIRST_FORMAT: megatron.energon.Metadataset,
    ("megatron.energon", "MetadatasetV2"): megatron.energon.MetadatasetV2,
    ("energon_ext", "ScheduledMetadataset"): ScheduledMetadataset,
}
# fmt: off
#: Classes of Energon that do nothing but load data; they may stand at the top of a dataset.yaml.
#: The second half are older formats, named after the samples.
DATASETS = {("megatron.energon", name) for name in (
    "CrudeWebdataset", "CrudeJsonlDatasetFactory", "DefaultCrudeJsonlDatasetFactory",
    "StandardWebdatasetFactory", "DefaultGenericWebdatasetFactory", "JoinedWebdatasetFactory",
    "CaptioningWebdataset", "ImageClassificationWebdataset", "ImageWebdataset",
    "InterleavedWebdataset", "MultiChoiceVQAWebdataset", "OCRWebdataset",
    "SimilarityInterleavedWebdataset", "TextWebdataset", "VQAWebdataset", "VQAOCRWebdataset",
    "VidQAWebdataset",
)}
#: Classes of Energon that do nothing but hold data; they may stand anywhere.
SAMPLES = {("megatron.energon", name) for name in (
    "Sample", "CaptioningSample", "ImageClassificationSample", "ImageSample", "InterleavedSample",
    "MultiChoiceVQASample", "OCRSample", "SimilarityInterleavedSample", "TextSample", "VQASample",
    "VidQASample",
)}
# fmt: on


def check_splits(splits: Any, metadataset_class: type, where: str) -> None:
    """Refuse fields in the ``splits`` of a file that no entry of its class has."""
    kind = get_type_hints(vars(metadataset_class)["__init__"])["splits"]
    _check(splits, kind, "splits", f"in a {metadataset_class.__name__}", where)


def _check(node: Any, kind: Any, place: str, owner: str, where: str) -> None:
    kinds = get_args(kind) if get_origin(kind) is Union else (kind,)
    if isinstance(node, list):
        of_lists = [get_args(each)[0] for each in kinds if get_origin(each) is list]
        for index, child in enumerate(node if of_lists else ()):
            _check(child, of_lists[0], f"{place}[{index}]", owner, where)
    elif isinstance(node, dict):
        of_mappings = [get_args(each)[1] for each in kinds if get_origin(each) is dict]
        fields = max(map(_fields, kinds), key=lambda names: len(names.keys() & node.keys()))
        unknown = [] if of_mappings else sorted(node.keys() - fields.keys())
        if unknown and fields:
            has = choices(unknown[0], fields)
            raise ConfigError(f"{where}: {place}: no field {unknown[0]!r} {owner}; it has {has}")
        for key, child in node.items():
            inner = of_mappings[0] if of_mappings else fields.get(key, Any)
            _check(child, inner, f"{place}.{key}", owner, where)


@functools.cache
def _fields(kind: Any) -> dict[str, Any]:
    """The fields of a dataclass that a file may give, with their types."""
    if not dataclasses.is_dataclass(kind):
        return {}
    types = get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind) if field.init]
    return {name: types[name] for name in names if not name.startswith("_")}
