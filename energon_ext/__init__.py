# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Decides what a Megatron run reads, when, and how much of it: one plan, any topology.

::

 YAML --> tree of weights                                          config/ weights/ mixture/
 sources: things with a number, a length and a cost                documents/ splice/
 plan     step k: whose row is next -> which numbers make it       packing/ plan/
            -> which rank and micro-batch                          one planner per rank
 read     numbers -> tokens -> row -> batch                        loader/ batch/
 step     get_batch -> GPTModel -> loss                            megatron/ losses.py
 state    the cursor after the last batch that was handed out      state/ loader/

 streamed: any Energon dataset under scheduled weights             streamed/
 rl:       prompts -> Sampler -> ScoredGroup -> PackedBatch        rl/
"""

from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.config.metadataset import ScheduledMetadataset
from energon_ext.encoders.load import get_train_dataset, get_val_datasets
from energon_ext.encoders.mixin import DynamicBlendMixin
from energon_ext.encoders.pretrain import PackedTaskEncoder
from energon_ext.encoders.prompts import PromptTaskEncoder
from energon_ext.encoders.sft import SFTTaskEncoder
from energon_ext.encoders.splice import MultiSpliceTaskEncoder, SpliceTaskEncoder
from energon_ext.encoders.tokenizers import load_tokenizer
from energon_ext.errors import ConfigError, EnergonExtError, StateMismatchError
from energon_ext.loader.data_loader import ExactDataLoader
from energon_ext.plan.source import Source
from energon_ext.streamed.blend import DynamicBlendDataset, LeastConsumedDataset
from energon_ext.weights import ScheduleAxis, WeightSpec

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "DynamicBlendDataset",
    "DynamicBlendMixin",
    "EnergonExtError",
    "ExactDataLoader",
    "LeastConsumedDataset",
    "MultiSpliceTaskEncoder",
    "PackedBatch",
    "PackedTaskEncoder",
    "PromptTaskEncoder",
    "SFTTaskEncoder",
    "ScheduleAxis",
    "ScheduledMetadataset",
    "Source",
    "SpliceTaskEncoder",
    "StateMismatchError",
    "WeightSpec",
    "get_train_dataset",
    "get_val_datasets",
    "load_tokenizer",
]
