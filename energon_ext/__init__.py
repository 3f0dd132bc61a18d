# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Decide what a Megatron run reads, when, and how much of it: one plan for any topology.

::

 YAML --> tree of weights                                          config/ weights/ mixture/
 sources: numbered documents with a length and a cost              tokens/ samples/ splice/
 plan     step k: next source -> documents of its next row         packing/ plan/
            -> rank and micro-batch                                one planner per rank
 read     document numbers -> tokens -> row -> batch               loader/ batch/
 step     get_batch -> GPTModel -> loss                            megatron/ losses/
 state    the cursor after the last batch delivered                state/ loader/

 streamed: any Energon dataset under scheduled weights             streamed/
 rl:       prompts -> Sampler -> ScoredGroup -> PackedBatch        rl/
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

#: Module of each public name. Names are imported on first use, so that a command that only prints
#: its help does not wait for torch.
_MODULES = {
    "BlendDataset": "energon_ext.streamed.blend",
    "ConfigError": "energon_ext.errors",
    "DynamicBlendDataset": "energon_ext.streamed.blend",
    "DynamicBlendMixin": "energon_ext.encoders.mixin",
    "EnergonExtError": "energon_ext.errors",
    "ExactDataLoader": "energon_ext.loader.data_loader",
    "LeastConsumedDataset": "energon_ext.streamed.blend",
    "MultiSpliceTaskEncoder": "energon_ext.encoders.splice",
    "PackedBatch": "energon_ext.batch.packed_batch",
    "PackedTaskEncoder": "energon_ext.encoders.pretrain",
    "PreferenceTaskEncoder": "energon_ext.encoders.preferences",
    "PromptTaskEncoder": "energon_ext.encoders.prompts",
    "SFTTaskEncoder": "energon_ext.encoders.sft",
    "ScheduleAxis": "energon_ext.weights",
    "ScheduledMetadataset": "energon_ext.config.metadataset",
    "Source": "energon_ext.streamed.source",
    "SpliceTaskEncoder": "energon_ext.encoders.splice",
    "StateMismatchError": "energon_ext.errors",
    "WeightSpec": "energon_ext.weights",
    "get_train_dataset": "energon_ext.encoders.load",
    "get_val_datasets": "energon_ext.encoders.load",
    "load_tokenizer": "energon_ext.tokenizers.tokenizers",
    "register_documents": "energon_ext.tokens.formats",
    "unified_loss": "energon_ext.losses",
    "weight_from_config": "energon_ext.weights",
    "written_tokenizer": "energon_ext.encoders.written_tokenizer",
}
__all__ = [*_MODULES]

if TYPE_CHECKING:
    from energon_ext.batch.packed_batch import PackedBatch as PackedBatch
    from energon_ext.config.metadataset import ScheduledMetadataset as ScheduledMetadataset
    from energon_ext.encoders.load import get_train_dataset as get_train_dataset
    from energon_ext.encoders.load import get_val_datasets as get_val_datasets
    from energon_ext.encoders.mixin import DynamicBlendMixin as DynamicBlendMixin
    from energon_ext.encoders.preferences import (
        PreferenceTaskEncoder as PreferenceTaskEncoder,
    )
    from energon_ext.encoders.pretrain import PackedTaskEncoder as PackedTaskEncoder
    from energon_ext.encoders.prompts import PromptTaskEncoder as PromptTaskEncoder
    from energon_ext.encoders.sft import SFTTaskEncoder as SFTTaskEncoder
    from energon_ext.encoders.splice import MultiSpliceTaskEncoder as MultiSpliceTaskEncoder
    from energon_ext.encoders.splice import SpliceTaskEncoder as SpliceTaskEncoder
    from energon_ext.encoders.written_tokenizer import written_tokenizer as written_tokenizer
    from energon_ext.errors import ConfigError as ConfigError
    from energon_ext.errors import EnergonExtError as EnergonExtError
    from energon_ext.errors import StateMismatchError as StateMismatchError
    from energon_ext.loader.data_loader import ExactDataLoader as ExactDataLoader
    from energon_ext.losses import unified_loss as unified_loss
    from energon_ext.streamed.blend import BlendDataset as BlendDataset
    from energon_ext.streamed.blend import DynamicBlendDataset as DynamicBlendDataset
    from energon_ext.streamed.blend import LeastConsumedDataset as LeastConsumedDataset
    from energon_ext.streamed.source import Source as Source
    from energon_ext.tokenizers.tokenizers import load_tokenizer as load_tokenizer
    from energon_ext.tokens.formats import register_documents as register_documents
    from energon_ext.weights import ScheduleAxis as ScheduleAxis
    from energon_ext.weights import WeightSpec as WeightSpec
    from energon_ext.weights import weight_from_config as weight_from_config
else:

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_MODULES[name]), name)

    def __dir__() -> list[str]:
        return sorted([*globals(), *_MODULES])
