# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A source whose samples are read one at a time: its end, its state, and what it says of itself."""

import itertools
import tarfile

import pytest
from megatron.energon.errors import FatalSampleError

from energon_ext import DynamicBlendDataset, StateMismatchError
from energon_ext.errors import ConfigError, SampleError
from energon_ext.plan.lookup import blends_inside, find_blend
from energon_ext.plan.source import Source
from energon_ext.plan.streamed import StreamedSamples
from energon_ext.state.match import SourceNames
from energon_ext.state.schema import STATE_CLASS
from tests.plan.memory_documents import planned
from tests.plan.test_blends import Sample, Samples
from tests.support import config, loader_for, take


class KeyedSamples(Samples):
    """Samples that can be restored; the third cannot be read where there is an error."""

    error = None

    def __iter__(self):
        for sample in super().__iter__():
            if self.error is not None and sample.number == 3:
                raise self.error
            yield self.restore_sample((sample.number,))

    def restore_sample(self, restore_key):
        return {"__restore_key__": tuple(restore_key), "number": restore_key[0]}


def streamed(count=4, epochs=None, **options):
    return StreamedSamples(KeyedSamples("web", 5, count), epochs, "web", **options)


def test_samples_are_taken_up_to_the_end_and_can_be_restored_under_their_source():
    rows = streamed()
    rows.size_of = lambda sample: 1.75 * sample["number"]
    taken = rows.take(3)
    assert [taken.row(number)["number"] for number in range(len(taken))] == [1, 2, 3]
    assert taken.row(1)["__restore_key__"] == (STATE_CLASS, "web", 2)
    # 1.75 * (1 + 2 + 3) = 10.5, rounded to the even one.
    assert (taken.num_tokens, taken.num_documents) == (10, 3)
    assert not rows.ended
    assert len(rows.take(3)) == 1 and rows.ended
    assert len(rows.take(1)) == 0
    rows.restart()
    assert not rows.ended


def test_samples_say_what_they_hold_and_one_each_where_they_do_not():
    class Row:
        num_tokens, documents = 12, 3

    rows = StreamedSamples(Samples("web", 5, 2), source="web")
    taken = rows.take(9)
    assert (taken.num_tokens, taken.num_documents) == (10, 2)
    assert rows.size_of(Row()) == 12 and rows.size_of(object()) == 1
    for of_planned_rows in (taken.pieces, lambda: taken.contents(0)):
        with pytest.raises(NotImplementedError):
            of_planned_rows()


LIMITS = (None, 1, 2, 3)


@pytest.mark.parametrize(("before", "now"), list(itertools.product(LIMITS, LIMITS)))
def test_an_end_stays_unless_the_limit_was_raised(before, now):
    rows = streamed(epochs=before)
    middle = rows.save_state()
    rows.take(9)
    at_end = rows.save_state()
    assert (middle["ended"], at_end["ended"]) == (False, True)
    assert at_end["max_epochs"] == before
    # A source without a limit has not ended by one.
    is_raised = before is not None and (now is None or now > before)
    for state, ended in ((middle, False), (at_end, not is_raised)):
        other = streamed(epochs=now)
        other.restore_state(state)
        assert other.ended == ended


def test_the_state_of_other_documents_is_refused():
    state = streamed(documents={"files": 3}).save_state()
    assert (state["kind"], state["documents"]) == ("streamed", {"files": 3})
    with pytest.raises(StateMismatchError) as refused:
        streamed(documents={"files": 4}).restore_state(state)
    assert refused.value.differences == {"web: files": (3, 4)}
    with pytest.raises(StateMismatchError) as refused:
        streamed(documents={"files": 3}).restore_state({**state, "kind": "planned"})
    assert refused.value.differences == {"web: kind": ("planned", "streamed")}
    source = Source("web", Samples("web", 5, 2), max_epochs=3, fingerprint={"files": 5})
    state = source.rows.save_state()
    assert (state["documents"], state["max_epochs"]) == ({"files": 5}, 3)


