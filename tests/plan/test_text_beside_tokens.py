# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Text mixed with token files is one plan on any ranks and workers, over resumes."""

import json
from collections import Counter

import pytest

from energon_ext import PackedTaskEncoder
from tests.plan.runs import SEQ_LEN, Run, write_numbered
from tests.support import LargeTokenizer, write_dataset, write_mix

ROWS = 12
TEXTS = [f"<{n}>" + "word " * (n % 9) for n in range(100)]


@pytest.fixture(scope="module")
def mix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    write_numbered(folder / "tokens", 60, 1000)
    write_dataset(folder / "text", TEXTS[:60], shard_size=20)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[60:])
    (folder / "lines.jsonl").write_text(lines)
    weights = {"step": {0: 2, 3: 1}}
    return write_mix(folder / "mix.yaml", [("tokens", 1), ("text", weights), ("lines.jsonl", 1)])


def run(mix, packing="bin", repeat=True, **topology):
    encoder = PackedTaskEncoder(LargeTokenizer(), SEQ_LEN, packing=packing)
    return Run(mix, rows=ROWS, encoder=encoder, repeat=repeat, **topology)


TOPOLOGIES = [
    {"ranks": 3, "batch": 2},
    {"ranks": 2, "batch": 3, "workers": 1},
    {"ranks": 1, "batch": 4, "workers": 2},
]


@pytest.mark.parametrize("packing", ["bin", pytest.param("sequential", marks=pytest.mark.nightly)])
def test_the_rows_of_a_step_do_not_depend_on_ranks_and_workers(mix, packing):
    expected = run(mix, packing).steps(6)
    for topology in TOPOLOGIES:
        assert run(mix, packing, **topology).steps(6) == expected


def test_a_chain_of_resumes_on_other_topologies_reads_what_one_run_reads(mix):
    expected = run(mix).steps(8)
    state, found = None, []
    for topology in [{}, *TOPOLOGIES]:
        hop = run(mix, **topology)
        if state is not None:
            hop.resume(state)
        found += hop.steps(2)
        state = hop.state()
        hop.close()
    assert found == expected


def test_all_ranks_together_read_every_text_once_per_epoch(mix):
    names = Counter()
    for step in iter(run(mix, repeat=False, ranks=2).step, None):
        for tokens, *_ in step:
            text = LargeTokenizer().decode([token for token in tokens if token < 260])
            names.update(part.partition(">")[0] for part in text.split("<")[1:])
    assert names == {str(n): 1 for n in range(100)}
