# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Many mixes at once, and the size of subsets in every command.

A document has as many tokens as a row, so epochs and steps can be worked out by hand.
"""

import json

import pytest

from energon_ext.plan.lookup import find_blend
from tests.cli.command import energon_ext, error_line
from tests.plan.runs import Run, write_split
from tests.saves import save_cursor
from tests.support import take, write_dataset, write_tokens

ROW = 64
RUN = ("--seq-length", ROW, "--global-batch-size", 4)
HEAD = "share of tokens x epochs"


@pytest.fixture
def folder(tmp_path):
    """Two sources: 20 documents and 8."""
    for name, count in (("web", 20), ("code", 8)):
        write_tokens(tmp_path / name, [[65 + n] * ROW for n in range(count)])
    return tmp_path


def base(folder, **of_code):
    entries = [{"path": "web", "weight": 1}, {"path": "code", "name": "Code", **of_code}]
    return write_split(folder / "mix.yaml", {"interleave": entries})


def mixes(folder, *lines):
    path = folder / "ratios.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def cells(text):
    return [line.split() for line in text.splitlines()]


def test_each_mix_is_forecast_and_written_with_its_weights(folder):
    mix = base(folder, max_epochs=1)
    ratios = mixes(folder, "mix,Code,web", "even,1,1", "mostly-web,0.25,0.75", "no_code,0,2")
    found = energon_ext("plan", mix, *RUN, "--steps", 10, "--mixes", ratios)
    # 40 rows. Code has 8; of equal shares it ends after 16 rows, of a quarter after 32.
    assert found.exit_code == 0
    assert cells(found.stdout) == [
        [*HEAD.split(), "Code", "web"],
        ["even", "20.00%", "x", "1.00", "80.00%", "x", "1.60"],
        ["mostly-web", "20.00%", "x", "1.00", "80.00%", "x", "1.60"],
        ["no_code", "0.00%", "x", "0.00", "100.00%", "x", "2.00"],
        ["even:", "Code", "ends", "at", "step", "4"],
        ["mostly-web:", "Code", "ends", "at", "step", "8"],
        ["written:", str(folder / "mix.even.yaml"), "...", str(folder / "mix.no_code.yaml")],
    ]
    alone = energon_ext("plan", folder / "mix.mostly-web.yaml", *RUN, "--steps", 10).stdout
    assert ["Code", "25.00%", "0.00%", "512", "20.00%", "8", "1.00"] in [
        row[:7] for row in cells(alone)
    ]
    assert not list(folder.glob(".*"))


def test_an_estimate_of_many_rows_opens_the_sources_once(folder):
    mix = base(folder)
    ratios = mixes(folder, "mix,web,Code", "a,1,1", "b,3,1")
    options = (*RUN, "--steps", "1M", "--mixes", ratios)
    found = energon_ext("plan", mix, *options, "--json", "--target-tokens", 10**6)
    first, second = map(json.loads, found.stdout.splitlines())
    assert (first["mix"], first["exact"]) == ("a", False)
    # 4 million rows; of a million tokens, a quarter is 250,000, and an epoch of Code is 8 * 64.
    assert second["sources"]["code"]["epochs"] == pytest.approx(10**6 / 8)
    assert second["epochs_at_target"] == pytest.approx(
        {"code": 250_000 / 512, "web": 750_000 / 1280}
    )
    nothing_changed = energon_ext("plan", mix, *options)
    assert "written:" in nothing_changed.stdout


def test_a_mix_that_ends_early_is_named_and_the_others_are_shown(folder):
    ratios = mixes(folder, "mix,web,Code", "code_only,0,1", "both,1,1")
    found = energon_ext(
        "plan", base(folder, max_epochs=1), *RUN, "--steps", 10, "--mixes", ratios
    ).stdout.splitlines()
    # Code has 8 documents, two steps of 4; web is never read in that mix.
    assert found[1].split() == ["code_only", "100.00%", "x", "1.00", "0.00%", "x", "0.00"]
    assert "code_only: Code ends at step 2" in found
    assert "code_only: no source with a weight is left after step 2 of 10" in found
    assert "both: Code ends at step 4" in found


def test_a_file_of_other_content_is_kept_unless_overwrite_is_given(folder):
    mix, other = base(folder), folder / "mix.a.yaml"
    other.write_text("mine")
    options = ("plan", mix, *RUN, "--steps", 2, "--mixes", mixes(folder, "mix,web,Code", "a,1,1"))
    assert "mix.a.yaml: already exists; give --overwrite" in error_line(energon_ext(*options))
    assert other.read_text() == "mine"
    assert energon_ext(*options, "--overwrite").exit_code == 0
    assert json.loads(other.read_text())["splits"]["train"]["interleave"][0]["weight"] == 1


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("mix,web",), "ratios.csv:1: no column 'Code'; give one"),
        (("web,Code", "1,1"), "ratios.csv:1: no column 'mix'"),
        (("mix,web,code", "a,1,1"), "ratios.csv:1: no entry 'code'; there are Code, web; did you"),
        (("mix,web,web,Code", "a,1,1,1"), "each column may be there once"),
        (("mix,web,Code",), "no mix found"),
        (("mix,web,Code", "a,1"), "ratios.csv:2: 3 values are needed"),
        (("mix,web,Code", "a,1,2,3"), "ratios.csv:2: 3 values are needed"),
        (("mix,web,Code", "a,1,1", "a,1,1"), "ratios.csv:3: mix: 'a' found; a name of"),
        (("mix,web,Code", "../a,1,1"), "ratios.csv:2: mix: '../a' found; a name of"),
        (("mix,web,Code", "a,1,x"), "ratios.csv:2: Code: 'x' found, a weight >= 0"),
        (("mix,web,Code", "a,-1,1"), "ratios.csv:2: web: '-1' found"),
        (("mix,web,Code", "a,nan,1"), "ratios.csv:2: web: 'nan' found"),
        (("mix,web,Code", "a,0,0"), "ratios.csv:2: all weights are 0"),
    ],
)
def test_a_table_that_does_not_fit_the_metadataset_is_refused_with_its_line(folder, lines, message):
    options = (*RUN, "--steps", 2, "--mixes", mixes(folder, *lines))
    assert message in error_line(energon_ext("plan", base(folder), *options))
    assert not list(folder.glob("mix.*.yaml"))


@pytest.mark.filterwarnings("ignore::energon_ext.mixture.checks.BlendWarning")
def test_options_that_do_not_go_with_mixes_are_refused(folder):
    mix, ratios = base(folder), mixes(folder, "mix,web,Code", "a,1,1")
    for options, message in [
        (("--mixes", ratios), "--mixes: is for a forecast; give --steps"),
        (("--target-tokens", 9), "--target-tokens: is for a forecast; give --steps"),
        (("--overwrite",), "--overwrite: is for --mixes"),
        (("--steps", 2, "--mixes", ratios, "--png", "a.png"), "--png: is for one mix"),
        (("--steps", 2, "--mixes", folder / "none.csv"), "none.csv: cannot be read"),
        (("--steps", 2, "--mixes", ratios, "--tokens-per-doc", 9), "--tokens-per-doc: is for stre"),
    ]:
        assert message in error_line(energon_ext("plan", mix, *RUN, *options))
    twice = write_split(folder / "mix.yaml", {"blend": [{"path": "web"}, {"path": "web"}]})
    live = write_split(
        folder / "live.yaml", {"blend": [{"path": "web"}], "weights_file": "live.jsonl"}
    )
    alone = write_split(folder / "alone.yaml", {"path": "web"})
    for path, message in [
        (twice, "web is there twice; give both a `name`"),
        (live, "train.weights_file: sets the weights"),
        (alone, "train: --mixes needs a `blend` or an `interleave`"),
    ]:
        options = ("--steps", 2, "--mixes", ratios)
        assert message in error_line(energon_ext("plan", path, *RUN, *options))


# Subsets and target budgets ---------------------------------------------------------------------


def test_a_target_budget_shows_how_often_a_large_run_would_read_the_whole_source(folder):
    mix = base(folder, subset={"documents": 4})
    options = ("--steps", 4, "--target-tokens", 16 * ROW * 10)
    found = energon_ext("plan", mix, *RUN, *options)
    lines = cells(found.stdout)
    # 16 rows, 8 of each source: two epochs of the 4 documents. Ten times as many: 80 of 8 and 20.
    assert ["Code", "50.00%", "50.00%", "512", "50.00%", "8", "2.00"] in lines
    assert ["Code", "10.00", "over", "4", "epochs"] in lines and ["web", "4.00"] in lines
    assert "`subset: {fraction: 0.1}` repeats a source as often in this run." in found.stdout
    printed = json.loads(energon_ext("plan", mix, *RUN, *options, "--json").stdout)
    assert printed["epochs_at_target"] == {"code": 10, "web": 4}
    small = energon_ext("plan", mix, *RUN, "--steps", 4, "--target-tokens", 64)
    assert "fraction" not in small.stdout


def test_every_command_names_the_subset(folder):
    mix = base(folder, subset={"documents": 4})
    line = "Code: a subset of 4 of 8 documents, 256 tokens"
    assert line in energon_ext("plan", mix, *RUN).stdout.splitlines()
    assert line in energon_ext("plan", mix, *RUN, "--steps", 3).stdout.splitlines()
    assert line in energon_ext("peek", mix, "--tokenizer", "bytes", "--rows", 1).stdout
    write_dataset(folder / "text", ["abc"] * 4)
    entry = {"path": "text", "subset": {"fraction": 0.5}}
    of_text = energon_ext("plan", write_split(folder / "text.yaml", {"blend": [entry]}))
    assert "text:train: a subset of fraction: 0.5" in of_text.stdout.splitlines()


def test_a_document_is_traced_by_its_number_in_the_whole_source(folder):
    """Also with a range, in which numbers count from the beginning of the source."""
    entry = {"path": "web", "name": "Web", "subset": {"range": [10, 20], "documents": 4}}
    mix = write_split(folder / "mix.yaml", {"blend": [{**entry, "max_epochs": 1}]})
    run = Run(mix, rows=1)
    number = run.step()[0][0][0] - 65
    save_cursor(folder / "runs", 1, run.loaders[0].state_dict())
    run.close()
    found = energon_ext("trace", folder / "runs", mix, "--document", f"Web:{number}", "--step", 3)
    assert found.stdout.startswith("step 0, row 0") and 10 <= number < 20
    absent = energon_ext("trace", folder / "runs", mix, "--document", "Web:3", "--step", 3)
    assert "Web:3: not read in steps 0 to 3." in absent.stderr
    step = energon_ext("trace", folder / "runs", mix, "--step", 0)
    assert "Web: a subset of 4 of 10 documents, 256 tokens" in step.stderr
    beyond = energon_ext("trace", folder / "runs", mix, "--document", "Web:20", "--step", 3)
    assert "has 20 documents" in error_line(beyond)


def test_the_effect_of_a_resume_on_a_subset_is_shown(folder):
    entry = {"path": "web", "subset": {"documents": 4}}
    mix = write_split(folder / "mix.yaml", {"blend": [entry]})
    run = Run(mix, rows=1)
    take(run.loaders[0], 2)
    save_cursor(folder / "runs", 1, run.loaders[0].state_dict())
    run.close()
    assert "ends first" not in energon_ext("checkpoint", "diff", folder / "runs", mix).stdout
    write_split(folder / "mix.yaml", {"blend": [{**entry, "subset": {"documents": 10}}]})
    found = energon_ext("checkpoint", "diff", folder / "runs", mix).stdout
    assert "web: the epoch of 4 documents ends first, then an epoch has 10" in found
    assert find_blend(run.loaders[0].dataset).sources["web"].documents == 4
