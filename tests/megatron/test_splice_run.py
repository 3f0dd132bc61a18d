# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""P(z) of spliced documents, as evaluated and reported by the training script."""

import json
import math

import pytest

from energon_ext.metrics.file import Run
from tests.cli.command import energon_ext
from tests.megatron.pretraining import events, run
from tests.support import write_tokens

SEQ_LEN = 8
OPTIONS = [
    *("--seq-length", str(SEQ_LEN), "--train-iters", "50", "--save-interval", "50"),
    *("--lr", "0.02", "--eval-interval", "25", "--eval-iters", "2"),
]
STAGES, TENSORS = (f"--{kind}-model-parallel-size" for kind in ("pipeline", "tensor"))


@pytest.fixture(scope="module")
def mix(tmp_path_factory):
    """Three documents as long as a row, so that each has one content, and other text."""
    folder = tmp_path_factory.mktemp("splices")
    documents = [list(range(first, first + SEQ_LEN)) for first in (10, 60, 110)]
    write_tokens(folder / "books", documents)
    write_tokens(folder / "web", [[200 + n % 50 for n in range(40)]] * 20)
    splice = {"num_docs": 3, "content_length": SEQ_LEN}
    entries = [{"path": "books", "weight": 3, "splice": splice}, {"path": "web", "weight": 1}]
    content = {"__module__": "energon_ext", "__class__": "ScheduledMetadataset"}
    content["splits"] = {part: {"blend": entries} for part in ("train", "val")}
    path = folder / "mix.yaml"
    path.write_text(json.dumps(content))
    return path


@pytest.fixture(scope="module")
def alone(mix, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone") / "run"
    run(mix, folder, *OPTIONS)
    return folder


def memorized(event):
    prefix = "val/memorized/"
    return {k.removeprefix(prefix): v for k, v in event.items() if k.startswith(prefix)}


def test_p_of_z_covers_all_transitions_and_only_spliced_documents(alone):
    evaluations = events(alone, "evaluation")
    assert [event["step"] for event in evaluations] == [0, 25, 50]
    for event in evaluations:
        assert [key.rpartition("/")[2] for key in memorized(event)] == ["doc0", "doc1", "doc2"]
        for key, probability in memorized(event).items():
            # A content of 8 tokens has 7 transitions, and each document has one content.
            expected = math.exp(-(SEQ_LEN - 1) * event[f"val/loss/{key}"])
            assert probability == pytest.approx(expected, rel=1e-3)
    first, _, last = (list(memorized(event).values()) for event in evaluations)
    assert max(first) < 1e-6 and min(last) > 0.1


SPLITS = [(), (STAGES, "2"), (TENSORS, "2")]


@pytest.mark.parametrize(
    "split", [SPLITS[0], *(pytest.param(each, marks=pytest.mark.nightly) for each in SPLITS[1:])]
)
def test_p_of_z_is_the_same_on_two_ranks(split, mix, alone, tmp_path):
    run(mix, tmp_path / "run", *OPTIONS, *split, "--stop-after", "25", ranks=2)
    both = events(tmp_path / "run", "evaluation")
    assert [event["step"] for event in both] == [0, 25]
    for one, two in zip(events(alone, "evaluation"), both):
        assert memorized(two) == pytest.approx(memorized(one), rel=0.02)


def test_the_report_shows_loss_and_p_of_z_of_each_document(alone, tmp_path):
    pytest.importorskip("matplotlib")
    found = Run.load(alone)
    documents = events(alone, "evaluation")
    for key, (steps, values) in found.validation_curves("val/memorized").items():
        assert steps.tolist() == [0, 25, 50]
        assert values.tolist() == [event[f"val/memorized/{key}"] for event in documents]
    result = energon_ext("report", alone, "--out", tmp_path)
    assert str(tmp_path / "validation.png") in result.stdout.split()
    page = (tmp_path / "report.html").read_text()
    last = documents[-1]
    ((key, probability), *_) = memorized(last).items()
    row = page.split(">doc0<", 1)[1].split("</tr>")[0]
    assert f"<td>{last[f'val/loss/{key}']:.3f}</td>" in row
    assert f"<td>{probability:.3f}</td>" in row
