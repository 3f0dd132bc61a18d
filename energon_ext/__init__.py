# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a Megatron run reads, when, and how much of it.

::

    mix.yaml -- metadataset.py --> [source: path, split, subset, weight spec] x n        weights/
                                       |
    per source:  load -> repeat -> encode -> shuffle -> pack          tokenizers.py packing/
                                       |
    choose:      choosers/, wrapped by choice.py, blend.py, interleave.py
                                       |
    batch:       PackedBatch: flat, [A, B, T], Megatron dict          assembly.py batch.py
                                       |
    rl:          prompts -> Sampler -> ScoredGroup -> PackedBatch     rl/
                                       |
    step:        megatron/  get_batch -> GPTModel -> loss             losses.py
                                       |
    state:       keyed by source, saved atomically                    choice.py checkpoint.py
    account:     rows and tokens per source                           consumption.py
"""

from energon_ext.batch.collate import BatchAssembler
from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.batch.rows import Row
from energon_ext.config.metadataset import ScheduledMetadataset
from energon_ext.encoders.load import get_train_dataset, get_val_datasets
from energon_ext.encoders.mixin import DynamicBlendMixin
from energon_ext.encoders.pretrain import PackedTaskEncoder
from energon_ext.encoders.prompts import Prompt, PromptTaskEncoder
from energon_ext.encoders.sft import SFTTaskEncoder
from energon_ext.errors import (
    ConfigError,
    DataExhaustedError,
    EnergonExtError,
    SampleError,
    SamplerError,
    StateFormatError,
    StateMismatchError,
)
from energon_ext.losses import group_advantages, unified_loss
from energon_ext.mixture.blend import DynamicBlendDataset
from energon_ext.mixture.interleave import LeastConsumedDataset
from energon_ext.rl import BatchSource, OpenAISampler, RLDataset, Sampler, ScoredGroup
from energon_ext.splice.encoders import MultiSpliceTaskEncoder, SpliceTaskEncoder

__version__ = "0.1.0"

__all__ = [
    "BatchAssembler",
    "BatchSource",
    "ConfigError",
    "DataExhaustedError",
    "DynamicBlendDataset",
    "DynamicBlendMixin",
    "EnergonExtError",
    "LeastConsumedDataset",
    "MultiSpliceTaskEncoder",
    "OpenAISampler",
    "PackedBatch",
    "PackedTaskEncoder",
    "Prompt",
    "PromptTaskEncoder",
    "RLDataset",
    "Row",
    "SFTTaskEncoder",
    "SampleError",
    "Sampler",
    "SamplerError",
    "ScheduledMetadataset",
    "ScoredGroup",
    "SpliceTaskEncoder",
    "StateFormatError",
    "StateMismatchError",
    "get_train_dataset",
    "get_val_datasets",
    "group_advantages",
    "unified_loss",
]
