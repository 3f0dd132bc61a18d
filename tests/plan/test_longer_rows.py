# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Row length and packing may change during a run, and everything is still read once."""

import itertools
import json
import random
from collections import Counter

import numpy as np
import pytest

from energon_ext import PackedTaskEncoder, SFTTaskEncoder, get_train_dataset
from energon_ext.errors import StateMismatchError
from energon_ext.plan.lookup import find_blend
from tests.cli.command import energon_ext
from tests.plan.memory_documents import (
    PACKERS,
    documents_in,
    pairs,
    planned,
    state_of,
    take,
    trained,
)
from tests.plan.runs import edit_yaml, open_loaders, write_split
from tests.saves import save_cursor
from tests.support import (
    LargeTokenizer,
    close_loaders,
    config,
    loader_for,
    trained_transitions,
    write_mix,
    write_tokens,
    write_weights,
)
from tests.support import take as take_batches

ROWS = 8
TOPOLOGIES = [(1, 8), (1, 2), (2, 4), (4, 1), (8, 1)]


def packing_of(name, seq_len):
    """Return what packed rows, as a state contains it."""
    return {"packer": PACKERS[name](seq_len).to_json(), "row_tokens": seq_len}


def documents(count, first_id, seed):
    """Return documents of unique token ids, from one token to many rows."""
    rng = np.random.default_rng(seed)
    lengths = np.where(rng.random(count) < 0.2, rng.integers(200, 900, count), 0)
    lengths = np.where(lengths, lengths, rng.integers(1, 60, count))
    ends = first_id + np.cumsum(lengths + 1)  # no document begins where another ends
    return [list(range(end - length, end)) for end, length in zip(ends, lengths)]


CORPORA = {name: documents(60, 100 + 20_000 * n, n) for n, name in enumerate("abc")}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("longer")
    for name, tokens in CORPORA.items():
        write_tokens(folder / name, tokens, np.int32)
    return folder


def transitions_of(names):
    """Return how often each pair of adjacent tokens must be trained per epoch."""
    return Counter(
        pair for name in names for tokens in CORPORA[name] for pair in zip(tokens, tokens[1:])
    )


