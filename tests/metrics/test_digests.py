# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Runs that read the same rows have the same digests, in whichever folders their data is."""

import json

import pytest

from energon_ext import PackedTaskEncoder, get_train_dataset
from energon_ext.batch.row_hashes import StepHash, hash_of_parts
from energon_ext.plan.cursor import digest_of_state
from energon_ext.plan.lookup import find_blend
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.plan.runs import SEQ_LEN, edit_yaml, write_numbered, write_split
from tests.samples.vision import PackedCaptions, PlannedCaptions, write_images
from tests.support import LargeTokenizer, config, loader_for, write_dataset

ROWS = 8
SIZES = {"a": (150, 100, 1), "b": (110, 10_000, 2)}


def packed(seq_len=SEQ_LEN, **options):
    return PackedTaskEncoder(LargeTokenizer(), seq_len, **options)


def blend_of(path, encoder=None, *, rank=0, ranks=1, seed=0, rows=ROWS, **options):
    """Open the dataset of one rank."""
    return get_train_dataset(
        path,
        worker_config=config(0, rank, ranks, seed),
        batch_size=ROWS // ranks // 2,
        rows_per_step=rows,
        task_encoder=encoder or packed(),
        **options,
    )


def write(folder, data="data", **fields):
    """Write two token files and a mix of them, in a folder that names them by relative paths."""
    for name, size in SIZES.items():
        write_numbered(folder / data / name, *size)
    weights = ({"linear": {0: 1, 9: 4}}, 2)
    entries = [{"path": f"{data}/{n}", "weight": w} for n, w in zip(SIZES, weights)]
    (folder / "mixes").mkdir(exist_ok=True)
    entries = [{**entry, "path": f"../{entry['path']}"} for entry in entries]
    return write_split(folder / "mixes" / "mix.yaml", {"blend": entries}, **fields)


def read(path, steps, ranks=1):
    """Return the hash of each step over all ranks, and the digest of the state after it."""
    loaders = [loader_for(blend_of(path, rank=rank, ranks=ranks)) for rank in range(ranks)]
    iterators, found = [iter(loader) for loader in loaders], []
    for _ in range(steps):
        parts = []
        for iterator in iterators:
            rows = StepHash()
            for _ in range(2):
                rows.add(next(iterator), SEQ_LEN)
            parts.append(rows.take())
        state = digest_of_state(loaders[0].state_dict())
        found.append((hash_of_parts([sum(each) for each in zip(*parts)]), state))
    return found


def test_the_same_data_elsewhere_has_the_same_digests_and_other_data_has_others(tmp_path):
    here, there = write(tmp_path / "here"), write(tmp_path / "there" / "deep", "other/place")
    assert "other/place/a" in "".join(find_blend(blend_of(there)).keys)
    assert find_blend(blend_of(here)).data_digest == find_blend(blend_of(there)).data_digest
    expected = read(here, 6)
    assert len({digest for pair in expected for digest in pair}) == 12
    assert read(there, 6) == expected
    assert read(there, 6, ranks=2) == expected
    edit_yaml(there, lambda split: split["blend"][1].update(weight=90))
    assert all(a != b for one, other in zip(read(there, 6), expected) for a, b in zip(one, other))


def change(field, value):
    return lambda path: edit_yaml(path, lambda split: split["blend"][0].update({field: value}))


CHANGES = {
    "a weight": (change("weight", 2), {}),
    "a limit": (change("max_epochs", 5), {}),
    "the rule": (lambda path: write_split(path, rename(path)), {}),
    "the axis": (lambda path: edit_yaml(path, schedule_axis="tokens"), {}),
    "the data": (lambda path: write_numbered(path.parents[1] / "data/a", 150, 99, 1), {}),
    "the seed": (lambda path: None, {"seed": 1}),
    "the rows per step": (lambda path: None, {"rows": 2 * ROWS}),
    "the row length": (lambda path: None, {"encoder": packed(32)}),
    "the packing": (lambda path: None, {"encoder": packed(packing="sequential")}),
    "the buffer": (lambda path: None, {"encoder": packed(packing_buffer_docs=9000)}),
}


def rename(path):
    (entries,) = json.loads(path.read_text())["splits"]["train"].values()
    return {"interleave": entries}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_what_is_read_changes_the_data_digest(tmp_path, name):
    path = write(tmp_path)
    before = find_blend(blend_of(path)).data_digest
    alter, options = CHANGES[name]
    alter(path)
    assert find_blend(blend_of(path, **options)).data_digest != before


def test_what_does_not_change_the_rows_leaves_the_data_digest(tmp_path):
    path = write(tmp_path)
    before = find_blend(blend_of(path)).data_digest
    edit_yaml(path, skip=[[3, 5]])
    edit_yaml(path, lambda split: split["blend"][0].update(name="Prose"))
    edit_yaml(path, lambda split: split["blend"].reverse())
    assert find_blend(blend_of(path, rank=1, ranks=2)).data_digest == before


@pytest.mark.parametrize("kind", ["text", "samples", "packed samples", "spliced", "streamed"])
def test_every_kind_of_source_has_a_digest_without_paths(tmp_path, kind):
    digests = set()
    for place in ("here", "far/there"):
        folder = tmp_path / place
        folder.mkdir(parents=True)
        entry = {"path": "data/a"}
        if "samples" in kind or kind == "streamed":
            write_images(folder / "data" / "a", 30)
        elif kind == "text":
            write_dataset(folder / "data" / "a", [f"text {n} {'x' * (n % 50)}" for n in range(40)])
        else:
            write_numbered(folder / "data" / "a", *SIZES["a"])
            entry["splice"] = {"num_docs": 3, "content_length": 8}
        encoder = {
            "text": lambda: PackedTaskEncoder(ByteTokenizer(), SEQ_LEN),
            "samples": PlannedCaptions,
            "packed samples": PackedCaptions,
            "spliced": packed,
            "streamed": PlannedCaptions,
        }[kind]()
        encoder.plan_samples = kind != "streamed"
        path = write_split(folder / "mix.yaml", {"blend": [entry]})
        digests.add(find_blend(blend_of(path, encoder)).data_digest)
    assert len(digests) == 1
