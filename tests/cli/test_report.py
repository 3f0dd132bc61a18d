# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause

import base64
import json
import math
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from energon_ext.cli import figures
from energon_ext.cli.report import compare, headline, source_table
from energon_ext.errors import CONTROL
from energon_ext.metrics.file import Run
from tests.cli.command import energon_ext, error_line
from tests.cli.runs import write_run

PNG = b"\x89PNG\r\n\x1a\n"


class Links(HTMLParser):
    """Every address that a page refers to."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found += [value for name, value in attrs if name in ("src", "href", "srcset", "data")]


def test_a_report_is_pictures_and_one_self_contained_page(tmp_path):
    run_dir = write_run(tmp_path / "run", steps=40)
    result = energon_ext("report", run_dir)
    assert result.exit_code == 0
    names = ["mix.png", "loss.png", "loss_over_tokens.png", "report.html"]
    assert result.stdout.split() == [str(run_dir / name) for name in names]
    page = (run_dir / "report.html").read_text()
    links = Links(page).found
    assert [base64.b64decode(link.removeprefix("data:image/png;base64,")) for link in links] == [
        (run_dir / name).read_bytes() for name in names[:3]
    ]
    assert all((run_dir / name).read_bytes().startswith(PNG) for name in names[:3])
    assert not re.search(r"https?:|url\(|@import|<script", page)


def test_any_source_name_can_be_drawn_and_is_escaped_in_the_page(tmp_path):
    names = ("$\\frac{$", "a$x^$", "\x1b[31mred", "\u202eback", "\ud800", "_a")
    sources = (*names, "<script>alert(1)</script>", "a & b")
    assert len(sources) <= len(figures.COLORS)  # more would be merged
    run_dir = write_run(tmp_path, steps=5, sources=sources)
    assert energon_ext("report", run_dir).exit_code == 0
    page = (run_dir / "report.html").read_text()
    assert "<script>" not in page and "&lt;script&gt;" in page and "a &amp; b" in page
    assert not CONTROL.search(page.replace("\n", ""))
    assert [name.isprintable() for name in names] == [name in page for name in names]


def test_damaged_metrics_are_one_line(tmp_path):
    run_dir = write_run(tmp_path / "run", steps=5)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write("{half\n")
    assert "metrics.jsonl:8: damaged" in error_line(energon_ext("report", run_dir))
    assert [path.name for path in run_dir.iterdir()] == ["metrics.jsonl"]
    assert "does not exist" in error_line(energon_ext("report", tmp_path / "absent"))


def test_a_missing_matplotlib_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "energon_ext.cli.figures", None)
    monkeypatch.delattr("energon_ext.cli.figures")
    line = error_line(energon_ext("report", write_run(tmp_path, steps=5)))
    assert "pip install 'energon_ext[report]'" in line


def test_a_skipped_step_has_no_loss_and_does_not_affect_means(tmp_path):
    path = write_run(tmp_path, steps=3) / "metrics.jsonl"
    start, *steps, end = map(json.loads, path.read_text().splitlines())
    for step, loss in zip(steps, (math.nan, 3.0, 2.0)):
        step["loss"] = loss
    path.write_text("\n".join(map(json.dumps, (start, *steps, end))))
    run = Run.load(tmp_path)
    assert headline(run)[2][0] == "nan → 2.00"
    assert "went from 3.00 to 2.00 nats" in figures.loss_picture(run).caption


def test_the_table_adds_up_each_source(tmp_path):
    run = Run.load(write_run(tmp_path, steps=30))
    rows = {row[0]: row for row in source_table(run)}
    for index, key in enumerate(run.sources):
        tokens = sum(int(step[index]) for step in run.tokens)
        share = 100 * tokens / (30 * 8 * 256)  # Every row of a made-up run is full.
        documents = sum(int(step[index]) for step in run.documents)
        assert rows[key][1:3] == (f"{tokens:,}", f"{share:.1f} %")
        assert rows[key][4:7] == (
            f"{documents:,}",
            f"{40 * (index + 1)}",
            f"{documents / (40 * (index + 1)):.2f}",
        )


def test_the_headline_states_steps_tokens_loss_and_speed(tmp_path):
    run = Run.load(write_run(tmp_path, steps=30))
    values = [value for value, _ in headline(run)]
    first, last = sum(run.loss[:2]) / 2, sum(run.loss[-2:]) / 2
    assert values[:3] == ["30", "61,440", f"{first:.2f} → {last:.2f}"]
    assert values[3] == f"{sum(sorted(run.tokens_per_second)[14:16]) / 2:,.0f}"


def test_many_sources_are_merged_without_losing_a_token(tmp_path):
    run = Run.load(write_run(tmp_path, steps=60, sources=[f"s/{n:02d}" for n in range(20)]))
    joined = figures.for_pictures(run)
    assert len(joined.sources) == len(figures.COLORS)
    assert joined.labels[-1] == "13 others"
    np.testing.assert_array_equal(joined.tokens.sum(1), run.tokens.sum(1))
    np.testing.assert_allclose(joined.planned_share.sum(1), 1)
    np.testing.assert_array_equal(joined.documents.sum(1), run.documents.sum(1))
    for picture in (figures.mix_picture, figures.loss_picture):
        assert picture(run).figure.axes


def test_the_loss_of_merged_sources_is_the_mean_over_their_tokens(tmp_path):
    run = Run.load(write_run(tmp_path, steps=60, sources=[f"s/{n:02d}" for n in range(20)]))
    joined = figures.for_pictures(run)
    others = [index for index, label in enumerate(run.labels) if label not in joined.labels]
    for step in range(60):
        parts = [
            (run.tokens[step, index], run.source_loss[step, index])
            for index in others
            if run.tokens[step, index]
        ]
        tokens = sum(count for count, _ in parts)
        mean = sum(count * loss for count, loss in parts) / tokens if tokens else np.nan
        np.testing.assert_allclose(joined.source_loss[step, -1], mean)


def test_the_caption_reveals_a_run_that_left_its_schedule(tmp_path):
    run = Run.load(write_run(tmp_path, steps=60))
    obeyed = int(re.search(r"(\d+) of", figures.mix_picture(run).caption)[1])
    run.tokens[:] = np.roll(run.tokens, 1, axis=1)
    ignored = int(re.search(r"(\d+) of", figures.mix_picture(run).caption)[1])
    assert ignored < obeyed / 2


def set_start_fields(run_dir, **fields):
    path = run_dir / "metrics.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    events = [event | (fields if event["event"] == "start" else {}) for event in events]
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return Run.load(run_dir)


def test_the_error_bar_of_an_interleave_is_its_bound(tmp_path):
    """With 150 steps a window is 5 steps of 8 rows: two rows of 40 are 5 % of the tokens."""
    run_dir = write_run(tmp_path, steps=150)
    keys = Run.load(run_dir).sources
    drawn = figures.mix_picture(set_start_fields(run_dir, interleaves={}))
    assert "two standard deviations" in drawn.figure.texts[1].get_text()
    kept = figures.mix_picture(set_start_fields(run_dir, interleaves=dict.fromkeys(keys, 1)))
    assert kept.figure.texts[1].get_text().endswith("bars: two rows (interleave)")
    assert kept.caption.endswith("all are expected for an interleave.")
    (axes,) = kept.figure.axes
    low, high = axes.collections[0].get_segments()[20][:, 1]  # of steps 101 to 105
    share = 100 * Run.load(run_dir).planned_share[100:105, 0].mean()
    np.testing.assert_allclose([low, high], [share - 5, share + 5])
    both = figures.mix_picture(set_start_fields(run_dir, interleaves={keys[0]: 1})).figure
    assert both.texts[1].get_text().endswith("(blend), two rows (interleave)")


def drawn_shares(run):
    """Return the drawn share of each source by step."""
    (axes,) = figures.mix_picture(run).figure.axes
    found = []
    for line in (line for line in axes.lines if line.get_drawstyle() == "steps-post"):
        edges, shares = line.get_xdata(), line.get_ydata()[:-1]
        middles = (edges[1:] + edges[:-1]) / 2
        found.append(dict(zip(middles[~np.isnan(shares)], shares[~np.isnan(shares)])))
    return found


def test_schedules_are_drawn_per_step_and_only_while_a_source_has_a_share(tmp_path):
    """The second of the sources enters at step 41, with 6 of 12.08 parts."""
    run = Run.load(write_run(tmp_path, steps=60))
    first, entering, last = drawn_shares(run)
    assert list(first) == list(last) == list(range(1, 61))
    assert list(entering) == list(range(41, 61))
    assert entering[41] == pytest.approx(100 * 6 / (8 - 40 / 12 + 6 + 1.5))
    (axes,) = figures.mix_picture(run).figure.axes
    dots = [line.get_xdata() for line in axes.lines if line.get_marker() == "o"]
    assert min(dots[1]) > 40 > min(dots[0])
    # A source that ends before the last step is labelled with the step of its end.
    run.planned_share[50:, 1] = 0
    (axes,) = figures.mix_picture(run).figure.axes
    assert "code to step 50" in [text.get_text() for text in axes.texts]


def test_labels_stay_outside_the_plot(tmp_path):
    run = Run.load(write_run(tmp_path, steps=150, resumed_after=[30, 60]))
    for draw in (figures.mix_picture, figures.loss_picture):
        figure = draw(run).figure
        FigureCanvasAgg(figure).draw()
        (axes,) = figure.axes
        inside = axes.get_window_extent()
        assert "resumed after steps 30, 60" in [text.get_text() for text in axes.texts]
        assert not any(text.get_window_extent().overlaps(inside) for text in axes.texts)


def test_sources_are_labelled_by_name_or_else_by_file(tmp_path):
    sources = [f"/data/CC-MAIN-2023-{n}_text_document" for n in (40, 50)] + ["/data/code:train"]
    run_dir = write_run(tmp_path, steps=5, sources=sources)
    run = set_start_fields(run_dir, names={sources[2]: "Code, deduplicated"})
    assert figures.for_pictures(run).labels == (
        "CC-MAIN-2023-40",
        "CC-MAIN-2023-50",
        "Code, deduplicated",
    )
    assert {row[0] for row in source_table(run)} == {*sources[:2], "Code, deduplicated"}


def test_labels_of_ten_sources_are_distinct_and_inside_the_picture(tmp_path):
    sources = [f"/data/corpora/web_part_{n}_text_document" for n in range(10)]
    run = Run.load(write_run(tmp_path, steps=61, sources=sources, resumed_after=[20, 40]))
    labels = figures.for_pictures(run).labels
    assert labels[:2] == ("web_part_0", "web_part_1") and labels[-1] == "3 others"
    assert len(set(labels)) == len(labels)
    for draw in (figures.mix_picture, figures.loss_picture):
        picture = draw(run)
        canvas = FigureCanvasAgg(picture.figure)
        canvas.draw()
        (axes,) = picture.figure.axes
        texts = [*axes.texts, *picture.figure.texts]
        assert all(t.get_window_extent().x1 <= picture.figure.bbox.x1 for t in texts)
        shown = " ".join(text.get_text() for text in texts)
        assert "resumed after steps 20, 40" in shown
        assert "3 steps, 1 at the end" in shown  # 61 steps in windows of three


def texts_of(picture):
    return {text.get_text() for text in picture.figure.findobj(Text)}


def test_rewards_and_evaluations_have_a_picture(tmp_path):
    path = write_run(tmp_path, steps=4) / "metrics.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    lines = []
    for event in events:
        number = event["step"]
        rewards = {"rollout/reward/mean": number / 8} if event["event"] == "step" else {}
        lines.append(event | rewards)
        if event["event"] in ("start", "step") and number % 2 == 0:
            lines.append({"event": "evaluation", "step": number, "eval/greedy": number / 4})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = Run.load(tmp_path)
    assert run.measured["rollout/reward/mean"].tolist() == [0.125, 0.25, 0.375, 0.5]
    np.testing.assert_array_equal(run.measured["eval/greedy"], [np.nan, 0.5, np.nan, 1.0])
    picture = figures.reward_picture(run)
    assert picture.caption == "At the end: eval/greedy 1.00, reward/mean 0.50."
    assert "Reward" in texts_of(picture)
    del run.measured["rollout/reward/mean"]
    assert "Evaluations" in texts_of(figures.reward_picture(run))
    energon_ext("report", tmp_path)
    assert (tmp_path / "reward.png").read_bytes().startswith(PNG)
    assert len(Links((tmp_path / "report.html").read_text()).found) == 4


def test_evaluations_are_drawn_from_the_first_and_absent_documents_are_not(tmp_path):
    path = write_run(tmp_path, steps=4) / "metrics.jsonl"
    start, *steps = path.read_text().splitlines()
    found = {"val/loss": 3.0, "val/loss/b/doc0": 4.0, "val/loss/b/doc1": 2.0}
    evaluations = [
        {"event": "evaluation", "step": 0, **found},
        {"event": "evaluation", "step": 4, **found, "val/memorized/b/doc1": 0.25},
    ]
    first, last = map(json.dumps, evaluations)
    path.write_text("\n".join([start, first, *steps[:-1], last, steps[-1]]) + "\n")
    run = Run.load(tmp_path)
    assert run.validation["val/loss/b/doc1"].tolist() == [[0, 4], [2, 2]]
    upper, lower = figures.validation_picture(run).figure.axes
    texts = [[text.get_text() for text in axes.texts] for axes in (upper, lower)]
    assert sorted(texts[0]) == ["all 3.00", "doc0 4.00", "doc1 2.00"] and texts[1] == ["doc1 0.25"]
    path.write_text(path.read_text().replace("0.25", '"x"'))
    line = error_line(energon_ext("report", tmp_path))
    assert "evaluation.val/memorized/b/doc1: 'x' found, a number is needed that float32" in line


def test_single_step_and_resumed_runs_can_be_drawn(tmp_path):
    short = Run.load(write_run(tmp_path / "short", steps=1))
    resumed = Run.load(write_run(tmp_path / "resumed", steps=20, resumed_after=[5, 12]))
    for picture in (figures.mix_picture, figures.loss_picture):
        assert picture(short).caption and picture(resumed).figure.axes


def test_a_run_is_compared_with_another_step_by_step(tmp_path):
    one, other = (write_run(tmp_path / name, steps=count) for name, count in (("a", 30), ("b", 40)))
    result = energon_ext("report", one, "--reference", other)
    assert result.exit_code == 0
    verdict = "all 30 steps read the same rows; losses differ by at most 0.0e+00"
    assert result.stdout.splitlines()[-1] == f"{one} and {other}: {verdict}"
    events = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    for event in events:
        if event["event"] == "step" and event["step"] in (12, 20, 35):
            event["batch_hash"] += "other"
    (other / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    result = energon_ext("report", one, "--reference", other)
    assert result.exit_code == 1
    assert "2 of 30 steps read different rows, first at step 12" in result.stdout
    for event in events:
        event["batch_hash"] = ""
    (other / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    verdict, is_equal = compare(Run.load(one), Run.load(other))
    assert "neither batch_hash nor data_digest, so rows cannot be compared" in verdict
    assert not is_equal


def test_runs_without_hashes_are_compared_by_their_data_digests(tmp_path):
    """The second run was resumed after step 12 with other data."""
    one, other = (write_run(tmp_path / n, steps=20, resumed_after=[12]) for n in ("a", "b"))
    digests = {one: ["c0ffee", "decade"], other: ["c0ffee", "facade"]}

    def write(digests_of, batch_hash):
        for run, names in digests_of.items():
            events = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
            starts = [event for event in events if event["event"] == "start"]
            for event, digest in zip(starts, names):
                event["data_digest"] = digest
            for event in events:
                if event["event"] == "step":
                    event["batch_hash"] = batch_hash(run, event["step"])
            content = "".join(json.dumps(event) + "\n" for event in events)
            (run / "metrics.jsonl").write_text(content)
        return compare(Run.load(one), Run.load(other))

    named = "; their data digests there are decade and facade"
    plan = f"8 of 20 steps plan different rows, first at step 13{named}"
    assert write(digests, lambda run, step: "") == (plan, False)
    read = f"3 of 20 steps read different rows, first at step 18{named}"
    assert write(digests, lambda run, step: "ab" if step < 18 else run.name) == (read, False)
    verdict, is_equal = write(dict.fromkeys(digests, digests[one]), lambda run, step: "")
    assert is_equal and verdict.startswith("all 20 steps plan the same rows; losses differ by")
