# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""With any mix, packing and axis, a run continues from every save on every topology.

It is enough to check the step after a resume and the state after that step: the next resume would
start from a state of the undisturbed run.
"""

import random

import pytest

from energon_ext import PackedTaskEncoder
from tests.plan.runs import SEQ_LEN, Run, write_numbered, write_split
from tests.support import LargeTokenizer, close_loaders

# Odd weights and limits that end a run early are intended here.
pytestmark = pytest.mark.filterwarnings("ignore::energon_ext.mixture.checks.BlendWarning")

ROWS = 16
STEPS = 13
IN_PROCESS = [(1, 16), (1, 4), (1, 1), (2, 8), (2, 2), (2, 1), (4, 4), (4, 1), (8, 1), (16, 1)]
TOPOLOGIES = [*((ranks, 0, batch) for ranks, batch in IN_PROCESS), (1, 3, 4), (2, 2, 2)]


class Configuration:
    """A random configuration: sources, tree of the mix, encoder and axis."""

    def __init__(self, folder, seed):
        self.folder, self.rng = folder, random.Random(seed)
        self.splices = self.rng.random() < 0.4  # splices need masked boundaries and no alignment
        self.names = [f"source{n}" for n in range(self.rng.randint(1, 5))]
        for n, name in enumerate(self.names):
            count, longest = self.rng.randint(2, 120), self.rng.choice([4, 30, 60, 200])
            write_numbered(folder / name, count, 100 + 15_000 * n, seed=seed, longest=longest)
        node, fields = self.node(self.names, depth=0), {}
        if self.rng.random() < 0.3:
            first = self.rng.randint(0, 8)
            fields["skip"] = [[first, first + self.rng.randint(1, 4)]]
        fields["schedule_axis"] = self.rng.choice(["steps", "tokens", "samples"])
        self.mix = write_split(folder / "mix.yaml", node, **fields)
        packing = self.rng.choice(["bin", "sequential"])
        self.options = {
            "packing": packing,
            "packing_buffer_docs": self.rng.choice([1, 3, 20, 512]),
            "alignment": 1 if self.splices or packing == "sequential" else 4,
            "mask_boundary_loss": self.splices or self.rng.choice([None, True, False]),
            "balance": self.rng.choice([None, None, "attention"]),
        }

    def node(self, names, depth):
        """Return a tree over sources; every node below the root has its own file."""
        groups = [[name] for name in names]
        if depth < 2 and len(names) > 2 and self.rng.random() < 0.6:
            cut = self.rng.randint(1, len(names) - 1)
            groups = [[name] for name in names[:cut]] + [names[cut:]]
        entries = [self.entry(group, depth, n == 0) for n, group in enumerate(groups)]
        rule = self.rng.choice(["blend", "interleave"])
        return {rule: entries, "allow_nested_schedules": True}

    def entry(self, names, depth, is_first):
        weight = self.rng.choice([1, 0.01, 7]) if is_first else self.weight()
        if len(names) > 1:
            path = self.folder / f"inner{depth}.yaml"
            write_split(path, self.node(names, depth + 1))
            return {"path": path.name, "weight": weight}
        entry = {"path": names[0], "weight": weight}
        if not is_first and self.rng.random() < 0.4:
            entry["max_epochs"] = self.rng.randint(1, 3)
        if self.splices and self.rng.random() < 0.5:
            entry["splice"] = self.rng.choice(
                [{}, {"num_docs": 2, "content_length": 9}, {"num_docs": 2, "pack_contents": True}]
            )
        return entry

    def weight(self):
        kind = self.rng.choice(["constant", "step", "linear", "cosine", "exponential"])
        scale = self.rng.choice([1, SEQ_LEN * ROWS])  # in steps, in tokens
        places = sorted(self.rng.sample(range(STEPS + 4), 3))
        lowest = 0.01 if kind == "exponential" else 0
        values = [self.rng.choice([lowest, 0.5, 1, 20]) for _ in places]
        if kind == "constant":
            return values[0]
        return {kind: {place * scale: value for place, value in zip(places, values)}}

    def run(self, ranks=1, workers=0, batch=1):
        encoder = PackedTaskEncoder(LargeTokenizer(), SEQ_LEN, **self.options)
        return Run(self.mix, ranks=ranks, workers=workers, batch=batch, rows=ROWS, encoder=encoder)


def check(folder, seed, saves, topologies):
    configuration = Configuration(folder, seed)
    whole, steps, states = configuration.run(), [], []
    for _ in range(STEPS):
        steps.append(whole.step())
        states.append(whole.state())
    close_loaders()
    rng = random.Random(-seed)
    for save in sorted(rng.sample(range(STEPS - 1), saves)):
        for topology in rng.sample(TOPOLOGIES, topologies):
            run = configuration.run(*topology).resume(states[save])
            assert run.step() == steps[save + 1], (save, topology)
            assert run.state() == states[save + 1], (save, topology)
            close_loaders()


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(n, marks=pytest.mark.nightly) for n in range(4, 8))]
)
def test_a_run_continues_from_a_save_on_another_topology(tmp_path, seed):
    check(tmp_path, seed, saves=3, topologies=1)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(200))
def test_a_run_goes_on_from_every_save_on_every_topology(tmp_path, seed):
    check(tmp_path, seed, saves=12, topologies=12)
