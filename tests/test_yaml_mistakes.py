# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Common mistakes in a metadataset, and the one-line error for each."""

import json
import os
import sys
import threading

import pytest
from megatron.energon.epathlib import EPath

from energon_ext import ConfigError
from energon_ext.config.yaml_file import read_mapping
from tests.cli.command import energon_ext, error_line
from tests.support import write_dataset, write_texts, write_tokens

HEADER = "__module__: energon_ext\n__class__: ScheduledMetadataset\n"
MAX_CHARACTERS = 320


def split(text):
    """Return a metadataset with this text under ``train``."""
    lines = "".join(f"    {line}\n" for line in text.split("\n"))
    return f"{HEADER}splits:\n  train:\n{lines}"


def entry(text):
    return split(f"blend:\n  - {text}")


def weight(text):
    return entry(f"{{path: code, weight: {text}}}")


#: The mistake, the file, and parts of the error line. ``@`` is the file.
MISTAKES = [
    # Fields of an entry.
    ("a misspelt field", entry("{path: code, wieght: 1}"),
     "@: splits.train.blend[0]: no field 'wieght' in a ScheduledMetadataset; it has aux, "
     "block_docs, columns, dataset_config, key, loss_weight, max_epochs, name, order, path, "
     "shuffle_over_epochs_multiplier, splice, split_config, split_part, subflavors, subset, "
     "transform, weight; did you mean weight?"),
    ("a misspelt path", entry("{pth: code}"), "blend[0]: no field 'pth'", "did you mean path?"),
    ("no path", entry("{weight: 1}"),
     "blend[0]: {'weight': 1} found, it needs join or path."),
    ("repetitions in a blend", entry("{path: code, repetitions: 2}"), "no field 'repetitions'"),
    ("a limit outside an entry", split("path: code\nmax_epochs: 2"), "train: no field 'max_epochs'",
     "It belongs to a member of a blend: blend: [{path: ..., max_epochs: ...}]."),
    ("a splice outside an entry", split("path: code\nsplice: {num_docs: 2}"),
     "It belongs to a member of a blend: blend: [{path: ..., splice: ...}]."),
    ("a misspelt interleave", split("interleaved:\n  - {path: code}"), "mean interleave?"),
    ("a number for a path", entry("{path: 5}"), "path: 5 found, text or a path is needed."),
    ("a list for a path", entry("{path: [code]}"), "path: ['code'] found, text or a path is"),
    ("null for a path", entry("{path: null}"), "path: None found, text or a path is"),
    ("an empty path", entry("{path: ''}"), "path: '' found, a path is needed."),
    ("a limit of 0", entry("{path: code, max_epochs: 0}"),
     "@: blend[0] (code).max_epochs: 0 found, an integer >= 1 is needed."),
    ("a limit of 1.5", entry("{path: code, max_epochs: 1.5}"), "max_epochs: 1.5 found, an integer"),
    ("a number for a name", entry("{path: code, name: 5}"), "(code).name: 5 found, text is needed"),
    ("an empty name", entry("{path: code, name: ' '}"), "name: ' ' found, text is needed."),
    ("two of one name", split("blend:\n  - {path: code, name: a}\n  - {path: web, name: a}"),
     "name: 'a' is the name of two sources, such as code; rename one."),
    ("the key of another source", split("blend:\n  - {path: code}\n  - {path: web, name: code}"),
     "name: 'code' is the name of two sources"),
    ("a limit in words", entry("{path: code, max_epochs: two}"), "max_epochs: 'two' found, an int"),
    ("a number for a split", entry("{path: web, split_part: 5}"), "split_part: 5 found, text is"),
    ("a split that is not", entry("{path: web, split_part: trian}"),
     "web: no split 'trian'; it has train; did you mean train?"),
    ("text for subflavors", entry("{path: web, subflavors: a}"), "'a' found, a mapping is needed."),
    ("subflavors without end", entry("{path: web, subflavors: {a: " + "b" * 20_000 + "}}"),
     "web: a key of 20,018 characters, subflavors included; at most 20,000 are allowed."),
    ("a number for a configuration", entry("{path: web, dataset_config: 5}"), "5 found, text is"),
    ("no such configuration", entry("{path: web, split_config: x.yaml}"), "no .nv-meta/split.yaml"),
    ("text for a multiplier", entry("{path: web, shuffle_over_epochs_multiplier: a}"),
     "multiplier: 'a' found, an integer is needed."),
    ("text for a subset", entry("{path: code, subset: half}"), "'half' found, a mapping is needed"),
    ("text for a range", entry("{path: code, subset: {range: half}}"), "a list of 2 is needed."),
    ("fractions for a range", entry("{path: code, subset: {range: [0.5, 1]}}"),
     "subset.range[0]: 0.5 found, text or an integer is needed."),
    ("three ends of a range", entry("{path: code, subset: {range: [0, 1, 2]}}"), "a list of 2 is"),
    ("more than all", entry("{path: web, subset: {range: [0%, 150%]}}"),
     "@: blend[0] (web): Percentage must be between 0 and 100."),
    ("an unknown field of a subset", entry("{path: code, subset: {rang: [0, 1]}}"), "mean range?"),
    ("text for aux", entry("{path: web, aux: abc}"), "aux: 'abc' found, a mapping is needed."),
    ("aux that is not there", entry("{path: web, aux: {img: nowhere}}"),
     "@: blend[0] (web): Auxiliary datasets must be prepared", ": nowhere."),
    # Weights.
    ("a weight in words", weight("abc"), "@: blend[0] (code).weight: 'abc' is not a finite number"),
    ("a weight below 0", weight("-1"), "weight: -1 is not a finite number >= 0."),
    ("a list of weights", weight("[1, 2]"), "weight: [1, 2] is not a finite number >= 0."),
    ("no weight", weight("null"), "weight: None is not a finite number >= 0."),
    ("not a number", weight(".nan"), "weight: '.nan' is not a finite number >= 0."),
    ("a weight in quotes", weight("'1'"), "weight: '1' is not a finite number >= 0."),
    ("all weights 0", weight("0"), "Every weight is 0 at step 0: 0 for code."),
    ("all weights 0 later", weight("{step: {0: 1, 10: 0}}"), "Every weight is 0 at step 10"),
    ("a misspelt schedule", weight("{linaer: {0: 1}}"),
     "'linaer' found, one of step, linear, cosine, exponential is needed."),
    ("two schedules", weight("{linear: {0: 1}, step: {0: 1}}"), "exactly one of step, linear"),
    ("an empty schedule", weight("{}"), "[] found, exactly one of step, linear"),
    ("no breakpoints", weight("{linear: {}}"), "linear: no breakpoints; give at least one"),
    ("numbers for breakpoints", weight("{linear: [1, 2]}"), "[1, 2] found, {breakpoint: value}"),
    ("a breakpoint below 0", weight("{linear: {-1: 1}}"), "breakpoint '-1' is not an integer"),
    ("a breakpoint in words", weight("{linear: {start: 1}}"), "breakpoint 'start' is not an int"),
    ("part of a token", weight("{linear: {1.0005k: 1}}"), "breakpoint '1.0005k' is not an integer"),
    ("half a breakpoint", weight("{linear: {0.5: 1}}"), "breakpoint '0.5' is not an integer"),
    ("a value below 0", weight("{linear: {0: -2}}"), "linear[0]: -2 is not a finite number >= 0."),
    ("a ratio to 0", weight("{exponential: {0: 1, 9: 0}}"), "[9]: a ratio never reaches 0"),
    ("a schedule in a schedule", entry("{path: inner.yaml, weight: {linear: {0: 1, 9: 2}}}"),
     "A schedule inside a schedule: @: blend[0]", "allow_nested_schedules: true"),
    # Nodes.
    ("two kinds of nodes", split("blend: [{path: code}]\ninterleave: [{path: code}]"),
     "@: splits.train: blend and interleave found; give only one of them."),
    ("a path and a node", split("path: code\nblend: [{path: web}]"), "blend and path found; give"),
    ("a misspelt node", split("blnd: [{path: code}]"), "no field 'blnd'", "did you mean blend?"),
    ("a node without value", split("blend:"), "@: `blend` has no value; give it one or remove it."),
    ("an empty node", split("blend: []"), "an empty `blend`; list at least one source."),
    ("a mapping for a list", split("blend: {path: code}"), "blend: {'path': 'code'} found, a list"),
    ("text for a list", split("blend: code"), "blend: 'code' found, a list is needed."),
    ("text for an entry", split("blend: [code, web]"), "[0]: 'code' found, a mapping is needed."),
    ("a list for an entry", split("blend: [[code]]"), "[0]: ['code'] found, a mapping is needed."),
    ("text for a switch", split("blend: [{path: code}]\nallow_nested_schedules: maybe"),
     "allow_nested_schedules: 'maybe' found, true or false is needed."),
    ("where a source starts", split("interleave: [{path: code}]\nnew_source: start"),
     "new_source: 'start' found, 'baseline' or 'zero' is needed."),
    ("subflavors of a blend", split("blend: [{path: code}]\nsubflavors: {a: 1}"), "no field 'subf"),
    ("that of an interleave", split("blend: [{path: code}]\nnew_source: zero"), "no field 'new_so"),
    ("a weight by epochs", split("blend_epochized: [{path: code, weight: 2}]"), "no field 'weigh"),
    ("no repetitions", split("blend_epochized: [{path: code, repetitions: 0}]"),
     "blend_epochized[0].repetitions: 0 found"),
    ("repetitions in words", split("blend_epochized: [{path: code, repetitions: two}]"),
     "blend_epochized[0].repetitions: 'two' found, an integer or a number is needed."),
    ("a join of nothing", split("join: [{path: web}]"), "no joiner, which join requires."),
    ("a number joins", split("join: {a: {path: web}}\njoiner: 5"), "joiner: 5 found, a class"),
    ("joined token files",
     split("join: [{path: code}]\njoiner: {__module__: megatron.energon, __class__: TextSample}"),
     "@: Not a joinable", " code."),
    # Splits and the head of the file.
    ("text for a split", HEADER + "splits: {train: code}", "splits.train: 'code' found, a mapping"),
    ("a list for a split", HEADER + "splits: {train: [{path: code}]}", "found, a mapping is neede"),
    ("an empty split", HEADER + "splits: {train: {}}", "{} found, it needs blend or blend_epoch"),
    ("a misspelt split", HEADER + "splits: {trian: {path: code}}",
     "@: no split 'train'; it has trian; did you mean trian?"),
    ("no split", HEADER + "splits: {}", "@: no split 'train'; it has none."),
    ("no splits", HEADER, "@: not a metadataset; it needs `__module__`, `__class__` and `splits`"),
    ("a list of splits", HEADER + "splits: [train]", "@: splits: ['train'] found, a mapping is"),
    ("misspelt splits", HEADER + "split: {train: {path: code}}",
     "has __class__, __module__, split; did you mean split?"),
    ("a field too many", HEADER + "seed: 3\nsplits: {train: {path: code}}", "no field 'seed'; it"),
    ("a misspelt class", HEADER.replace("data", "dat") + "splits: {train: {path: code}}",
     "@: top level: names energon_ext.ScheduledMetadatset, which is unknown; did you mean "
     "energon_ext.ScheduledMetadataset?"),
    ("a misspelt module", HEADER.replace("_ext", "_exr") + "splits: {train: {path: code}}",
     "names energon_exr.ScheduledMetadataset", "mean energon_ext.ScheduledMetadataset?"),
    ("no module", HEADER.split("\n")[1] + "\nsplits: {train: {path: code}}",
     "names ScheduledMetadataset without a `__module__`, such as megatron.energon or energon_ext."),
    ("no head", "splits: {train: {path: code}}", "begin it with `__module__: energon_ext` and"),
    ("a class that reads no tokens",
     "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits: {train: {path: code}}",
     "token files, which MetadatasetV2 cannot read; use energon_ext.ScheduledMetadataset."),
    ("itself", entry("{path: mix.yaml}"), "mix.yaml contains itself, through @."),
    # Syntax.
    ("a tab", HEADER + "splits:\n\ttrain: {path: code}\n",
     "@:4: not a YAML file (parse error), at 'train: {path: code}'; check this line and the "
     "one above for indentation, quotes and tabs."),
    ("a brace", HEADER + "splits: {train: {path: code", "@:3: not a YAML file (missing terminatin"),
    ("two colons", split("path: code: web"), "@:5: not a YAML file (two colons on same line), at"),
    ("a quote", HEADER + "splits: {train: {path: 'code}}\n", "closing quote), at 'the end of the"),
    ("a key twice", HEADER + "splits:\n  train: {path: a}\n  train: {path: b}\n", "train given tw"),
    ("an empty file", "", "@: empty."),
    ("comments", "# nothing\n", "@: empty."),
    ("text", "hello", "@: 'hello' found, a mapping is needed."),
    # Paths.
    ("no such path", entry("{path: cod}"), " cod: does not exist; check the path, which is relati"),
    ("a text file", entry("{path: plain.txt}"), "neither a metadataset (.yaml) nor a .jsonl file"),
    ("a folder of text", entry("{path: raw}"), "that is not prepared (it has no .nv-meta)",
     "energon-ext prepare"),
    ("both splits", entry("{path: prep}"), "prep: contains the splits train and val, which"),
    ("half a pair", entry("{path: half}"), "half.idx: does not exist; a pair needs both files."),
    ("a damaged index", entry("{path: damaged}"), "damaged.idx: not a Megatron index"),
    ("a pattern", entry("{path: 'none/*'}"), "none/*: names no .bin/.idx pair; check the path."),
    ("lines that came later", entry("{path: stale.jsonl}"),
     "@: splits.train.blend[0]: ", "stale.jsonl: the file has changed since it was indexed; "),
    ("lines that are no objects", entry("{path: list.jsonl}"),
     "@: splits.train.blend[0]: ", "list.jsonl: cannot be indexed: line 1, b'[1, 2]'"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_dataset(folder / "web", ["text"] * 20)
    write_tokens(folder / "code", [[5, 6, 7, 8]] * 20)
    write_texts(folder / "prep", ["text"] * 8)
    record = json.dumps({"text": "abc"}) + "\n"
    (folder / "stale.jsonl").write_text(record)
    assert energon_ext("plan", folder / "stale.jsonl").exit_code == 0  # writes the index
    (folder / "stale.jsonl").write_text(record * 2)
    (folder / "list.jsonl").write_text("[1, 2]\n")
    (folder / "plain.txt").write_text("text")
    (folder / "raw").mkdir()
    (folder / "raw" / "a.txt").write_text("text")
    (folder / "half.bin").write_bytes(b"12")
    (folder / "damaged.bin").write_bytes(b"12")
    (folder / "damaged.idx").write_bytes(b"nonsense")
    (folder / "inner.yaml").write_text(weight("{linear: {0: 1, 9: 2}}"))
    return folder


#: Errors that Energon raises with an assert, which ``python -O`` skips.
ASSERTED = {"more than all", "aux that is not there", "lines that are no objects"}


@pytest.mark.parametrize(
    ("content", "messages"),
    [
        pytest.param(content, messages, id=mistake)
        for mistake, content, *messages in MISTAKES
        if __debug__ or mistake not in ASSERTED
    ],
)
def test_a_mistake_is_one_line_with_its_place_and_cause(folder, capfd, content, messages):
    path = folder / "mix.yaml"
    path.write_text(content)
    line = error_line(energon_ext("plan", path)).replace(f"{folder}/", "")
    for message in messages:
        assert message.replace("@", "mix.yaml") in line
    assert len(line) <= MAX_CHARACTERS
    assert capfd.readouterr().err == ""  # the parser in C++ prints nothing either


def read_bad_file(path):
    with pytest.raises(ConfigError, match="not a YAML file"):
        read_mapping(path)


@pytest.fixture
def bad_file(tmp_path):
    (tmp_path / "bad.yaml").write_text("a: [1, 2\nb: {")
    return EPath(tmp_path / "bad.yaml")


def test_stderr_works_after_reading_files_in_threads(bad_file, capfd):
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # switch threads as often as possible
    threads = [
        threading.Thread(target=lambda: [read_bad_file(bad_file) for _ in range(100)])
        for _ in range(8)
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    os.write(2, b"still here")
    assert capfd.readouterr().err == "still here"


def test_files_are_read_without_stderr(bad_file, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    read_bad_file(bad_file)
    kept = os.dup(2)
    os.close(2)
    try:
        read_bad_file(bad_file)
    finally:
        os.dup2(kept, 2)
        os.close(kept)
