# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Classes that a YAML file may name without anybody's word for them, by module and name."""

import megatron.energon

from energon_ext.config.metadataset import ScheduledMetadataset

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
