# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Forecasts are compared with what a run reads."""

import json

import numpy as np
import pytest

from energon_ext import ConfigError, PackedTaskEncoder, get_train_dataset
from energon_ext.mixture.tree import BLEND, INTERLEAVE, blend_of
from energon_ext.plan.blend import Blend
from energon_ext.plan.clock import Clock
from energon_ext.plan.estimate import estimate
from energon_ext.plan.forecast import Forecast, forecast, late_breakpoints
from energon_ext.plan.lookup import find_blend
from energon_ext.plan.source import PlannedSource
from energon_ext.plan.topology import Topology, imbalance
from energon_ext.splice import MultiSpliceConfig, SpliceIndex
from energon_ext.splice.frames import Frames
from energon_ext.streamed.source import StreamedSource
from energon_ext.weights import ConstantWeight, ScheduleAxis, ScheduledWeight
from tests.cli.command import energon_ext, error_line
from tests.plan.runs import SEQ_LEN, Run, write_numbered, write_split
from tests.support import (
    LargeTokenizer,
    config,
    write_tokens,
)

FIRST_IDS = {"a": 100, "b": 10_000, "c": 20_000}
DOCUMENTS = {"a": 150, "b": 110, "c": 90}
ROWS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forecast")
    for seed, (name, count) in enumerate(DOCUMENTS.items()):
        write_numbered(folder / name, count, FIRST_IDS[name], seed)
    return folder


def mix(folder, entries, rule="blend"):
    """Write a metadataset of (path, weight, further fields of the entry)."""
    members = [{"path": path, "weight": weight, **dict(*more)} for path, weight, *more in entries]
    return write_split(folder / "mix.yaml", {rule: members})


MOVING = [("a", 2), ("b", {"linear": {0: 1, 30: 5}}), ("c", {"step": {0: 3, 10: 0}})]
ENDING = [("a", 1, {"max_epochs": 2}), ("b", 1, {"max_epochs": 1}), ("c", 3, {"max_epochs": 1})]


def planned_blend(path, rows=ROWS, ranks=1, batch=ROWS):
    return find_blend(
        get_train_dataset(
            path,
            worker_config=config(0, 0, ranks),
            batch_size=batch,
            rows_per_step=rows,
            task_encoder=PackedTaskEncoder(LargeTokenizer(), SEQ_LEN),
        )
    )


def tokens_read(path, steps):
    """Return the tokens of each source in every step of a real run, counted by their ids."""
    run, found = Run(path, batch=ROWS, rows=ROWS), []
    while len(found) < steps and (rows := run.step()) is not None:
        ids = np.array([tokens for tokens, *_ in rows])
        bounds = [*FIRST_IDS.values(), 1 << 30]
        found.append(np.histogram(ids, bounds)[0])
    return np.array(found)


@pytest.mark.parametrize("entries", [MOVING, ENDING], ids=["moving", "ending"])
def test_a_planned_forecast_counts_what_the_run_reads(folder, entries):
    path = mix(folder, entries)
    read = tokens_read(path, 40)
    found = forecast(planned_blend(path), 40)
    assert found.is_exact
    assert found.steps == len(read)
    assert found.positions == len(read) * ROWS * SEQ_LEN
    assert (found.ends == np.arange(1, len(read) + 1)).all()  # each window is one step
    assert (found.tokens == read).all()


def test_a_forecast_ends_a_source_at_the_first_step_without_it(folder):
    path = mix(folder, ENDING)
    read = tokens_read(path, 100)
    found = forecast(planned_blend(path), 100)
    for number, key in enumerate(found.keys):
        assert found.exhausted[key] == np.flatnonzero(read[:, number])[-1] + 1
    assert found.documents.sum(0).tolist() == [300, 110, 90]
    assert found.epochs[-1] == pytest.approx([2, 1, 1], rel=0.02)  # last labels take no position


