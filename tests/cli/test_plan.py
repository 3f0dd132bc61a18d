# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext plan``: what a run would read."""

import json

import pytest

from energon_ext.errors import MAX_TEXT
from tests.cli.command import energon_ext, error_line
from tests.support import write_dataset, write_mix, write_tokens


@pytest.fixture(scope="module")
def mix(tmp_path_factory):
    root = tmp_path_factory.mktemp("plan")
    write_dataset(root / "web", ["x" * 30] * 20)
    # With two special tokens: 12, 22 and 7 tokens.
    write_dataset(root / "book", ["a" * 10, "b" * 20, "c" * 5])
    return write_mix(
        root / "mix.yaml", [("web", {"linear": {0: 3, 100: 1}}), ("book", {"step": {0: 1, 200: 0}})]
    )


def cells(result):
    assert result.exit_code == 0
    return [line.split() for line in result.stdout.splitlines()]


def test_shares_are_shown_at_breakpoints_or_requested_steps(mix):
    assert cells(energon_ext("plan", mix)) == [
        ["share", "at", "optimizer", "step", "0", "100", "200"],
        ["book:train", "25.00%", "50.00%", "0.00%"],
        ["web:train", "75.00%", "50.00%", "100.00%"],
    ]
    assert cells(energon_ext("plan", mix, "--at", "50"))[1:] == [
        ["book:train", "33.33%"],
        ["web:train", "66.67%"],
    ]


def test_positions_and_rows_may_be_written_like_breakpoints(mix):
    options = ("--steps", "1", "--tokenizer", "bytes", "--global-batch-size", "1k")
    found = energon_ext("plan", mix, *options, "--seq-length", "1k")
    assert found.stdout.startswith("1 step of 1,000 rows of 1,000 positions")
    for command in (("plan", mix), ("trace", mix.parent, mix), ("checkpoint", "diff", mix, mix)):
        line = error_line(energon_ext(*command, "--seq-length", "32M"))
        assert "'32M' found; an integer from 2 to 16,777,216 is needed" in line


def test_shares_without_tokens_refuse_the_mistakes_that_a_forecast_refuses(mix, tmp_path):
    (mix.parent / "excluded.txt").write_text("wbe:1")
    text = json.loads(mix.read_text())
    path = mix.parent / "excludes.yaml"
    path.write_text(json.dumps({**text, "exclude": "excluded.txt"}))
    lines = {
        error_line(energon_ext("plan", path, *options))
        for options in ((), ("--steps", 1, "--tokenizer", "bytes"))
    }
    message = f"{path}: exclude: no source 'wbe'; the sources are book:train, web:train."
    assert lines == {message}


def test_shares_are_shown_at_tokens_if_breakpoints_count_tokens(tmp_path):
    web, code = (write_tokens(tmp_path / name, [[65] * 9] * 9) for name in ("web", "code"))
    path = write_mix(tmp_path / "mix.yaml", [(web, {"linear": {0: 1, "2k": 3}}), (code, 1)])
    path.write_text(json.dumps({**json.loads(path.read_text()), "schedule_axis": "tokens"}))
    assert cells(energon_ext("plan", path, "--at", "0,1e3,2k", "--seq-length", 64)) == [
        ["share", "at", "token", "0", "1,000", "2,000"],
        ["code", "50.00%", "33.33%", "25.00%"],
        ["web", "50.00%", "66.67%", "75.00%"],
    ]
    steps = energon_ext("plan", path, "--train-tokens", "1k", "--global-batch-size", 2)
    assert steps.stdout.startswith("2 steps of 2 rows of 256 positions")


def test_documents_of_a_splice_are_listed_with_their_examples(mix):
    splice = '{"num_docs": 2, "content_length": 8, "dataset_name": "book", "balance_mode": '
    result = energon_ext("plan", mix, "--seq-length", 32, "--splice", splice + '"by_document"}')
    lines = cells(result)
    # 15 and 5 starts; by_document gives each 15 examples of 8 tokens.
    assert ["book:train/doc1", "12.50%", "25.00%", "0.00%"] in lines
    assert "book:train: 2 documents, 34 tokens, 30 examples in an epoch" in result.stdout
    assert lines[-2:] == [
        ["doc1", "22", "15", "15", "50.00%", "5.45"],
        ["doc0", "12", "5", "15", "50.00%", "10.00"],
    ]


def test_a_splice_of_one_document_needs_no_num_docs(mix):
    result = energon_ext("plan", mix, "--splice", '{"dataset_name": "book", "doc_index": 2}')
    # 7 tokens in 256: c tokens left have 257 - c places, for c = 7 .. 2; tokens 6800.
    assert cells(result)[-1] == ["doc2", "7", "1,515", "1,515", "100.00%", "971.43"]