class Run:
    """A run that is resumed several times, each time with other options."""

    def __init__(self):
        self.state, self.batches, self.ended = None, [], False

    def read(self, mix, steps, *, ranks=1, batch=ROWS, workers=0, seq_len=64, **options):
        encoder = PackedTaskEncoder(LargeTokenizer(), seq_len, packing_buffer_docs=20, **options)
        loaders = open_loaders(mix, encoder, ranks, workers, batch, ROWS)
        for loader in loaders if self.state is not None else ():
            loader.load_state_dict(json.loads(self.state))
        iterators = [iter(loader) for loader in loaders]
        for _ in range(steps):
            drawn = [next(i, None) for _ in range(ROWS // (ranks * batch)) for i in iterators]
            if drawn[0] is None:
                self.ended = True
                break
            self.batches += drawn
        texts = {json.dumps(loader.state_dict(), sort_keys=True) for loader in loaders}
        assert len(texts) == 1, "ranks disagree on the state"
        self.state = texts.pop()
        close_loaders()
        return loaders[0]

    @property
    def counts(self):
        return sum((Counter(batch.documents_per_source()) for batch in self.batches), Counter())


def write(folder, weights, epochs=1, **fields):
    """Write an interleave in which every source ends."""
    entries = [{"path": path, "weight": w, "max_epochs": epochs} for path, w in weights.items()]
    return write_split(folder / "mix.yaml", {"interleave": entries}, **fields)


#: Every pair of values is in the suite, all combinations run at night.
CHANGES = [
    pytest.param(
        *(first, second, lengths, epochs),
        marks=() if lengths[0] == 64 and epochs == 1 + (first != second) else pytest.mark.nightly,
    )
    for first, second, lengths, epochs in itertools.product(
        PACKERS, PACKERS, [(64, 256, 32), (256, 64, 128)], [1, 2, 3]
    )
]


@pytest.mark.parametrize(("first", "second", "lengths", "epochs"), CHANGES)
def test_each_transition_is_trained_once_when_length_and_packing_change(
    data, first, second, lengths, epochs
):
    run, mix = Run(), write(data, {"a": 1, "b": 2}, epochs)
    run.read(mix, 5, seq_len=lengths[0], packing=first)
    run.read(mix, 3, ranks=2, batch=2, workers=1, seq_len=lengths[1], packing=second)
    run.read(mix, 999, ranks=4, batch=2, seq_len=lengths[2], packing=first)
    assert run.ended
    expected = transitions_of("ab")
    assert trained_transitions(run.batches) == {k: epochs * n for k, n in expected.items()}
    assert run.counts == {"a": 60 * epochs, "b": 60 * epochs}
    assert [len(run.batches[n].tokens) for n in (0, 5)] == [ROWS * lengths[0], 2 * lengths[1]]


def chain(data, seed):
    """Return a run of eleven hops; sources that were absent return with other row lengths."""
    rng, run = random.Random(seed), Run()
    for hop in range(11):
        names = "abc" if hop == 10 else rng.choice(("abc", "abc", "ab", "bc"))
        mix = write(data, {name: rng.randint(1, 5) for name in names})
        ranks, batch = rng.choice(TOPOLOGIES)
        packing = rng.choice(("bin", "sequential"))
        options = {"packing": packing, "seq_len": rng.choice((16, 64, 128, 300))}
        if packing == "bin":
            options["alignment"] = rng.choice((1, 1, 4))
            options["packing_max_docs_per_bin"] = rng.choice((None, None, 3))
        steps = 9999 if hop == 10 else rng.randint(0, 4)
        run.read(mix, steps, ranks=ranks, batch=batch, **options)
    return run


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(n, marks=pytest.mark.nightly) for n in range(3, 200))]
)
def test_ten_hops_over_lengths_packings_topologies_and_mixes_read_everything_once(data, seed):
    run = chain(data, seed)
    assert run.ended
    assert trained_transitions(run.batches) == transitions_of("abc")
    assert run.counts == {"a": 60, "b": 60, "c": 60}


