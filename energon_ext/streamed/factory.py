# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The pseudo-dataset through which Energon's stages receive a streamed blend."""

from megatron.energon.flavors.base_dataset import SavableDataset


class BlendFactory:
    """A blend as the factory of one dataset, with the members that Energon's stages use."""

    # Energon only checks whether samples are crude, and the sources have already cooked them.
    __sample_type__ = None

    def __init__(self, blend: SavableDataset):
        self._blend = blend

    def __len__(self) -> int:
        return 1

    def build(self, worker_rotation_offset: int = 0) -> SavableDataset:
        return self._blend
