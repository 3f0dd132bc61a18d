# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A blend with a source that is tokenized on the fly: every worker plans for itself."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from megatron.energon.epathlib import EPath
from megatron.energon.tools.checkpoint import command_redist

from energon_ext import ConfigError, PackedTaskEncoder, StateMismatchError, get_train_dataset
from energon_ext.encoders.tokenizers import ByteTokenizer
from energon_ext.errors import StateFormatError
from energon_ext.plan.lookup import find_blend
from tests.support import (
    LargeTokenizer,
    batch_hash,
    close_loaders,
    config,
    drawn_of,
    loader_for,
    take,
    trained_transitions,
    write_dataset,
    write_mix,
    write_tokens,
)

SEQ_LEN = 16
LENGTHS = [int(n) for n in np.random.default_rng(0).integers(1, 40, 64)]
every_packing = pytest.mark.parametrize("packing", ["bin", "sequential"])


def documents(lengths, first=1000):
    """Each token of its own, so that a transition tells where it comes from."""
    starts = np.cumsum([first, *(length + 1 for length in lengths)]).tolist()
    return [list(range(start, start + length)) for start, length in zip(starts, lengths)]


TOKENS = documents(LENGTHS)
TRANSITIONS = {pair for tokens in TOKENS for pair in zip(tokens, tokens[1:])}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("private")
    write_tokens(folder / "web", TOKENS, dtype=np.int32)
    write_dataset(folder / "text", [f"document {n} " * (n % 5 + 1) for n in range(100)])
    return folder


@pytest.fixture(scope="module")
def mix(data):
    return write_mix(data / "mix.yaml", [("web", 1), ("text", 1)])


def limited(data, epochs):
    """The token file is read so often, and the text goes on."""
    path = write_mix(data / f"limited{epochs}.yaml", [("web", 2), ("text", 1)])
    content = json.loads(path.read_text())
    content["splits"]["train"]["blend"][0]["max_epochs"] = epochs
    path.write_text(json.dumps(content))
    return path


class Run:
    """All ranks of a run, one after another, saved and continued on other ranks and workers."""

    def __init__(self, mix, *, repeat=True, batch_size=1, **options):
        self._mix = mix
        self._options = {"packing_buffer_docs": 8, **options}
        self._build = {"repeat": repeat, "batch_size": batch_size}
        self.states = None

    def loader(self, rank=0, ranks=1, workers=0):
        encoder = PackedTaskEncoder(LargeTokenizer(), SEQ_LEN, **self._options)
        dataset = get_train_dataset(
            self._mix,
            worker_config=config(workers, rank, ranks),
            task_encoder=encoder,
            **self._build,
        )
        return loader_for(dataset)

    def go_on(self, ranks, workers, batches=None):
        """Batches of all ranks, ``batches`` of each; None for all that are left."""
        drawn, states = [], []
        for rank in range(ranks):
            loader = self.loader(rank, ranks, workers)
            if self.states is not None:
                loader.restore_states(self.states)
            drawn += list(loader) if batches is None else take(loader, batches)
            states.append(loader.save_state_rank())
            loader.close()
        self.states = states
        return drawn


def of_web(batches):
    """How often each transition of the token file was trained, and documents that ended."""
    counts = {
        pair: count for pair, count in trained_transitions(batches).items() if pair in TRANSITIONS
    }
    return counts, sum(batch.documents_per_source().get("web", 0) for batch in batches)


# What is read -------------------------------------------------------------------------------------


@every_packing
@pytest.mark.parametrize(
    ("ranks", "workers"),
    [
        (1, 0),
        (2, 3),
        *(
            pytest.param(*each, marks=pytest.mark.nightly)
            for each in [(1, 1), (1, 2), (1, 3), (2, 0), (2, 1), (2, 2)]
        ),
    ],
)
def test_a_token_file_beside_text_is_read_once_by_all_workers_together(
    mix, packing, ranks, workers
):
    run = Run(mix, packing=packing, repeat=False)
    batches = run.go_on(ranks, workers)
    counts, ended = of_web(batches)
    assert counts == dict.fromkeys(TRANSITIONS, 1)
    assert ended == len(TOKENS)
    assert sum(batch.documents_per_source().get("text:train", 0) for batch in batches) == 100