@pytest.mark.parametrize("first", PACKERS)
def test_no_row_has_a_token_twice_over_epochs_lengths_packings_and_topologies(data, first):
    run, mix = Run(), write(data, {"a": 1, "b": 2}, epochs=9)
    (second,) = set(PACKERS) - {first}
    hops = [(first, 300, 12, 1), (first, 900, 9, 2), (second, 300, 12, 4), (second, 64, 60, 1)]
    for packing, seq_len, steps, ranks in [*hops, (first, 900, 9, 2), (first, 900, 9, 1)]:
        before = len(run.batches)
        run.read(mix, steps, ranks=ranks, batch=ROWS // ranks, seq_len=seq_len, packing=packing)
        for batch in run.batches[before:]:
            is_padding = batch.padding_mask().view(-1, seq_len).tolist()
            for tokens, padding in zip(batch.tokens.view(-1, seq_len).tolist(), is_padding):
                tokens = [token for token, is_empty in zip(tokens, padding) if not is_empty]
                assert len(set(tokens)) == len(tokens)
    counts = trained_transitions(run.batches)
    assert min(counts[pair] for pair in transitions_of("ab")) >= 3


@pytest.mark.parametrize(
    ("lengths", "second"),
    [
        *itertools.product([[1], [1, 1, 5]], ["bin", "sequential"]),
        ([40_000, 1], "bin"),
        pytest.param([40_000, 1], "sequential", marks=pytest.mark.nightly),
    ],
)
def test_a_stream_that_was_read_to_its_end_begins_again_with_other_rows(lengths, second):
    """A document of one token that begins a stream is no label that was already read."""
    for epochs in (1, 2, 3):
        short = planned(lengths, packing="sequential", seq_len=4, epochs=epochs)
        found = take(short)
        long = planned(lengths, packing=second, seq_len=8, epochs=4)
        long.restore_state(json.loads(json.dumps(state_of(short))), packing_of("sequential", 4))
        found += take(long)
        assert documents_in(found) == 4 * len(lengths)
        assert trained(found) == pairs(lengths, 4)


@pytest.mark.parametrize("second", ["bin", "sequential"])
@pytest.mark.parametrize("first", ["bin", "sequential"])
def test_documents_of_one_token_count_once_wherever_rows_change(first, second):
    """Windows share one token, which may be a whole document; pieces of two epochs may be left."""
    lengths = [1] * 12 + [5, 1, 9, 1]
    options = {"epochs": 3, "buffer_docs": 24}
    count = len(take(planned(lengths, packing=first, seq_len=4, **options)))
    assert count > 15
    for number in range(count + 1):
        short = planned(lengths, packing=first, seq_len=4, **options)
        found = take(short, number)
        long = planned(lengths, packing=second, seq_len=7, **options)
        long.restore_state(json.loads(json.dumps(state_of(short))), packing_of(first, 4))
        found += take(long)
        assert trained(found) == pairs(lengths, 3), number
        assert documents_in(found) == 3 * len(lengths), number


def test_the_undrawn_pieces_of_a_document_become_one_piece_of_a_longer_row():
    short = planned([9, 9], seq_len=4, epochs=1)  # two pieces of 5 tokens each, a row per piece
    ((first,), *_), *_ = take(short, 1)
    long = planned([9, 9], seq_len=20, epochs=1)
    long.restore_state(state_of(short), packing_of("bin", 4))
    rest = [tokens for slices, *_ in take(long) for tokens in slices]
    drawn, other = first[0] // 1000, 1 - first[0] // 1000
    assert sorted(map(len, rest)) == [5, 9]
    assert list(range(1000 * other, 1000 * other + 9)) in rest
    assert {first[0] % 1000, *(tokens[0] - 1000 * drawn for tokens in rest)} >= {0, 4}


def test_resumes_without_a_change_read_what_one_run_reads(data):
    mix = write(data, {"a": 1, "b": 2}, epochs=2)
    whole, parts = Run(), Run()
    whole.read(mix, 12)
    for steps in (3, 0, 4, 5):
        parts.read(mix, steps)
    assert [b.tokens.tolist() for b in parts.batches] == [b.tokens.tolist() for b in whole.batches]


def test_an_axis_of_tokens_counts_rows_with_the_length_they_had(data):
    """Two steps of 8 rows of 64 are 1,024 tokens; with two of 8 rows of 256 they are 5,120."""
    weights = {"a": {"step": {0: 1, 5000: 0}}, "b": {"step": {0: 0, 5000: 1}}}
    mix = write(data, weights, epochs=9, schedule_axis="tokens")
    run = Run()
    for seq_len, steps in ((64, 2), (256, 2), (64, 1), (64, 1)):
        loader = run.read(mix, steps, seq_len=seq_len)
    assert [{"a"} if n < 4 else {"b"} for n in range(6)] == [
        {key for key, count in batch.tokens_per_source().items() if count} for batch in run.batches
    ]
    assert json.loads(run.state)["row_lengths"] == [[16, 64], [32, 256]]
    assert find_blend(loader.dataset).position(6, 48) == 16 * 64 + 16 * 256 + 16 * 64


def test_row_length_may_not_change_inside_a_step(data):
    mix, run = write(data, {"a": 1, "b": 2}), Run()
    loader = open_loader(mix, 64, batch_size=2)
    next(iter(loader))
    run.state = json.dumps(loader.state_dict())
    with pytest.raises(StateMismatchError, match="seq_len: saved 64, now 128"):
        run.read(mix, 1, seq_len=128)


def test_row_length_of_conversations_may_not_change(tmp_path):
    """Conversations are truncated to a row, so their tokens would change during the run."""
    write_tokens(tmp_path / "a", [[5, 6, 7, 8]] * 40)
    write_weights(tmp_path / "a", [[0, 0, 1, 1]] * 40, tokenizer=LargeTokenizer())
    mix = write_mix(tmp_path / "mix.yaml", [("a", 1)])

    def loader(seq_len):
        encoder = SFTTaskEncoder(LargeTokenizer(), seq_len)
        options = {"worker_config": config(), "batch_size": 2, "task_encoder": encoder}
        return loader_for(get_train_dataset(mix, **options))

    first = loader(16)
    next(iter(first))
    with pytest.raises(StateMismatchError, match="seq_len: saved 16, now 32"):
        loader(32).load_state_dict(first.state_dict())


def test_a_trace_crosses_a_change_of_length(data, tmp_path):
    run, mix = Run(), write(data, {"a": 1, "b": 2})
    for seq_len, steps in ((64, 3), (256, 2), (256, 1)):
        run.read(mix, steps, seq_len=seq_len)
        save_cursor(tmp_path / "run", len(run.batches), json.loads(run.state))
    for step, batch in enumerate(run.batches):
        result = energon_ext("trace", tmp_path / "run", mix, "--step", step, "--json")
        rows = [json.loads(line) for line in result.stdout.splitlines()]
        assert len(rows) == ROWS
        shown = {
            token
            for row in rows
            for number, start, stop in row["contents"]
            for token in CORPORA[row["source"]][number][start:stop]
        }
        read = set(batch.tokens[~batch.padding_mask()].tolist())
        # The last label of a row is not one of its inputs.
        assert read <= shown and len(shown - read) <= ROWS, step
        number = next(row["contents"][0][0] for row in rows if row["source"] == "b")
        for last in ((), ("--step", step)):
            result = energon_ext("trace", tmp_path / "run", mix, "--document", f"b:{number}", *last)
            assert f"step {step}, row" in result.stdout


# Later passes -------------------------------------------------------------------------------------


def open_loader(mix, seq_len, **options):
    encoder = PackedTaskEncoder(LargeTokenizer(), seq_len, packing_buffer_docs=20)
    worker_config = config(options.pop("workers", 0))
    options = {"batch_size": ROWS, "rows_per_step": ROWS, **options}
    return loader_for(
        get_train_dataset(mix, worker_config=worker_config, task_encoder=encoder, **options)
    )


def test_a_second_pass_without_repeat_counts_rows_by_its_own_length(data):
    weights = {"a": {"step": {0: 1, 9000: 0.1}}, "b": {"step": {0: 0.1, 9000: 1}}}
    mix = write_mix(data / "once.yaml", list(weights.items()))
    edit_yaml(mix, schedule_axis="tokens")
    short = open_loader(mix, 64, repeat=False)
    take_batches(short, 4)
    long = open_loader(mix, 256, repeat=False)
    long.load_state_dict(short.state_dict())
    assert long.state_dict()["row_lengths"] == [[32, 64]]
    assert list(long), "the rest of the first pass"
    expected = list(open_loader(mix, 256, repeat=False))
    second = list(long)
    assert [b.tokens.tolist() for b in second] == [b.tokens.tolist() for b in expected]
    assert find_blend(long.dataset).position(2, 16) == 16 * 256


@pytest.mark.parametrize("workers", [0, 2])
def test_later_passes_of_an_epochized_blend_count_the_rows_of_the_first(data, workers):
    """The first pass reads 32 rows of 64, then rows of 256 to its end and beyond."""
    node = {"blend_epochized": [{"path": name, "repetitions": 1} for name in "ab"]}
    mix = write_split(data / "epochized.yaml", node, schedule_axis="tokens")
    short = open_loader(mix, 64)
    take_batches(short, 4)
    long = open_loader(mix, 256, workers=workers)
    long.load_state_dict(short.state_dict())
    blend, state = find_blend(long.dataset), {}
    for _ in long:
        state = long.state_dict()
        sources = state["plan"]["sources"].values()
        if all(source["rows"]["pass_start"] == 2 for source in sources):
            break
    assert state["row_lengths"] == [[32, 64]] and state["plan"]["step"] > 4
    assert blend.position(9, 72) == 32 * 64 + 40 * 256
    again = open_loader(mix, 64)
    again.load_state_dict(state)
    assert again.state_dict()["row_lengths"] == [[32, 64], [state["plan"]["row"], 256]]
