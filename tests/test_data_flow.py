# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The three paths through the code match the data flow page."""

import json
import re
import sys
from pathlib import Path

import pytest

from energon_ext import ExactDataLoader, PackedTaskEncoder, get_train_dataset
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.support import config, write_tokens

CHECKOUT = Path(__file__).parents[1]
PACKAGE = str(CHECKOUT / "energon_ext") + "/"

#: Steps a reader has to follow on each path, by heading.
STEPS = {
    "From the YAML to the draw": 7,
    "From the files to the batch": 6,
    "From the cursor to the run": 8,
}


@pytest.fixture(scope="module")
def paths():
    """The function names of each path on the page, in order."""
    (page,) = (CHECKOUT / "docs").rglob("data_flow.md")
    found = {}
    for heading in STEPS:
        listed = page.read_text().split(f"{heading}:\n\n")[1].split("\n\n")[0]
        found[heading] = re.findall(r"^\d+\. `([\w.]+)`", listed, re.M)
    return found


def qualified_name(frame):
    """Return the qualified function name of a frame; Python 3.10 has no ``co_qualname``."""
    first = frame.f_code.co_varnames[:1]
    name = frame.f_code.co_name
    if first != ("self",):
        return name
    for owner in type(frame.f_locals["self"]).__mro__:
        if name in vars(owner):
            return f"{owner.__name__}.{name}"
    return name


def record_calls(work):
    """Return the result of the work, and the functions called, in order."""
    functions = {}

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            functions.setdefault(qualified_name(frame))

    sys.setprofile(note)
    try:
        found = work()
    finally:
        sys.setprofile(None)
    return found, list(functions)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Functions that a profiler recorded on each path."""
    folder = tmp_path_factory.mktemp("flow")
    for name in ("web", "code"):
        write_tokens(folder / name, [[number] * (20 + number) for number in range(1, 60)])
    entries = [{"path": "web", "weight": {"linear": {0: 1, 9: 3}}}, {"path": "code", "weight": 1}]
    head = {"__module__": "energon_ext", "__class__": "ScheduledMetadataset"}
    path = folder / "mix.yaml"
    path.write_text(json.dumps({**head, "splits": {"train": {"blend": entries}}}))

    def new_loader():
        encoder = PackedTaskEncoder(ByteTokenizer(), 64)
        return ExactDataLoader(
            get_train_dataset(
                path, worker_config=config(), batch_size=2, rows_per_step=2, task_encoder=encoder
            )
        )

    drawn = record_calls(lambda: next(new_loader().dataset.run.draw_own_steps()))
    batches = iter(loader := new_loader())
    read = record_calls(lambda: next(batches))
    resumed = new_loader()
    restored = record_calls(lambda: resumed.load_state_dict(loader.state_dict()))
    return dict(zip(STEPS, (drawn, read, restored)))


@pytest.mark.parametrize("heading", STEPS)
def test_a_path_has_the_steps_listed_on_the_page_in_order(paths, runs, heading):
    _, functions = runs[heading]
    assert [name for name in functions if name in paths[heading]] == paths[heading]
    assert len(paths[heading]) == STEPS[heading]
