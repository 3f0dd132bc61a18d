# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The part of :class:`~energon_ext.DynamicBlendMixin` that streams samples in Energon's order."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from megatron.energon import TaskEncoder, WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.metadataset.loader_interface import DatasetBlendMode, LoadedDataset

from energon_ext.config.mix import Entry
from energon_ext.encoders.quiet import quiet_encoding
from energon_ext.encoders.sources import load_source
from energon_ext.mixture.tree import INTERLEAVE
from energon_ext.streamed.blend import DynamicBlendDataset, LeastConsumedDataset
from energon_ext.streamed.factory import BlendFactory
from energon_ext.streamed.source import StreamedSource


class StreamedMixin:
    """Streams the samples of each source; see :class:`~energon_ext.DynamicBlendMixin`."""

    def build_streamed_source(
        self, entry: Entry, *, worker_config: WorkerConfig, repeat: bool
    ) -> SavableDataset:
        """Build the samples of one source before the draw.

        Override it to add your own stages to each source; samples are then streamed.
        """
        encoder = cast(TaskEncoder, self)
        return load_source(encoder, entry, worker_config, repeat=repeat)

    def build_streamed_blend(
        self,
        sources: Sequence[StreamedSource],
        passes: Mapping[str, Any],
        stages: Mapping[str, Any],
        **blend: Any,  # tree, clock, worker_config, fingerprint
    ) -> SavableDataset:
        """Build the draw among streamed sources, followed by Energon's stages."""
        if self._sizes_samples():
            blend["size_of"] = self.blend_sample_size  # type: ignore[attr-defined]
        is_interleave = blend["tree"].node.rule == INTERLEAVE
        blend_class = LeastConsumedDataset if is_interleave else DynamicBlendDataset
        drawn = blend_class(
            sources,
            repeats=passes["repeats"],
            restarts=passes["restarts"],
            **blend,
        )
        built = super().build_train_datasets(  # type: ignore[misc]  # of the next base class
            datasets=[LoadedDataset(dataset=BlendFactory(drawn))],
            worker_config=drawn.worker_config,
            blend_mode=DatasetBlendMode.NONE,
            repeat=False,
            virtual_epoch_length=passes["pass_batches"],
            **stages,
        )
        return quiet_encoding(built, cast(TaskEncoder, self))

    def _sizes_samples(self) -> bool:
        """Return True if this encoder overrides the size of 1 that future TaskEncoders return."""
        size, default = (getattr(c, "blend_sample_size", None) for c in (self, TaskEncoder))
        return getattr(size, "__func__", size) is not default
