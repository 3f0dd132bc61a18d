# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The file of live weights: what a controller may append, and what a planner reads."""

import json
import logging
import math
import os
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_ext.errors import ConfigError, StateMismatchError, WorkerError
from energon_ext.weights import ConstantWeight, LiveWeights, weight_from_config
from energon_ext.weights.live import LiveWeight
from energon_ext.weights.schedule import Weights


@pytest.fixture
def path(tmp_path):
    return tmp_path / "live.jsonl"


def line(first, through=None, **weights):
    through = {} if through is None else {"through": through}
    return json.dumps({"from_step": first, **through, "weights": weights}) + "\n"


def read(path, names=None):
    live = LiveWeights(path, names)
    live.read()
    return live


def test_set_appends_lines_to_the_file_at_once(path):
    live = LiveWeights(path)
    assert live.next_step == 0
    live.set(10, {"web": 1, "code": 0.5}, through=19)
    live.set(20, {}, through=20)
    live.set(21, {"web": 2})
    assert path.read_text() == line(10, 19, web=1.0, code=0.5) + line(20, 20) + line(21, web=2.0)
    assert live.next_step is None


@pytest.mark.parametrize(
    ("first", "through", "weights", "words"),
    [
        (19, 30, {"web": 1}, "from_step: 19 found, 20 is needed; the last line (1) covers"),
        (21, 30, {"web": 1}, "from_step: 21 found, 20 is needed"),
        (-1, 30, {"web": 1}, "from_step: -1 found, an integer >= 0"),
        (20, 19, {"web": 1}, "through: 19 found, an integer >= 20"),
        (20.0, 30, {"web": 1}, "from_step: 20.0 found"),
        (20, True, {"web": 1}, "through: True found"),
        (20, 30, {"web": -1}, "web: -1 is not a finite number"),
        (20, 30, {"web": math.nan}, "web: nan is not a finite number"),
        (20, 30, {"web": "2"}, "web: '2' is not a finite number"),
    ],
)
def test_an_invalid_line_is_not_written(path, first, through, weights, words):
    live = LiveWeights(path)
    live.set(10, {"web": 1}, through=19)
    with pytest.raises(ConfigError) as error:
        live.set(first, weights, through)
    assert words in str(error.value) and "\n" not in str(error.value)
    assert path.read_text() == line(10, 19, web=1.0)


def test_numpy_numbers_are_accepted(path):
    LiveWeights(path).set(np.int64(0), {"web": np.float32(0.5)}, through=np.int64(3))
    assert path.read_text() == line(0, 3, web=0.5)


def test_no_line_may_follow_one_without_an_end(path):
    live = LiveWeights(path)
    live.set(5, {"web": 1})
    with pytest.raises(ConfigError, match="no further line is needed; .* steps 5 to the end"):
        live.set(6, {"web": 1})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{]", "line 2: .* a JSON object is needed"),
        ("", "line 2: b'' found, a JSON object is needed"),
        ("\xff", "a JSON object is needed"),
        ("[" * 100_000, "a JSON object is needed"),
        ("9" * 5_000, "a JSON object is needed"),
        ("[]", "line 2: .* found; from_step, weights and optionally through are needed"),
        ('{"from_step": 2}', "weights and optionally through"),
        ('{"from_step": 2, "weights": {}, "trough": 3}', "weights and optionally through"),
        ('{"from_step": 2, "weights": [1]}', r"weights: \[1\] found, a mapping is needed"),
        ('{"from_step": 2, "through": null, "weights": {}}', "through: None found"),
        ('{"from_step": 2, "weights": {"code": 1e999}}', "code: inf is not a finite number"),
        ('{"from_step": 2, "weights": {"cod": 1}}', "no source 'cod'; .* did you mean code"),
        ('{"from_step": 1, "weights": {"code": 1}}', "from_step: 1 found, 2 is needed"),
    ],
)
def test_a_malformed_line_is_reported_with_its_number(path, text, words):
    path.write_bytes(line(0, 1, code=1).encode() + text.encode("latin-1") + b"\n")
    with pytest.raises(ConfigError, match=words) as error:
        read(path, ["code"])
    assert str(error.value).startswith(f"{path}: line 2: ") and "\n" not in str(error.value)


