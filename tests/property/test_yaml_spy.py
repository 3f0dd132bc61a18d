# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Whatever files say: what the check lets through makes Energon import, call and unpickle nothing.

Energon loads every tree of files that the check accepts, with a spy in the place where it imports.
"""

import importlib
import json
import random
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from megatron.energon import WorkerConfig, typed_converter
from megatron.energon.metadataset.loader import load_dataset
from megatron.energon.module_loader import ModuleLoader

from energon_ext import ConfigError
from energon_ext.config.yaml_check import YamlChecker
from energon_ext.encoders.text import TextDecoder
from tests.support import TEXT_SAMPLE, write_dataset, write_tokens

TREES, TREES_NIGHTLY = 1_000, 100_000
#: Trees of one test: a file of many tests is among the first that a process of the suite takes.
PIECE = 500

#: Modules that Energon may import; all else is a breach.
HARMLESS = {"megatron.energon", "energon_ext"}
#: Events of the interpreter that no loading of data needs.
EVENTS = {"os.system", "os.exec", "subprocess.Popen", "pickle.find_class", "compile"}


class Breach(BaseException):
    """Energon would have run something; nothing of it may catch this."""


class Spy:
    """Stands where Energon imports, calls files of code, and unpickles."""

    def __init__(self, monkeypatch):
        self.watches = False
        spying = SimpleNamespace(import_module=self.import_module)
        monkeypatch.setattr(typed_converter, "importlib", spying)
        monkeypatch.setattr(ModuleLoader, "_load_module", self.breach)
        sys.addaudithook(self.on_event)

    def import_module(self, name, package=None):
        if name not in HARMLESS:
            raise Breach(name)
        return importlib.import_module(name, package)

    def breach(self, *what):
        raise Breach(*map(str, what))

    def on_event(self, event, arguments):
        if self.watches and event in EVENTS:
            raise Breach(event)

    def loads(self, path):
        """Load as a run does; what Energon itself finds wrong is its own affair."""
        alone = WorkerConfig(rank=0, world_size=1, num_workers=0)
        self.watches = True
        try:
            loader = load_dataset(path)
            datasets = loader.get_datasets(
                training=True, split_part="train", worker_config=alone, decoder=TextDecoder()
            )
            return len(datasets.datasets) > 0
        except Exception:
            return False
        finally:
            self.watches = False


class Writer:
    """Random trees of files that can be loaded, with some places changed after they were made."""

    FILES = ["a.yaml", "b.yaml", "b.jsonl", "c.bin", "e.yaml"]
    NAMES = ["train", "train", "val", "aux", "x.aux", "path", "join", "subflavors", "weight"]

    def __init__(self, seed, changes):
        self.random = random.Random(seed)
        self.changes = changes

    def pick(self, *options):
        return self.random.choice(options)

    def happens(self, probability):
        return self.random.random() < probability

    def bad(self):
        """What names code, one way or another."""
        module = self.pick("evil", "evil", "os", "megatron.energon", "energon_ext", "energon_ext.x")
        name = self.pick("system", "run", "Metadataset", "CrudeWebdataset", "TextSample.x", ["a"])
        field = self.pick("__class__", "__function__")
        return {"__module__": module, field: name}

    def reference(self, **fields):
        below = self.FILES[self.FILES.index(self.of) + 1 :]
        name = self.pick("web", "web", "other", *below, *below[-1:])
        if self.happens(0.2):
            fields["subflavors"] = {"path": "x", "aux": {"y": "z"}}
        if name == "web" and self.happens(0.2):
            fields["dataset_config"] = self.pick("more.yaml", "../../e.yaml", "dataset.yaml")
        return {"path": self.pick(name, name, f"./{name}", f"../tree/{name}"), **fields}

    def node(self, kind):
        """What a split is, in the format of a metadataset."""
        count = self.pick(1, 1, 2)
        if kind in (None, "Metadataset"):
            return {"datasets": [self.reference(weight=1.0) for _ in range(count)]}
        more = ["interleave"] if kind == "ScheduledMetadataset" else []
        rule = self.pick("blend", "join", "join", "path", *more)
        if rule == "path":
            return self.reference()
        if rule == "join":
            names = self.random.sample(["text", "aux", "aux", "path", "aux_meta"], 2)
            members = {name: {"path": self.pick("web", "other", "other")} for name in names}
            return {"join": self.pick(members, list(members.values())), "joiner": dict(TEXT_SAMPLE)}
        return {rule: [self.reference(weight=1.0) for _ in range(count)]}

    def metadataset(self, name):
        self.of = name
        kind = self.pick("Metadataset", "MetadatasetV2", "ScheduledMetadataset", None)
        module = "energon_ext" if kind == "ScheduledMetadataset" else "megatron.energon"
        splits = {split: self.node(kind) for split in sorted({"train", self.pick(*self.NAMES)})}
        return {**({"__module__": module, "__class__": kind} if kind else {}), "splits": splits}

    def settings(self, name):
        """A dataset.yaml."""
        return {"sample_type": dict(TEXT_SAMPLE), "field_map": {"text": "txt"}}

    def change(self, content):
        """Put something somewhere in a file."""
        places = [content]
        for place in places:
            items = place.values() if isinstance(place, dict) else place
            places += [item for item in items if isinstance(item, (dict, list))]
        place = self.pick(*places, content)
        bad = self.pick(self.bad(), self.bad(), {"x": self.bad()}, {"path": "e.yaml"}, "web", None)
        if isinstance(place, list):
            place.append(bad)
        elif self.happens(0.2):
            place["path"] = self.pick("sub/m.yaml", "e.yaml", bad)
        elif self.happens(0.2):
            place.update(self.bad())
        elif self.happens(0.2):
            code = self.pick("code.py:f", "code.py", "os:system")
            place[self.pick("sample_loader", "part_filter")] = code
        elif "path" in place and self.happens(0.7):
            place[self.pick("subflavors", "weight", "aux")] = bad
        else:
            place[self.pick(*place, "aux", "joiner", "decoder", "wieght")] = bad

    def write(self, tree):
        """Write what a file names, and what that names; the folders are prepared already."""
        make = dict.fromkeys(self.FILES, self.metadataset)
        for name in ("web/.nv-meta/dataset", "web/.nv-meta/more", "other/.nv-meta/dataset"):
            make[f"{name}.yaml"] = self.settings
        contents = {"a.yaml": self.metadataset("a.yaml")}
        pending = ["a.yaml"]
        while pending:
            text = json.dumps(contents[pending.pop()])
            for name in make:
                if name not in contents and name.partition("/")[0] in text:
                    contents[name] = make[name](name)
                    pending.append(name)
        for _ in range(self.changes):
            self.change(contents[self.pick(*contents)])
        for name, content in contents.items():
            (tree / name).write_text(json.dumps(content))
        return tree / "a.yaml"


@pytest.fixture(scope="module")
def monkeypatch_of_module():
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield monkeypatch


@pytest.fixture(scope="module")
def spy(monkeypatch_of_module):
    """One for all trees: what the interpreter tells it of events, it tells it for ever."""
    return Spy(monkeypatch_of_module)


@pytest.fixture(scope="module")
def tree(monkeypatch_of_module):
    """Folders that are prepared, a pair whose halves are YAML, and an index beside JSON Lines."""
    memory = Path("/dev/shm")  # a tree is written in a tenth of the time
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        tree = Path(folder) / "tree"
        for name in ("web", "other", "sub/web"):
            write_dataset(tree / name, ["text"])
            (tree / name / ".nv-meta" / "code.py").write_text("def f(*a): ...\n")
        hostile = {"sample_type": {"__module__": "evil", "__class__": "run"}, "field_map": {}}
        (tree / "sub/web/.nv-meta/dataset.yaml").write_text(json.dumps(hostile))
        write_tokens(tree / "c", [[1, 2, 3]])
        (tree / "b.jsonl.idx").touch()
        monkeypatch_of_module.chdir(tree)
        yield tree
        monkeypatch_of_module.undo()


def compare(tree, spy, first, count, loads_refused=False):
    """What became of trees; Energon may load those that are refused as well, to show the danger."""
    found = Counter()
    for seed in range(first, first + count):
        path = Writer(seed, changes=(0, 1, 1, 2)[seed % 4]).write(tree)
        refusal = ""
        try:
            YamlChecker().check(path, "train")
        except ConfigError as error:
            refusal = str(error)
            assert "\n" not in refusal
        found["refused" if refusal else "accepted"] += 1
        if refusal and ("contains itself" in refusal or not loads_refused):
            continue  # Energon would open the former until the stack is full
        try:
            found["loaded"] += spy.loads(path)
        except Breach as breach:
            assert refusal, f"seed {seed}: accepted, and Energon would run {breach}"
            found["would have run something"] += 1
    return found


@pytest.mark.parametrize("first", [0, pytest.param(PIECE, marks=pytest.mark.nightly)])
def test_an_accepted_file_runs_no_untrusted_code(tree, spy, first):
    found = compare(tree, spy, first, PIECE)
    assert min(found["accepted"], found["loaded"], found["refused"]) > PIECE // 8, found


def test_some_refused_files_would_have_run_code(tree, spy):
    found = compare(tree, spy, 0, PIECE, loads_refused=True)
    assert found["would have run something"] > PIECE // 100, found


@pytest.mark.nightly
def test_an_accepted_file_runs_no_untrusted_code_in_many_trees(tree, spy):
    found = compare(tree, spy, TREES, TREES_NIGHTLY, loads_refused=True)
    assert found["would have run something"] > TREES_NIGHTLY // 100, found
