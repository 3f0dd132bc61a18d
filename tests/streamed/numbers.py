# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Sources that count, blends of them, and checks of what a run reads."""

import json
from collections import Counter

from megatron.energon import Sample
from megatron.energon.edataclass import edataclass
from megatron.energon.flavors.base_dataset import SavableDataset

from energon_ext import DynamicBlendDataset, LeastConsumedDataset, Source
from energon_ext.plan.lookup import find_blend
from energon_ext.state.match import SourceNames
from energon_ext.streamed.samples import RepeatUpTo
from energon_ext.weights import weight_from_config
from tests.support import config, loader_for

RULES = {"blend": DynamicBlendDataset, "interleave": LeastConsumedDataset}


@edataclass
class Number(Sample):
    """Sample ``number`` of a source in a worker, from 1 on."""

    source: str
    number: int
    num_tokens: int


class Numbers(SavableDataset):
    """Yields the numbers from 1 to ``count`` in every worker and epoch."""

    _savable_fields = ("position",)

    def __init__(self, source, count, num_tokens=1, worker_config=None):
        super().__init__(worker_config or config())
        self.source, self.count, self.num_tokens = source, count, num_tokens
        self.reset_state_own()

    def reset_state_own(self):
        self.position = 0

    def __iter__(self):
        while self.position < self.count:
            self.position += 1
            yield self.restore_sample((self.position,))
        self.position = 0

    def restore_sample(self, restore_key):
        (number,) = restore_key
        return Number(
            __key__=f"{self.source}{number}",
            __restore_key__=(number,),
            __subflavors__=None,
            source=self.source,
            number=number,
            num_tokens=self.num_tokens,
        )

    def can_restore_sample(self):
        return True

    def assert_can_restore(self):
        pass

    def len_worker(self, worker_idx=None):
        return self.count

    def worker_has_samples(self):
        return self.count > 0

    def config(self):
        return {"source": self.source}


def source(key, count=10**6, *, tokens=1, weight=1, epochs=None, endless=True, of=None, names=None):
    """Return a source of numbers.

    Args:
        endless: restart at the end, up to ``epochs`` times.
        of: a worker configuration.
    """
    rows = Numbers(key, count, tokens, of)
    if endless:
        rows = RepeatUpTo(rows, repeats=epochs, restart=False, worker_config=rows.worker_config)
    return Source(
        key,
        rows,
        weight_from_config(weight),
        documents=count,
        max_epochs=epochs,
        names=SourceNames(*(names or ())),
        fingerprint={"count": count},
    )


def blend(sources, rule="blend", of=None, **options):
    return RULES[rule](sources, worker_config=of or config(), **options)


def resumed(dataset, loader):
    """Return a loader that resumes from the state of another one."""
    other = loader_for(dataset)
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    return other


def order_of(samples):
    return "".join(sample.source for sample in samples)


def drawn_of(loader):
    """Return the samples and tokens of each source in the state of a worker."""
    states = find_blend(loader).save_state()["sources"]
    return {key: (state["documents"], state["tokens"]) for key, state in states.items()}


def assert_nothing_lost(samples, counts):
    """Check that every source was read in order from 1, and again after its last number.

    Args:
        samples: all samples of one worker, over all resumes.
        counts: number of samples of each source.
    """
    read = Counter()
    for sample in samples:
        assert sample.number == read[sample.source] % counts[sample.source] + 1
        read[sample.source] += 1
    return read