def test_the_json_of_a_long_forecast_is_complete(tmp_path):
    entries = [
        (write_tokens(tmp_path / f"web{weight}", [[65] * 9] * 9), {"linear": {0: weight, 300: 1}})
        for weight in range(1, 7)
    ]
    long = write_mix(tmp_path / "mix.yaml", entries)
    printed = energon_ext("plan", long, "--steps", 300, "--json").stdout
    assert len(printed) > MAX_TEXT
    assert len(json.loads(printed)["sources"]) == 6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--at", "a"), "--at: breakpoint 'a' is not an integer from 0"),
        (("--at", "1", "--steps", "2"), "Give one of --at, --steps, --train-tokens; found --at"),
        (("--train-tokens", "2.5"), "'--train-tokens': '2.5' found; an integer from 1 to"),
        (("--train-tokens", "1e36"), "'--train-tokens': '1e36' found; an integer from 1 to"),
        (
            ("--steps", "0"),
            "'--steps': '0' found; an integer from 1 to 1,000,000,000,000 is needed",
        ),
        (("--train-tokens", "9", "--exact", "--at", "1"), "Give one of --at, --steps"),
        (("--json",), "--png, --html, --json and --exact are for a forecast: give --steps."),
        (("--splice", "{"), "--splice: '{' is not JSON"),
        (("--splice", "[1]"), "--splice: '[1]' found, a JSON object is needed."),
        (
            ("--splice", '{"docs": 1}'),
            "--splice: no field 'docs' in a splice of one document;",
        ),
        (("--splice", '{"num_docs": 0}'), "num_docs: 0 found, an integer >= 1 is needed."),
    ],
)
def test_invalid_plan_options_are_one_line(mix, options, words):
    assert words in error_line(energon_ext("plan", mix, *options))


@pytest.fixture(scope="module")
def long_and_short(tmp_path_factory):
    """Per step a document of 64 tokens and a row of eight of 8, and times without any noise."""
    root = tmp_path_factory.mktemp("context")
    long = write_tokens(root / "long", [[65] * 64] * 8)
    short = write_tokens(root / "short", [[65] * 8] * 64)
    mix = write_mix(root / "mix.yaml", [(long, 1), (short, 1)])
    times = [
        # A micro-batch: 1 second per rank that shares it; a token: 1 second, divided by the ranks.
        {"context_size": size, "lengths": lengths, "seconds": size + sum(lengths) / size}
        for size in (1, 2)
        for lengths in ([8], [32], [64], [8, 8])
    ]
    (root / "times.jsonl").write_text("\n".join(map(json.dumps, times)))
    return mix, root / "times.jsonl"


def plan_contexts(mix, *arguments):
    size = ("--seq-length", 64, "--global-batch-size", 2, "--ranks", 2)
    return energon_ext("plan", mix, *size, *arguments)


def test_a_layout_is_forecast_with_measured_times(long_and_short):
    mix, times = long_and_short
    result = plan_contexts(mix, "--context-sizes", "1,2", "--context-times", times, "--steps", 4)
    lines = [line.split() for line in result.stdout.splitlines()]
    # All on two ranks: (2 + 64 / 2) twice. Short ones on one rank each: 34 + 1 + 32.
    assert ["all", "on", "2", "68.000", "2", "100.0%"] in lines
    assert ["each", "on", "1", "or", "2", "67.000", "2", "98.5%"] in lines
    assert "Means of the first 4 steps. Tokens of the mixed layout: 50.0% on 1, 50.0% on 2." in (
        result.stdout
    )


def test_a_layout_is_forecast_as_json(long_and_short):
    mix, times = long_and_short
    options = ("--context-sizes", "1,2", "--context-times", times, "--steps", 4, "--json")
    found = json.loads(plan_contexts(mix, *options).stdout)["context"]
    assert found == {
        "ranks": 2,
        "budget": 32,
        "sizes": [1, 2],
        "seconds": pytest.approx(67),
        "fixed": {"2": pytest.approx(68)},
        "micro_batches": [2] * 4,
        "shares": {"1": 0.5, "2": 0.5},
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context-sizes", "1,2"], "--context-sizes: give --context-times FILE"),
        (["--context-sizes", "1,x"], "'1,x' found; sizes such as 1,2,8 are needed"),
        (["--context-sizes", "1,2", "--balance"], "give --balance, --start and --mixes alone"),
        (["--context-sizes", "1,4"], "no time was measured on 4 ranks"),
        (["--context-sizes", "1"], "a unit of 64 tokens does not fit on 1 ranks"),
        (["--context-times", "t"], "--context-times: is for --context-sizes; give both"),
    ],
)
def test_what_a_layout_cannot_be_forecast_from_is_refused(long_and_short, arguments, message):
    mix, times = long_and_short
    if message.startswith(("no time", "a unit")):
        arguments = [*arguments, "--context-times", times, "--context-budget", 32]
        arguments += ["--ranks", 4]
    assert message in error_line(plan_contexts(mix, *arguments))
