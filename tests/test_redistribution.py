# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Another number of ranks and workers: nothing of an epoch is lost or comes twice."""

from collections import Counter

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from megatron.energon.epathlib import EPath
from megatron.energon.tools.checkpoint import command_redist

from energon_ext import (
    ConfigError,
    MultiSpliceTaskEncoder,
    PackedTaskEncoder,
    StateMismatchError,
    get_train_dataset,
)
from energon_ext.documents.order import DocumentOrder
from energon_ext.encoders import pretrain as packed
from energon_ext.encoders.tokenizers import ByteTokenizer
from energon_ext.errors import StateFormatError
from energon_ext.plan.lookup import find_blend
from energon_ext.splice import MultiSpliceConfig
from energon_ext.state.serialize import read_state_file
from tests.support import (
    LargeTokenizer,
    batch_hash,
    close_loaders,
    config,
    loader_for,
    take,
    trained_transitions,
    write_dataset,
    write_mix,
    write_tokens,
)

ROW_LENGTH = 16
LENGTHS = [int(n) for n in np.random.default_rng(0).integers(1, 40, 300)]


def documents(lengths, first=1000):
    """Each token of its own, so that a transition tells where it comes from."""
    starts = np.cumsum([first, *(length + 1 for length in lengths)]).tolist()
    return [list(range(start, start + length)) for start, length in zip(starts, lengths)]


class Run:
    """All ranks of a run, one after another, saved and continued on other layouts."""

    def __init__(self, mix, *, seed=0, repeat=False, batch_size=1, **options):
        self._build = {"repeat": repeat, "batch_size": batch_size}
        self._mix, self._seed = mix, seed
        self._options = {"packing_buffer_docs": 8, **options}
        self.states = None

    def loader(self, rank, world_size, num_workers):
        encoder = PackedTaskEncoder(LargeTokenizer(), ROW_LENGTH, **self._options)
        return loader_for(
            get_train_dataset(
                self._mix,
                worker_config=config(num_workers, rank, world_size, self._seed),
                task_encoder=encoder,
                **self._build,
            )
        )

    def go_on(self, world_size, num_workers, batches=None):
        """Batches of all ranks, ``batches`` of each; None for all that are left."""
        drawn, states = [], []
        for rank in range(world_size):
            loader = self.loader(rank, world_size, num_workers)
            if self.states is not None:
                loader.restore_states(self.states)
            found = list(loader) if batches is None else take(loader, batches)
            drawn += found
            states.append(loader.save_state_rank() if batches is not None else None)
            loader.close()
        self.states = states
        return drawn


HOPS = {
    "1, 3, 2 workers": [(1, 1, 25), (1, 3, 25), (1, 2, None)],
    "no, 2, no workers": [(1, 0, 25), (1, 2, 25), (1, 0, None)],
    "2, 1, 4 ranks": [(2, 0, 20), (1, 0, 25), (4, 0, None)],
    "2 x 2, 3 x 1, 1 x 4": [(2, 2, 20), (3, 1, 20), (1, 4, None)],
}


@pytest.mark.parametrize("hops", HOPS.values(), ids=HOPS)
@pytest.mark.parametrize("packing", ["bin", "sequential"])
def test_token_files_are_read_once_on_any_ranks_and_workers(tmp_path, packing, hops, monkeypatch):
    monkeypatch.setattr(packed, "TOKEN_FILE_BUFFER_DOCS", 16)  # several plannings
    write_tokens(tmp_path / "a", documents(LENGTHS), dtype=np.int32)
    write_tokens(tmp_path / "b", documents(LENGTHS[:90], first=40_000), dtype=np.int32)
    mix = write_mix(tmp_path / "mix.yaml", [("a", 3), ("b", 1)])
    run = Run(mix, packing=packing)
    batches = [batch for hop in hops for batch in run.go_on(*hop)]
    counts = trained_transitions(batches)
    expected = documents(LENGTHS) + documents(LENGTHS[:90], first=40_000)
    assert set(counts) == {(a, b) for tokens in expected for a, b in zip(tokens, tokens[1:])}
    assert set(counts.values()) == {1}
    ended = sum((Counter(batch.documents_per_source()) for batch in batches), Counter())
    assert ended == {"a": 300, "b": 90}


def test_a_run_that_is_dealt_anew_resumes_exactly_like_any_other(tmp_path):
    write_tokens(tmp_path / "a", documents(LENGTHS), dtype=np.int32)
    run = Run(write_mix(tmp_path / "mix.yaml", [("a", 1)]), repeat=True)
    run.go_on(1, 3, 30)
    run.go_on(1, 2, 10)
    saved = run.states
    expected = [batch_hash(batch) for batch in run.go_on(1, 2, 60)]
    run.states = saved
    assert [batch_hash(b) for b in run.go_on(1, 2, 25) + run.go_on(1, 2, 35)] == expected


