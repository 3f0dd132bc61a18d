# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What ``data.sampler`` of verl names."""

from verl.experimental.dataset.sampler import AbstractSampler

from energon_ext.loader.plan_sampler import PlanSampler


class Planned(PlanSampler, AbstractSampler):
    def __init__(self, data_source, data_config):
        sources = data_source.dataframe["data_source"]
        weights = {"math": 1, "code": 3}
        super().__init__(sources, weights, rows_per_step=data_config.train_batch_size)