@pytest.mark.parametrize(
    "error", [OSError("gone\naway"), tarfile.ReadError("cut"), ValueError("x"), AssertionError()]
)
def test_a_file_that_cannot_be_read_is_an_error_that_names_the_source(error):
    rows = streamed()
    rows.dataset.error = error
    reason = " ".join(str(error).split())
    with pytest.raises(SampleError) as found:
        rows.take(5)
    expected = f"web: cannot be read on ({type(error).__name__}: {reason}); copy its files again"
    assert str(found.value) == f"{expected} and resume."


def fatal(reason):
    """As Energon raises it when it gives up."""
    try:
        try:
            raise reason
        except type(reason):
            raise FatalSampleError("given up")  # noqa: B904
    except FatalSampleError as error:
        return error


def test_samples_that_cannot_be_used_are_told_from_mistakes_of_a_program():
    rows = streamed()
    rows.dataset.error = fatal(SampleError("No text."))
    with pytest.raises(SampleError, match="^web: too many samples in a row .* the last: No text. "):
        rows.take(5)
    for error, kind in ((fatal(KeyError("k")), FatalSampleError), (ConfigError("c"), ConfigError)):
        rows = streamed()
        rows.dataset.error = error
        with pytest.raises(kind) as found:
            rows.take(5)
        assert found.value is error


def test_a_private_plan_belongs_to_so_many_workers_and_a_shared_one_to_any():
    def blend(*sources):
        return DynamicBlendDataset(sources, worker_config=of_rank)

    of_rank, samples = config(3, 1, 2, seed=4), Samples("text", 5, 2)
    samples.worker_config = of_rank
    text = Source("text", samples)
    tokens = Source("tokens", planned([5] * 3, epochs=1))
    shared = {"seed": 4, "plan": "shared"}
    private = {"seed": 4, "plan": "private", "global_workers": 6}
    assert blend(tokens).fingerprint == shared
    assert blend(tokens, text).fingerprint == blend(text).fingerprint == private
    assert [each.streamed is None for each in blend(tokens, text).sources.values()] == [False, True]


def test_a_sample_in_a_buffer_is_restored_from_its_source_under_whatever_key_that_has_now():
    def blend(key):
        text = Source(key, KeyedSamples("web", 5, 9), names=SourceNames("/d/web", "web"))
        tokens = Source("tokens", planned([5] * 3, epochs=1))
        return DynamicBlendDataset([text, tokens], worker_config=config())

    before = blend("web")
    read = take(loader_for(before), 8)
    saved = next(each for each in read if isinstance(each, dict))
    outside = len(saved["__restore_key__"]) - 3  # of the loader
    saved["__restore_key__"] = tuple(saved["__restore_key__"][outside:])
    state = before.save_state()
    assert before.restore_sample(saved["__restore_key__"]) == saved
    moved = blend("../web")
    moved.restore_state(state)
    restored = moved.restore_sample(saved["__restore_key__"])
    assert restored["__restore_key__"] == (STATE_CLASS, "../web", saved["number"])
    for key in ("gone", "tokens"):
        with pytest.raises(StateMismatchError, match="keep it with `weight: 0`") as refused:
            before.restore_sample((STATE_CLASS, key, 3))
        assert refused.value.differences == {
            "buffered sample of source": (key, ["tokens", "web"]),
        }


def test_the_blend_is_found_in_a_dataset_and_in_a_loader():
    blend = DynamicBlendDataset([Source("a", Samples("a", 5, 2))], worker_config=config())
    assert find_blend(blend) is blend
    assert blends_inside(loader_for(blend)) == [blend]
    assert blends_inside(object()) == []
    with pytest.raises(ConfigError, match="No blend of sources in Sample;"):
        find_blend(Sample("a", 1, 1))