def test_counts_and_the_schedule_go_on_where_the_run_was(tmp_path):
    write_tokens(tmp_path / "a", documents(LENGTHS), dtype=np.int32)
    write_tokens(tmp_path / "b", documents(LENGTHS, first=40_000), dtype=np.int32)
    mix = write_mix(
        tmp_path / "mix.yaml", [("a", {"step": {0: 1, 30: 0}}), ("b", {"step": {0: 0, 30: 1}})]
    )
    run = Run(mix, repeat=True)
    before = run.go_on(1, 3, 25)
    loader = run.loader(0, 1, 2)
    loader.restore_states(run.states)
    drawn = [
        sum(
            worker.state.dataset_state["datasets"][0]["datasets"][0]["sources"]["a"]["tokens"]
            for worker in loader.save_state_rank().worker_states
        )
    ]
    assert drawn == [sum(batch.tokens_per_source()["a"] for batch in before)]
    after = [set(batch.tokens_per_source()) for batch in take(loader, 9)]
    assert after == [{"a"}] * 5 + [{"b"}] * 4


def test_an_interleave_keeps_its_balance(tmp_path):
    for number, name in enumerate("ab"):
        tokens = documents(LENGTHS, first=1000 + 39_000 * number)
        write_tokens(tmp_path / name, tokens, dtype=np.int32)
    mix = write_mix(tmp_path / "mix.yaml", [("a", 3), ("b", 1)])
    mix.write_text(mix.read_text().replace('"blend"', '"interleave"'))
    run = Run(mix, repeat=True)
    tokens = Counter()
    for hop in [(1, 3, 33), (2, 1, 20), (1, 1, 27)]:
        for batch in run.go_on(*hop):
            tokens.update(batch.tokens_per_source())
    # 100 rows of 16 tokens; each of at most three workers at a time is a row off at most.
    assert abs(tokens["a"] - 3 * tokens["b"]) <= 3 * 4 * ROW_LENGTH


def look_of(batch):
    return tuple(batch.tokens.tolist()), tuple(batch.position_ids.tolist())


def test_spliced_examples_are_shown_once_on_any_ranks_and_workers(tmp_path):
    write_dataset(tmp_path / "book", ["abcdefghij" * n for n in (1, 2, 3)])
    mix = write_mix(tmp_path / "mix.yaml", [("book", 1)])
    splice = MultiSpliceConfig(content_length=4, num_docs=3)

    def loader(rank, world_size, num_workers):
        return loader_for(
            get_train_dataset(
                mix,
                worker_config=config(num_workers, rank, world_size),
                batch_size=1,
                task_encoder=MultiSpliceTaskEncoder(ByteTokenizer(), 12, splice),
                repeat=False,
            )
        )

    shown, states = Counter(), None
    for world_size, num_workers, batches in [(1, 3, 20), (2, 1, 8), (1, 0, None)]:
        saved = []
        for rank in range(world_size):
            one = loader(rank, world_size, num_workers)
            size = find_blend(one).datasets[0].examples.size
            if states is not None:
                one.restore_states(states)
            for batch in list(one) if batches is None else take(one, batches):
                shown[look_of(batch)] += 1
            saved.append(one.save_state_rank() if batches is not None else None)
            one.close()
        states = saved
    # "abcdefghij" repeats, so some examples look alike; how often each comes is what counts.
    whole = Counter(look_of(batch) for batch in loader(0, 1, 0))
    assert shown == whole and shown.total() == size > 40


@given(
    size=st.integers(1, 40),
    hops=st.lists(
        st.tuples(st.integers(1, 5), st.lists(st.integers(0, 9), min_size=5, max_size=5)),
        min_size=1,
        max_size=4,
    ),
    shuffled=st.booleans(),
)
def test_whatever_each_worker_took_every_epoch_is_read_once(size, hops, shuffled):
    """Workers may be epochs apart, have nothing, or be at an end."""
    epochs = 3
    read, orders = Counter(), []
    for workers, steps in [*hops, (2, [999] * 5)]:
        new = [
            DocumentOrder(size, "key", worker, workers, epochs=epochs, shuffled=shuffled)
            for worker in range(workers)
        ]
        for order in new:
            if orders:
                order.take_over(orders)
                state = order.save_state()
                order.restart()
                order.restore_state(state)
        for order, step in zip(new, steps):
            while step and not order.ended:
                found = order.take(step)
                read.update(found.tolist())
                step -= len(found)
        orders = new
    assert read == dict.fromkeys(range(size), epochs)


def test_text_goes_on_with_as_many_workers_as_before_only(tmp_path):
    write_dataset(tmp_path / "text", [f"document {n} " * 3 for n in range(60)])
    write_tokens(tmp_path / "a", documents(LENGTHS), dtype=np.int32)
    run = Run(write_mix(tmp_path / "mix.yaml", [("a", 1), ("text", 1)]), repeat=True)
    run.go_on(1, 2, 10)
    with pytest.raises(StateMismatchError) as refused:
        run.go_on(1, 3, 1)
    assert "workers of all ranks, for text:train: saved 2, now 3" in str(refused.value)
    assert "for a:" not in str(refused.value)