@every_packing
@pytest.mark.parametrize(("ranks", "workers"), [(2, 0), (1, 3)])
def test_every_epoch_of_a_token_file_beside_text_has_every_document(data, packing, ranks, workers):
    run = Run(limited(data, 3), packing=packing)
    batches = run.go_on(ranks, workers, 520 // ranks)
    assert {"text:train"} == set(batches[-1].tokens_per_source())
    counts, ended = of_web(batches)
    assert counts == dict.fromkeys(TRANSITIONS, 3)
    assert ended == 3 * len(TOKENS)


def test_workers_read_parts_of_one_order_that_no_other_worker_reads(mix):
    """And the odd document out does not always go to the first."""
    firsts = []
    for ranks in (7, 11):
        parts = []
        for rank in range(ranks):
            batches = list(Run(mix, repeat=False).loader(rank, ranks))
            parts.append(of_web(batches)[1])
        assert sum(parts) == len(TOKENS)
        assert max(parts) - min(parts) <= 1
        firsts.append(parts.index(max(parts)))
    assert firsts != [0, 0]


# Resuming -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", ["bin", pytest.param("sequential", marks=pytest.mark.nightly)])
def test_a_resume_is_exact_at_every_batch_through_the_end_of_a_limit(data, packing):
    run = Run(limited(data, 1), packing=packing)
    loader = run.loader()
    iterator, hashes, states, ended = iter(loader), [], [], 0
    for _ in range(140):
        batch = next(iterator)
        hashes.append(batch_hash(batch))
        states.append(loader.save_state_rank())
        ended += batch.documents_per_source().get("web", 0)
    assert ended == len(TOKENS)
    for position in range(139):
        resumed = run.loader()
        resumed.restore_state_rank(states[position])
        expected = hashes[position + 1 : position + 9]
        assert [batch_hash(batch) for batch in take(resumed, len(expected))] == expected
        close_loaders()


@every_packing
def test_a_resume_with_workers_is_exact(data, packing):
    run = Run(limited(data, 1), packing=packing)
    loader = run.loader(rank=1, ranks=2, workers=2)
    iterator, hashes, states = iter(loader), [], []
    for _ in range(60):
        hashes.append(batch_hash(next(iterator)))
        states.append(loader.save_state_rank())
    for position in (0, 11, 40):
        resumed = run.loader(rank=1, ranks=2, workers=2)
        resumed.restore_state_rank(states[position])
        found = [batch_hash(batch) for batch in take(resumed, 59 - position)]
        assert found == hashes[position + 1 :]
        resumed.close()


@pytest.mark.nightly
def test_a_limit_of_a_token_file_beside_text_may_be_lowered_and_raised_again(data):
    reference = Run(limited(data, 2)).loader()
    iterator, batches, states = iter(reference), [], []
    for _ in range(500):
        batches.append(next(iterator))
        states.append(reference.save_state_rank())
    assert of_web(batches)[1] == 2 * len(TOKENS)
    for done in range(1, 500, 17):
        lowered = Run(limited(data, 1)).loader()
        lowered.restore_state_rank(states[done - 1])
        found = batches[:done] + take(lowered, done % 20)
        raised = Run(limited(data, 2)).loader()
        raised.restore_state_rank(lowered.save_state_rank())
        found += take(raised, 520 - done)
        counts, ended = of_web(found)
        assert counts == dict.fromkeys(TRANSITIONS, 2)
        assert ended == 2 * len(TOKENS)
        close_loaders()


def test_where_the_product_stays_every_worker_goes_on_bit_by_bit(mix):
    """1 x 4, 2 x 2, 4 x 1: text and tokens, the same global batches of four as without a change."""
    run = Run(mix)

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
    with pytest.raises(StateMismatchError, match="share, to continue in other ranks") as refused:
        run.go_on(2, 2, 1)
    assert refused.value.differences == {
        "batches of each worker": ([14, 14, 13, 13], "as many a rank")
    }


def test_four_workers_continue_their_streams_on_two_ranks_and_on_four(tmp_path):
    """Through Energon's own tool, which deals worker states to other ranks."""
    for source in ("a", "b"):
        write_dataset(tmp_path / source, [f"{source}{n} " * (n % 7 + 1) for n in range(80)])
    mix = write_mix(tmp_path / "mix.yaml", [("a", 2), ("b", 1)])

    def loader(rank, ranks, workers):
        encoder = PackedTaskEncoder(ByteTokenizer(), 24, packing_buffer_docs=6)
        worker_config = config(workers, rank, ranks)
        return loader_for(
            get_train_dataset(mix, worker_config=worker_config, batch_size=2, task_encoder=encoder)
        )

    saved, expected = [], set()
    for rank in range(2):
        running = loader(rank, 2, 2)
        take(running, 6)
        path = tmp_path / f"data_rank{rank:05d}.pt"
        torch.save(running.save_state_rank(), path)
        saved.append(EPath(path))
        expected |= {batch_hash(batch) for batch in take(running, 8)}
        running.close()
    output = tmp_path / "redistributed"
    output.mkdir()
    result = CliRunner().invoke(
        command_redist, [*map(str, saved), str(output), "--new-world-size", "4"]
    )
    assert result.exit_code == 0, result.output
    continued = set()
    for rank in range(4):
        resumed = loader(rank, 4, 1)
        state = torch.load(output / f"data_rank{rank:05d}.pt", weights_only=False)
        resumed.restore_state_rank(state)
        continued |= {batch_hash(batch) for batch in take(resumed, 4)}
        resumed.close()
    assert continued == expected


# What is refused ----------------------------------------------------------------------------------


def test_another_number_of_workers_in_all_is_refused(mix):
    run = Run(mix)
    run.go_on(1, 2, 10)
    with pytest.raises(StateMismatchError, match="energon-ext prepare") as refused:
        run.go_on(1, 3, 1)
    assert refused.value.differences == {"workers of all ranks": (2, 3)}


def test_missing_states_are_refused(mix):
    loader = Run(mix).loader()
    for states in ([], [loader.save_state_rank(), None]):
        with pytest.raises(ConfigError, match="the states of all ranks of the saved run"):
            loader.restore_states(states)


def test_one_cursor_for_the_run_is_refused_with_the_source_that_is_streamed(mix):
    loader = Run(mix).loader()
    take(loader, 2)
    with pytest.raises(ConfigError, match="text:train is tokenized on the fly"):
        loader.state_dict()


def test_the_state_of_a_shared_plan_is_refused_and_the_other_way_round(data, mix):
    shared = Run(write_mix(data / "shared.yaml", [("web", 1)]))
    shared.go_on(1, 0, 3)
    private = Run(mix)
    private.go_on(1, 0, 3)
    shared.states, private.states = private.states, shared.states
    for run in (shared, private):
        with pytest.raises(StateMismatchError) as refused:
            run.go_on(1, 0, 1)
        assert refused.value.differences["plan"] in (("shared", "private"), ("private", "shared"))


def test_a_text_source_that_has_left_blocks_no_other_ranks(data):
    """The product of ranks and workers stays; text that is gone is retained by every worker."""
    write_dataset(data / "more", [f"more {n} " * 3 for n in range(40)])
    run = Run(write_mix(data / "three.yaml", [("web", 1), ("text", 1), ("more", 1)]))
    run.go_on(1, 2, 6)
    before = run.states
    without = Run(write_mix(data / "two.yaml", [("web", 1), ("text", 1)]))
    without.states = before
    without.go_on(2, 1, 4)
    back = Run(data / "three.yaml")
    back.states = without.states
    for loader in (back.loader(rank, 2, 1) for rank in range(2)):
        loader.restore_states(back.states)
        assert {change.key: change.change for change in loader.changes} == {
            "web": "kept",
            "text:train": "kept",
            "more:train": "kept",
        }
        assert any("more:train" in batch.tokens_per_source() for batch in take(loader, 6))


def test_a_state_that_must_replay_does_not_continue_elsewhere(data, mix):
    """``save_every`` that does not fit: the states of the workers are older than the last batch."""
    run = Run(mix)
    dataset = run.loader(0, 1, 2).dataset.dataset.dataset
    loader = loader_for(dataset, save_every=10)
    take(loader, 13)
    run.states = [loader.save_state_rank()]
    close_loaders()
    with pytest.raises(StateFormatError, match=r"batches old; .* save_every"):
        run.go_on(2, 1, 1)


def test_counts_are_those_of_this_worker(mix):
    loader = Run(mix).loader(rank=1, ranks=2)
    tokens, ended = Counter(), Counter()
    for batch in take(loader, 50):
        tokens.update(batch.tokens_per_source())
        ended.update(batch.documents_per_source())
    expected = {key: (ended[key], tokens[key]) for key in ("text:train", "web")}
    assert drawn_of(find_blend(loader)) == expected
