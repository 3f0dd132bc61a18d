# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Questions about a run do not move it: its next batches and states are those of a run unasked."""

import json

import pytest

from energon_ext import PackedTaskEncoder, get_train_dataset
from energon_ext.cli.forecast import imbalance_of
from energon_ext.errors import StateFormatError
from energon_ext.plan.cursor import restore_cursor, save_cursor
from energon_ext.plan.estimate import estimate
from energon_ext.plan.forecast import forecast, late_breakpoints, window_edges
from energon_ext.plan.lookup import find_blend
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from energon_ext.weights import LiveWeights
from tests.plan.runs import SEQ_LEN, write_numbered, write_split
from tests.samples.test_longer_samples import FirstFit
from tests.samples.test_tokens_beside_samples import CaptionsAndText
from tests.samples.vision import PackedCaptions, PlannedCaptions, write_images
from tests.support import LargeTokenizer, config, loader_for, take, write_dataset, write_texts

ROWS = 4
SPLICE = {"num_docs": 3, "content_length": 8}
#: The entries, task encoder and rule of a run with every kind of source.
KINDS = {
    "token files": (["a", "b"], lambda: PackedTaskEncoder(LargeTokenizer(), SEQ_LEN), "blend"),
    "one stream": (
        ["a", {"path": "b", "max_epochs": 9}],
        lambda: PackedTaskEncoder(LargeTokenizer(), SEQ_LEN, packing="sequential"),
        "interleave",
    ),
    "text": (["web", "more"], lambda: PackedTaskEncoder(ByteTokenizer(), SEQ_LEN), "interleave"),
    "spliced": (
        ["a", {"path": "b", "splice": SPLICE}],
        lambda: PackedTaskEncoder(LargeTokenizer(), SEQ_LEN),
        "blend",
    ),
    "samples": (["photos", "charts"], PlannedCaptions, "interleave"),
    "packed samples": (["photos", "charts"], PackedCaptions, "blend"),
    "samples packed by their encoder": (["photos", "charts"], FirstFit, "interleave"),
    "tokens beside samples": (["photos", "text/train"], CaptionsAndText, "interleave"),
}

QUESTIONS = {
    "estimate": lambda blend, state: estimate(blend, 30),
    "forecast": lambda blend, state: forecast(blend, 30),
    "forecast from a state": lambda blend, state: forecast(blend, 30, state=state),
    "steps": lambda blend, state: take(blend.fork().draw_steps(), 9),
    "imbalance": lambda blend, state: imbalance_of(blend),
    "shares": lambda blend, state: [blend.shares_at_step(n) for n in (0, 50)],
    "sizes": lambda blend, state: (blend.documents, blend.epoch_tokens, blend.rows),
    "breakpoints": lambda blend, state: (late_breakpoints(blend, 9), window_edges(blend, 9)),
    "state": lambda blend, state: save_cursor(blend),
    "ends": lambda blend, state: [(rows.ended, rows.is_finite) for rows in blend.rows],
}


def write_sources(folder):
    """Write the sources of all kinds."""
    write_numbered(folder / "a", 90, 100, 1)
    write_numbered(folder / "b", 70, 10_000, 2)
    for name in ("web", "more"):
        write_dataset(folder / name, [f"{name} {n} {'x' * (n % 50)}" for n in range(60)])
    write_images(folder / "photos", 30)
    write_images(folder / "charts", 20)
    write_texts(folder / "text", [f"Text {n} {'x' * (n * 7 % 60)}." for n in range(60)])
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_sources(tmp_path_factory.mktemp("questions"))


def write(folder, kind, **fields):
    entries, encoder, rule = KINDS[kind]
    members = [entry if isinstance(entry, dict) else {"path": entry} for entry in entries]
    members[0] = {**members[0], "weight": {"linear": {0: 1, 9: 3}}}
    name = kind.replace(" ", "_")
    return write_split(folder / f"{name}.yaml", {rule: members, **fields}), encoder