def test_where_the_product_stays_every_worker_goes_on_bit_by_bit(tmp_path):
    """1 x 4, 2 x 2, 4 x 1: text and tokens, the same global batches of four as without a change."""
    write_dataset(tmp_path / "text", [f"document {n} " * (n % 5 + 1) for n in range(200)])
    write_tokens(tmp_path / "a", documents(LENGTHS), dtype=np.int32)
    run = Run(write_mix(tmp_path / "mix.yaml", [("a", 1), ("text", 1)]), repeat=True)

    def global_batches(batches, ranks):
        per_rank = len(batches) // ranks
        streams = [batches[rank * per_rank : (rank + 1) * per_rank] for rank in range(ranks)]
        step = 4 // ranks
        return [
            {batch_hash(b) for stream in streams for b in stream[start : start + step]}
            for start in range(0, per_rank, step)
        ]

    expected = global_batches(run.go_on(1, 4, 48), ranks=1)
    run.states, found = None, []
    for ranks, workers in [(1, 4), (2, 2), (4, 1)]:
        found += global_batches(run.go_on(ranks, workers, 16 // ranks), ranks)
    assert found == expected
    run.go_on(1, 4, 6)  # two of four workers are ahead: ranks made of them would not be level
    with pytest.raises(StateMismatchError, match="every rank has drawn as many batches"):
        run.go_on(2, 2, 1)


def test_a_source_that_was_away_comes_back_on_other_workers(tmp_path):
    write_tokens(tmp_path / "a", documents(LENGTHS), dtype=np.int32)
    write_tokens(tmp_path / "b", documents(LENGTHS[:90], first=40_000), dtype=np.int32)
    both, alone = [("a", 1), ("b", 1)], [("a", 1)]
    run = Run(tmp_path / "mix.yaml")
    batches = []
    for entries, hop in [
        (both, (1, 1, 12)),
        (alone, (1, 3, 4)),
        (alone, (1, 2, 3)),
        (both, (2, 1, None)),
    ]:
        write_mix(tmp_path / "mix.yaml", entries)
        batches += run.go_on(*hop)
    counts = trained_transitions(batches)
    expected = documents(LENGTHS) + documents(LENGTHS[:90], first=40_000)
    assert set(counts) == {(a, b) for tokens in expected for a, b in zip(tokens, tokens[1:])}
    assert set(counts.values()) == {1}


def test_missing_states_are_refused(tmp_path):
    write_tokens(tmp_path / "a", documents(LENGTHS), dtype=np.int32)
    loader = Run(write_mix(tmp_path / "mix.yaml", [("a", 1)])).loader(0, 1, 0)
    for states in ([], [loader.save_state_rank(), None]):
        with pytest.raises(ConfigError, match="the states of all ranks of the saved run"):
            loader.restore_states(states)


def test_a_state_that_must_replay_is_not_dealt_anew(tmp_path):
    write_tokens(tmp_path / "a", documents(LENGTHS), dtype=np.int32)
    run = Run(write_mix(tmp_path / "mix.yaml", [("a", 1)]), repeat=True)
    loader = run.loader(0, 1, 2)
    loader.close()
    loader = loader_for(loader.dataset.dataset.dataset, save_every=10)
    take(loader, 13)
    run.states = [loader.save_state_rank()]
    with pytest.raises(StateFormatError, match="a multiple of the loader's save_every"):
        run.go_on(1, 3, 1)
    close_loaders()


def test_four_workers_continue_their_streams_on_two_ranks_and_on_four(tmp_path):
    for source in ("a", "b"):
        write_dataset(tmp_path / source, [f"{source}{n} " * (n % 7 + 1) for n in range(80)])
    mix = write_mix(tmp_path / "mix.yaml", [("a", 2), ("b", 1)])

    def loader(rank, world_size, num_workers):
        encoder = PackedTaskEncoder(ByteTokenizer(), 24, packing_buffer_docs=6)
        return loader_for(
            get_train_dataset(
                mix,
                worker_config=config(num_workers, rank, world_size),
                batch_size=2,
                task_encoder=encoder,
            )
        )

    saved, expected = [], set()
    for rank in range(2):
        running = loader(rank, 2, 2)
        take(running, 6)
        path = tmp_path / f"data_rank{rank:05d}.pt"
        torch.save(running.save_state_rank(), path)
        saved.append(EPath(path))
        expected |= {batch_hash(batch) for batch in take(running, 8)}
    output = tmp_path / "redistributed"
    output.mkdir()
    result = CliRunner().invoke(
        command_redist, [*map(str, saved), str(output), "--new-world-size", "4"]
    )
    assert result.exit_code == 0, result.output
    continued = set()
    for rank in range(4):
        resumed = loader(rank, 4, 1)
        resumed.restore_state_rank(read_state_file(output / f"data_rank{rank:05d}.pt", None))
        continued |= {batch_hash(batch) for batch in take(resumed, 4)}
    assert continued == expected