def test_a_planned_forecast_is_the_same_on_every_topology(folder):
    path = mix(folder, MOVING)
    one, many = (
        forecast(planned_blend(path), 30),
        forecast(planned_blend(path, ranks=2, batch=2), 30),
    )
    assert (one.tokens == many.tokens).all()
    assert (one.documents == many.documents).all()


def test_windows_of_a_long_run_contain_several_steps(folder):
    path = mix(folder, MOVING)
    found = forecast(planned_blend(path, rows=1, batch=1), 480)
    assert found.ends.tolist() == list(range(2, 481, 2))
    assert found.positions == 480 * SEQ_LEN
    fine = forecast(planned_blend(path, rows=1, batch=1), 240)
    assert (found.tokens[:120].sum(0) == fine.tokens.sum(0)).all()


def test_windows_of_unequal_length_end_with_whole_steps(folder):
    found = forecast(planned_blend(mix(folder, MOVING), rows=1, batch=1), 250)
    assert found.ends.tolist() == [number * 250 // 240 for number in range(1, 241)]
    assert found.ends.dtype.kind == "i" and found.tokens.shape == (240, 3)


def test_an_estimate_uses_the_fill_of_each_sources_rows(tmp_path):
    """Rows of 64 tokens contain one document of 64 or one of 40."""
    write_tokens(tmp_path / "full", [[100] * 64] * 300, np.int32)
    write_tokens(tmp_path / "part", [[100] * 40] * 300, np.int32)
    guess = estimate(planned_blend(mix(tmp_path, [("full", 1), ("part", 1)]), rows=1, batch=1), 100)
    assert guess.tokens.sum(0) == pytest.approx([50 * 64, 50 * 40])
    assert guess.documents.sum(0) == pytest.approx([50, 50])


def test_an_estimate_of_an_interleave_keeps_shares_of_tokens(tmp_path):
    """Five rows of 64 have as many tokens as eight of 40, so 50 of 130 rows are full."""
    write_tokens(tmp_path / "full", [[100] * 64] * 300, np.int32)
    write_tokens(tmp_path / "part", [[100] * 40] * 300, np.int32)
    path = mix(tmp_path, [("full", 1), ("part", 1)], "interleave")
    guess = estimate(planned_blend(path, rows=1, batch=1), 130)
    assert guess.tokens.sum(0) == pytest.approx([50 * 64, 80 * 40])
    assert guess.documents.sum(0) == pytest.approx([50, 80])
    exact = forecast(planned_blend(path, rows=1, batch=1), 130)
    assert exact.documents.sum(0).tolist() == [50, 80]


@pytest.mark.parametrize("rule", ["blend", "interleave"])
def test_an_estimate_is_within_its_spread_of_the_plan(folder, rule):
    path = mix(folder, MOVING, rule)
    exact, guess = forecast(planned_blend(path), 1500), estimate(planned_blend(path), 1500)
    assert not guess.is_exact
    shares = [found.tokens.sum(0) / found.tokens.sum() for found in (exact, guess)]
    # The spread is two standard deviations; the fill of rows adds less than a thousandth.
    assert (np.abs(shares[0] - shares[1]) <= 1.5 * guess.spread + 1e-3).all()
    assert guess.tokens.sum() == pytest.approx(exact.tokens.sum(), rel=0.01)
    # `c` has only forty rows, so its number of documents varies too much.
    assert guess.documents.sum(0)[:2] == pytest.approx(exact.documents.sum(0)[:2], rel=0.05)
    assert (guess.spread.max() < 0.001) == (rule == "interleave")


def test_an_estimate_shows_when_a_source_ends_and_what_replaces_it(folder):
    path = mix(folder, ENDING, "interleave")
    exact, guess = (
        make(planned_blend(path, rows=1, batch=1), 4000) for make in (forecast, estimate)
    )
    assert guess.exhausted.keys() == exact.exhausted.keys()
    for key, step in exact.exhausted.items():
        assert guess.exhausted[key] == pytest.approx(step, rel=0.05)
    assert guess.steps == pytest.approx(exact.steps, rel=0.02)
    assert guess.documents.sum(0) == pytest.approx([300, 110, 90])


def test_an_estimate_gives_the_exact_step_at_which_a_source_ends(tmp_path):
    # Each document is a row. Every other step reads one of the 200 rows of `a`.
    for name in ("a", "b"):
        write_tokens(tmp_path / name, [[100] * SEQ_LEN] * 200, np.int32)
    path = mix(tmp_path, [("a", 1, {"max_epochs": 1}), ("b", 1)], "interleave")
    guess = estimate(planned_blend(path, rows=1, batch=1), 4000)  # windows of 17 steps
    assert guess.exhausted == {"a": 400}
    assert guess.documents.sum(0) == pytest.approx([200, 3800])


def test_an_estimate_changes_exactly_at_a_breakpoint(folder):
    # Ten steps of 8 rows of `a` alone, then a million steps of `b` alone.
    path = mix(folder, [("a", {"step": {0: 1, 10: 0}}), ("b", {"step": {0: 0, 10: 1}})])
    guess = estimate(planned_blend(path), 1_000_000)
    assert guess.ends[0] == 10
    assert (guess.tokens[0] > 0).tolist() == [True, False]
    assert not guess.tokens[1:, 0].any() and (guess.tokens[1:, 1] > 0).all()
    exact = forecast(planned_blend(path), 10).tokens.sum(0)[0]
    assert guess.tokens[0, 0] == pytest.approx(exact, rel=0.03)  # the first rows are less full


class Streamed:
    """A streamed source, which a forecast does not access."""


def blend_in_python(sources, rule=BLEND, axis=None, rows=1, row_tokens=16, weights=None):
    """Return a blend of sources without a YAML file."""
    weights = weights or [ConstantWeight(1.0)] * len(sources)
    tree = blend_of({each.key: weight for each, weight in zip(sources, weights)}, rule)
    return Blend(sources, tree, Clock(axis or ScheduleAxis(), Topology(rows), row_tokens))


def test_an_estimate_of_streamed_sources_needs_their_document_length():
    blend = blend_in_python(
        [StreamedSource("web", Streamed(), documents=20)], rows=8, row_tokens=64
    )
    with pytest.raises(ConfigError, match="web.*streamed.*--tokens-per-doc"):
        estimate(blend, 10)
    guess = estimate(blend, 10, tokens_per_document=16)
    # 80 rows of 64 positions and four documents each; an epoch is 20 documents.
    assert guess.tokens.sum() == 80 * 64
    assert guess.epochs[-1].tolist() == [16]


def test_the_json_of_a_forecast_is_complete():
    found = Forecast(
        keys=("a", "b"),
        titles=("A", "b"),
        first=0,
        before=np.zeros((2, 2), int),
        ends=np.array([3, 5]),
        shares=np.array([[0.25, 0.75], [1.0, 0.0]]),
        tokens=np.array([[10.0, 30.0], [20.0, 0.0]]),
        documents=np.array([[1.0, 2.0], [4.0, 0.0]]),
        epoch_documents=np.array([2, 0]),
        epoch_tokens=np.array([60.0, np.nan]),
        exhausted={"b": 3},
        breakpoints=(),
        positions=80,
        is_exact=False,
        spread=np.array([0.125, 0.0]),
        counted=np.full((3, 2), np.nan),
    )
    assert found.epochs.tolist() == [[10 / 60, 2.0], [0.5, 2.0]]
    assert json.loads(json.dumps(found.to_json())) == {
        "exact": False,
        "first_step": 0,
        "steps": 5,
        "positions": 80,
        "window_ends": [3, 5],
        "sources": {
            "a": {
                "share": [0.25, 1.0],
                "tokens": [10, 20],
                "documents": [1, 4],
                "epoch_documents": 2,
                "epochs": 0.5,
                "ends_at_step": None,
                "spread": 0.125,
            },
            "b": {
                "share": [0.75, 0.0],
                "tokens": [30, 0],
                "documents": [2, 0],
                "epoch_documents": 0,
                "epochs": 2.0,
                "ends_at_step": 3,
                "spread": 0.0,
            },
        },
    }


def spliced_blend(rule, weights, **options):
    """Return a blend with one content of 8 tokens per row and one row per step."""
    splice, sources = MultiSpliceConfig(content_length=8), []
    for number in range(len(weights)):
        rows = Frames(
            SpliceIndex([9, 14, 30], 16, splice),
            range(3),
            ["doc"] * 3,
            config=splice,
            seq_len=16,
            epochs=None,
            fingerprint={},
        )
        sources.append(PlannedSource(f"s{number}", rows, None, documents=3))
    return blend_in_python(sources, rule, weights=weights, **options)


@pytest.mark.parametrize("count", [1, 3, 20])
def test_an_estimate_counts_the_rows_of_any_number_of_spliced_sources(count):
    blend = spliced_blend(INTERLEAVE, [ConstantWeight(1)] * count)
    guess = estimate(blend, 40 * count)
    assert guess.tokens.sum(0) == pytest.approx([40 * 8] * count)
    assert guess.documents.sum(0) == pytest.approx([40] * count)
    assert guess.positions == 40 * count * 16 and guess.exhausted == {}


def test_the_spread_of_an_estimate_is_two_standard_deviations_or_a_row():
    weights = [ConstantWeight(1), ConstantWeight(3)]
    # Each of 400 rows comes from the first source with probability 1 / 4.
    guess = estimate(spliced_blend(BLEND, weights), 400)
    assert guess.spread == pytest.approx([2 * (400 / 4 * 3 / 4) ** 0.5 / 400] * 2)
    guess = estimate(spliced_blend(INTERLEAVE, weights), 400)
    assert guess.spread == pytest.approx([2 * 1.3 / 400] * 2)


def test_an_estimate_changes_at_breakpoints_in_tokens_and_samples():
    """The breakpoint is at 1600 tokens, which are 100 rows of 16, or at 1600 rows."""
    weights = [ScheduledWeight("step", points) for points in ({0: 1, 1600: 0}, {0: 0, 1600: 1})]
    for unit, step in (("tokens", 100), ("samples", 1600)):
        axis = ScheduleAxis(unit)
        guess = estimate(spliced_blend(BLEND, weights, axis=axis), 10_000)
        assert guess.tokens.sum(0) == pytest.approx([step * 8, (10_000 - step) * 8])
        assert step in guess.ends


def test_breakpoints_after_the_end_are_listed(folder):
    blend = planned_blend(mix(folder, MOVING))
    assert late_breakpoints(blend, 5) == [10, 30]
    assert late_breakpoints(blend, 29) == [30]
    # The run of a linear schedule may end with it, but a step at the end is never seen.
    assert late_breakpoints(blend, 30) == late_breakpoints(blend, 31) == []
    assert late_breakpoints(blend, 10) == [10, 30]


def test_imbalance_of_known_costs():
    # Natural rounds are (4, 2) and (1, 1): ranks cost 5 and 3, mean 4; rounds 4/3 and 1. Balancing
    # pairs the same rows, since no swap makes 5 and 3 more even.
    found = imbalance([np.array([4.0, 2.0, 1.0, 1.0])], Topology(4, 1, 2))
    assert found["natural"] == pytest.approx((5 / 4, (4 / 3 + 1) / 2))
    assert found["balanced"] == pytest.approx((5 / 4, (4 / 3 + 1) / 2))


def test_a_forecast_lists_breakpoints_and_gives_ended_sources_no_share(folder):
    found = forecast(planned_blend(mix(folder, MOVING)), 40)
    assert found.breakpoints == (10, 30)
    assert forecast(planned_blend(mix(folder, MOVING)), 30).breakpoints == (10,)
    found = forecast(planned_blend(mix(folder, ENDING)), 100)
    for number, key in enumerate(found.keys):
        begins = np.append(0, found.ends[:-1])
        assert ((found.shares[:, number] > 0) == (begins < found.exhausted[key])).all()
    assert found.shares.sum(1) == pytest.approx(np.ones(len(found.shares)))


def test_the_forecast_chart_marks_breakpoints_and_ends_of_sources(folder):
    pytest.importorskip("matplotlib")
    from energon_ext.cli.figures import forecast_picture

    found = forecast(planned_blend(mix(folder, [*MOVING[1:], ("a", 4, {"max_epochs": 1})])), 60)
    figure = forecast_picture(found).figure
    upper, lower = figure.axes
    marks = [line[0][0] for line in upper.collections[0].get_segments()]
    assert marks == [10, 30]
    texts = [text.get_text() for text in upper.texts]
    assert "breakpoints at steps 10, 30" in texts
    end = found.exhausted["a"]
    assert {"c to step 10", f"a to step {end}"} < set(texts)
    crosses = [line for line in lower.lines if line.get_marker() == "x"]
    assert [line.get_xdata()[0] for line in crosses] == [end]
    steps = [line for line in upper.lines if line.get_drawstyle() == "steps-post"]
    lines = [line.get_data() for line in steps]  # of a, b and c
    begins = [edges[~np.isnan(shares)] for edges, shares in lines]
    assert begins[0].max() < end
    assert begins[1].max() == 60
    assert begins[2].tolist() == list(range(10))
    assert lines[1][1][0] == pytest.approx(100 / 8)  # weights 4, 1 and 3


# The command -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bytes_mix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("command")
    write_tokens(folder / "web", [[65] * 40] * 50, np.uint16)
    write_tokens(folder / "code", [[66] * 20] * 30, np.uint16)
    entries = [("web", 1), ("code", 1, {"max_epochs": 2, "name": "GitHub"})]
    return mix(folder, entries, "interleave")


def plan_of(mix, *options):
    return energon_ext("plan", mix, "--seq-length", 40, "--global-batch-size", 4, *options)


def test_the_table_shows_when_each_source_ends(bytes_mix, tmp_path):
    result = plan_of(
        bytes_mix,
        "--steps", 20, "--png", tmp_path / "f.png", "--html", tmp_path / "f.html",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    # 60 documents of 20 tokens fill 30 rows of 40, which are every other row of the run.
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0].startswith("20 steps of 4 rows of 40")
    assert "GitHub 50.00% 0.00% 1,200 37.50% 60 2.00 ends at step 15" in lines
    assert "web 50.00% 100.00% 2,000 62.50% 50 1.00" in lines
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    assert "<td>ends at step 15</td>" in (tmp_path / "f.html").read_text()


def test_the_json_contains_every_window(bytes_mix):
    found = json.loads(plan_of(bytes_mix, "--steps", 20, "--json").stdout)
    assert found["exact"] and found["steps"] == 20
    assert found["sources"]["code"]["ends_at_step"] == 15
    assert sum(found["sources"]["web"]["tokens"]) == 2000


def test_balance_compares_the_natural_and_the_balanced_order(bytes_mix):
    result = plan_of(bytes_mix, "--ranks", 2, "--micro-batch-size", 1, "--balance")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[-3][-2:] == ["natural", "balanced"]
    assert lines[-2][0] == "ranks"
    assert all(1 <= float(cell) < 2 for cell in lines[-2][1:])


def test_the_json_contains_the_imbalance(bytes_mix):
    result = plan_of(bytes_mix, "--steps", 5, "--ranks", 2, "--balance", "--json")
    assert json.loads(result.stdout)["imbalance"].keys() == {"natural", "balanced"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--html", "f.html"], "give --steps"),
        (["--steps", 5, "--at", "3"], "Give one of --at, --steps"),
        (["--steps", 5, "--tokens-per-doc", 9], "for streamed sources, but there is none"),
        (["--steps", 5, "--ranks", 3], "multiple of batch_size x data-parallel ranks"),
    ],
)
def test_conflicting_options_are_a_one_line_error(bytes_mix, options, words):
    assert words in error_line(plan_of(bytes_mix, *options))