def test_a_pipe_or_folder_is_refused(path):
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="not a regular file"):
        read(path)
    with pytest.raises(ConfigError, match="not a regular file"):
        read(path.parent)


def test_a_partly_written_line_is_read_once_complete(path):
    whole = line(0, 4, web=1) + line(5, 9, web=2)
    path.write_text(whole[:-1])
    live = read(path)
    assert live.covers(4) and not live.covers(5)
    path.write_text(whole)
    live.read()
    assert live.covers(9)


def test_a_controller_killed_mid_line_rewrites_it(path):
    path.write_text(line(0, 4, web=1) + '{"from_step": 5, "thr')
    LiveWeights(path).set(5, {"web": 3.0}, through=9)
    assert path.read_text() == line(0, 4, web=1) + line(5, 9, web=3.0)


def test_a_line_overrides_the_weights_of_the_entries(path):
    path.write_text(line(2, 3, web=7) + line(4, 5, code=1) + line(6, 7, web=0))
    live = read(path, ["web", "code"])
    own = weight_from_config({"linear": {0: 0, 10: 10}})
    web, code = LiveWeight(live, ["web"], own), LiveWeight(live, ["code"], ConstantWeight(4))
    weights = Weights([web, code])
    found = [weights.at(step).tolist() for step in range(10)]
    #          before the first line | line 1       | line 2, web as in entry | line 3 and after
    assert found == [[0, 4], [1, 4], [7, 4], [7, 4], [4, 1], [5, 1], [0, 4], [0, 4], [0, 4], [0, 4]]


@given(
    first=st.integers(0, 4),
    blocks=st.lists(
        st.tuples(st.integers(1, 4), st.dictionaries(st.sampled_from("ab"), st.integers(0, 9))),
        max_size=6,
    ),
    batches=st.integers(1, 3),
)
def test_every_step_has_the_weights_of_a_plain_list(tmp_path_factory, first, blocks, batches):
    """The file is read several times, after one or more new lines."""
    path = tmp_path_factory.mktemp("live") / "live.jsonl"
    expected, live, read_to = [{}] * first, LiveWeights(path), 0
    specs = {name: LiveWeight(live, [name], ConstantWeight(own)) for name, own in OWN.items()}
    weights = Weights(list(specs.values()))
    for number, (length, given_weights) in enumerate(blocks):
        LiveWeights(path).set(len(expected), given_weights, len(expected) + length - 1)
        expected += [given_weights] * length
        if number % batches == 0:
            live.read()
            for step in range(read_to, len(expected)):
                found = dict(zip(specs, weights.at(step).tolist()))
                assert found == {**OWN, **expected[step]}, step
            read_to = len(expected)
    assert LiveWeights(path).next_step == (len(expected) if blocks else 0)


OWN = {"a": 3, "b": 5}


def test_a_line_read_later_replaces_the_last_one(path):
    path.write_text(line(0, 1, web=1))
    live = read(path, ["web"])
    weights = Weights([LiveWeight(live, ["web"], ConstantWeight(9))])
    assert weights.at(2).tolist() == [1]  # from the last line
    LiveWeights(path).set(2, {"web": 5}, through=3)
    live.read()
    assert [weights.at(step).tolist() for step in (2, 3)] == [[5], [5]]


def test_a_planner_waits_for_a_line_that_covers_its_step(path):
    live = LiveWeights(path)
    controller = threading.Timer(0.05, lambda: LiveWeights(path).set(3, {"web": 1}, through=8))
    controller.start()
    live.wait(2)  # before the first line, so the entries' weights apply
    controller.join()
    live.wait(8)
    assert live.at(8)[0] == {"web": 1}


def test_the_deadline_error_gives_file_step_and_last_line(path):
    live = LiveWeights(path)
    live.deadline = 0
    with pytest.raises(WorkerError, match="no line covers step 0 after 0 s; the file has no line"):
        live.wait(0)
    path.write_text(line(0, 6, web=1) + '{"from')
    with pytest.raises(WorkerError) as error:
        live.wait(7)
    assert (
        f"{path}: no line covers step 7 after 0 s; the last line (1) covers steps 0 to 6, and an "
        "incomplete line follows." in str(error.value)
    )


