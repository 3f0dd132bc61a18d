# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What ``--data-source-path`` of slime names."""

from argparse import Namespace

from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.utils.types import Sample

from tests.loops.records import RecordRows


class PlannedSource(RolloutDataSourceWithBuffer):
    def __init__(self, args):
        super().__init__(Namespace(**{**vars(args), "prompt_data": None}))
        self.dataset = Samples(args.prompt_data)

    def save(self, rollout_id):
        self.metadata["plan"] = self.dataset.state_dict()
        super().save(rollout_id)

    def load(self, rollout_id=None):
        super().load(rollout_id)
        if "plan" in self.metadata:
            self.dataset.load_state_dict(self.metadata["plan"])


class Samples(RecordRows):
    @property
    def samples(self):
        return self

    def __getitem__(self, part):
        records = map(super().__getitem__, range(*part.indices(len(self))))
        return [Sample(prompt=each["prompt"], label=str(each["answer"])) for each in records]