def open_loader(path, encoder, workers=0):
    dataset = get_train_dataset(
        path,
        worker_config=config(workers),
        batch_size=2,
        rows_per_step=ROWS,
        task_encoder=encoder(),
    )
    return loader_for(dataset)


def seen(batch):
    """Return what a batch contains, as text."""
    tensors = batch.tensors() if hasattr(batch, "tensors") else {"samples": batch}
    return repr({name: getattr(each, "tolist", lambda each=each: each)() for name, each in
                 tensors.items()})  # fmt: skip


def run_with(path, encoder, workers, question):
    """Read 3 batches, resume, and read 9 more; ask after the resume and after each batch."""
    first = open_loader(path, encoder, workers)
    take(first, 3)
    state = first.state_dict()
    first.close()
    loader = open_loader(path, encoder, workers)
    loader.load_state_dict(state)
    question(find_blend(loader), state)
    found, batches = [], iter(loader)
    for _ in range(9):
        found.append((seen(next(batches)), json.dumps(loader.state_dict())))
        question(find_blend(loader), state)
    loader.close()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_no_question_moves_the_run_that_it_is_asked_about(folder, kind):
    path, encoder = write(folder, kind)
    expected = run_with(path, encoder, 0, lambda blend, state: None)

    def ask_all(blend, state):
        for ask in QUESTIONS.values():
            ask(blend, state)

    assert run_with(path, encoder, 0, ask_all) == expected


@pytest.mark.parametrize(
    "question",
    [
        pytest.param(name, marks=[] if name in ("estimate", "forecast") else pytest.mark.nightly)
        for name in QUESTIONS
    ],
)
def test_each_question_alone_leaves_a_run_with_workers_where_it_was(folder, question):
    path, encoder = write(folder, "token files")
    expected = run_with(path, encoder, 0, lambda blend, state: None)
    assert run_with(path, encoder, 1, QUESTIONS[question]) == expected


def test_a_question_does_not_wait_for_live_weights_and_does_not_decide_them(folder, tmp_path):
    path, encoder = write(folder, "token files", weights_file=str(tmp_path / "live.jsonl"))
    live = LiveWeights(tmp_path / "live.jsonl")
    live.set(0, {"a": 1, "b": 1}, 3)
    loader = open_loader(path, encoder)
    batches = iter(loader)
    before = [seen(next(batches)) for _ in range(8)]
    blend = find_blend(loader)
    forecast(blend, 20), estimate(blend, 20)
    live.set(4, {"a": 0, "b": 1})
    found = before + [seen(next(batches)) for _ in range(4)]
    unasked = open_loader(path, encoder)
    assert found == [seen(batch) for batch in take(unasked, 12)]


def test_a_forecast_begins_where_the_dataset_is(folder):
    path, encoder = write(folder, "token files")
    loader = open_loader(path, encoder)
    take(loader, 7)  # three steps and half of the fourth, which is forecast as a whole
    whole = forecast(find_blend(open_loader(path, encoder)), 10)
    rest = forecast(find_blend(loader), 7)
    assert (whole.first, rest.first) == (0, 3)
    assert rest.tokens.tolist() == whole.tokens[3:].tolist()


def test_a_dataset_takes_the_state_of_a_loader_with_and_without_its_digest(folder):
    path, encoder = write(folder, "token files")
    loader = open_loader(path, encoder)
    take(loader, 6)
    sealed = loader.state_dict()
    content = {name: value for name, value in sealed.items() if name != "energon_ext_digest"}
    for state in (sealed, content):
        other = find_blend(open_loader(path, encoder))
        assert forecast(other, 5, state=state).tokens.tolist() == (
            forecast(find_blend(loader), 5).tokens.tolist()
        )
        restore_cursor(other, state)
        assert save_cursor(other) == save_cursor(loader.dataset.run)
    damaged = {**sealed, "read": sealed["read"] + 2}
    for ask in (lambda: forecast(other, 5, state=damaged), lambda: restore_cursor(other, damaged)):
        with pytest.raises(StateFormatError, match="its digest does not match"):
            ask()