def test_a_planner_that_waits_logs_file_and_step_before_the_line_arrives(path):
    class AppendLine(logging.Handler):
        def emit(self, record):
            messages.append(record.getMessage())
            LiveWeights(path).set(7, {"web": 1})

    path.write_text(line(0, 6, web=1))
    live, messages, handler = LiveWeights(path), [], AppendLine()
    live.patience = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("energon_ext.weights.live"), "handlers", [handler])
        live.wait(7)
    assert messages == [
        f"{path}: no line covers step 7 yet; the last line (1) covers steps 0 to 6 "
        f"(waited 0 s, until 450 s)."
    ]


def test_waiting_is_logged_after_10_seconds_and_then_at_twice_the_time(path, monkeypatch, caplog):
    class Clock:
        """Runs only while a planner sleeps."""

        now = 0.0

        def monotonic(self):
            return self.now

        def sleep(self, seconds):
            self.now += seconds

    monkeypatch.setattr("energon_ext.weights.live.time", Clock())
    with pytest.raises(WorkerError, match="after 450 s"):
        LiveWeights(path).wait(3)
    waited = [float(message.split("waited ")[1].split(" s")[0]) for message in caplog.messages]
    assert len(waited) == 6
    # A file is read once a second.
    for found, due in zip(waited, (10, 20, 40, 80, 160, 320)):
        assert due <= found <= 1.25 * due


def test_lines_that_disappear_are_an_error(path):
    path.write_text(line(0, 6, web=1))
    live = read(path)
    path.write_text("")
    with pytest.raises(ConfigError, match="lines read earlier are gone"):
        live.read()
    path.unlink()
    with pytest.raises(ConfigError, match="lines read earlier are gone"):
        live.read()


LINES = [line(2, 3, web=7), line(4, 5, web=1), line(6, 7, web=0)]


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (2, line(1, 3, web=7)),  # covers a step that was planned without a line
        (4, ""),
        (4, line(2, 3, web=8)),
        (4, line(2, 3, web=7, code=1)),
        (4, line(2, 2, web=7)),  # step 3 is no longer covered
        (4, line(2, 2, web=7) + line(3, 3, web=7)),
        (6, LINES[0]),
        (6, LINES[0] + line(4, 5, web=2)),
        (6, LINES[1] + LINES[2]),
    ],
)
def test_a_state_refuses_changed_lines_that_were_used(path, steps, text):
    path.write_text("".join(LINES))
    saved = read(path).describe_used(steps)
    path.write_text(text)
    with pytest.raises(StateMismatchError, match=f"lines for the steps before {steps}") as error:
        LiveWeights(path).check_used(saved, steps)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (0, ""),
        (2, line(2, 3, web=9)),  # was not used yet
        (3, LINES[0]),
        (3, line(2, web=7)),  # longer
        (4, LINES[0] + line(4, web=9)),
        (6, " ".join(LINES[:2]).replace(": ", ":")),  # spaces do not matter
    ],
)
def test_lines_not_yet_used_may_change(path, steps, text):
    path.write_text("".join(LINES))
    saved = read(path).describe_used(steps)
    path.write_text(text)
    LiveWeights(path).check_used(saved, steps)


def test_lines_before_a_step_are_cut_at_it(path):
    path.write_text("".join(LINES))
    live = read(path)
    assert [(each.from_step, each.through) for each in live.before(5)] == [(2, 3), (4, 4)]
    assert [(each.from_step, each.through) for each in live.before(6)] == [(2, 3), (4, 5)]
    # Without a line the entries' weights applied, which an empty line states explicitly.
    assert live.before(2) == [(0, 1, {})] and live.before(0) == []


def test_an_empty_first_line_equals_no_line(path):
    path.write_text(line(0, 1) + "".join(LINES))
    saved = read(path).describe_used(2), read(path).describe_used(4)
    path.write_text("".join(LINES))
    assert saved == (read(path).describe_used(2), read(path).describe_used(4))
    path.write_text(line(0, 1))
    LiveWeights(path).check_used(saved[0], 2)
