# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Reinforcement learning as a source of packed batches.

::

    prompts (any blend) --> Sampler --> ScoredGroup: N answers to one prompt, with rewards
                                            |
                        rewards clipped, groups with equal rewards dropped
                                            |
                        advantages * sample weights * response mask = token_weights
                                            |
    PackedBatch <-- rows, longest sample first into the emptiest row
"""

from energon_ext.rl.dataset import RLDataset
from energon_ext.rl.openai_sampler import OpenAISampler
from energon_ext.rl.response import Response, Turn
from energon_ext.rl.rollout_metrics import RolloutMetrics
from energon_ext.rl.routed_experts import RoutedExperts
from energon_ext.rl.sampler import BatchSampler, BatchSource, Sampler, Unanswered
from energon_ext.rl.scored_group import ScoredGroup

__all__ = [
    "BatchSampler",
    "BatchSource",
    "OpenAISampler",
    "RLDataset",
    "Response",
    "RolloutMetrics",
    "RoutedExperts",
    "Sampler",
    "ScoredGroup",
    "Turn",
    "Unanswered",
]
