# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Chains of resumes on changing clusters: all columns of all rows equal those of one long run."""

import json
import random

import numpy as np
import pytest

from energon_ext.prepare.columns import write_columns
from tests.support import take, write_tokens
from tests.tokens.test_column_folder import COLUMNS, produce
from tests.tokens.test_columns import documents, loader_of, write_columns_of
from tests.tokens.test_transforms import FILL

STEPS = 24


@pytest.fixture(scope="module")
def mix(tmp_path_factory):
    """Sources with columns of their own, of others, and without any; three are transformed."""
    root = tmp_path_factory.mktemp("chain")
    for number, name in enumerate(("web", "code")):
        write_columns_of(root / name, documents(number))
    write_tokens(root / "wiki", documents(7))
    write_columns(root / "wiki", root / "teacher", COLUMNS, produce, unit_documents=9)
    fill = {"fill_in_the_middle": {**FILL, "rate": 0.5}}
    blend = [
        {"path": "web", "weight": {"linear": {0: 1, STEPS: 3}}, "transform": fill},
        {"path": "code", "weight": 1, "loss_weight": {"linear": {0: 0, STEPS: 2}}},
        {
            "path": "wiki",
            "weight": 2,
            "columns": {"ids": "teacher", "score": "teacher"},
            "transform": {"token_noise": {"rate": 0.2, "below": 250}},
        },
    ]
    content = {
        "__module__": "energon_ext",
        "__class__": "ScheduledMetadataset",
        "splits": {"train": {"blend": blend}},
    }
    (root / "mix.yaml").write_text(json.dumps(content))
    return root / "mix.yaml"


@pytest.fixture(scope="module")
def plain_mix(mix):
    """The same sources without transforms."""
    content = json.loads(mix.read_text())
    for entry in content["splits"]["train"]["blend"]:
        entry.pop("transform", None)
    path = mix.with_name("plain.yaml")
    path.write_text(json.dumps(content))
    return path


def rows_of(batch):
    """Return every value of each row of a batch, by position and by segment."""
    rows = batch.num_tokens // 64
    per_token = [batch.tokens, batch.labels, batch.token_weights, *batch.columns.values()]
    flat = [each.reshape(rows, -1).double().numpy() for each in per_token]
    ends = batch.cu_seqlens[1:].numpy()
    row_of = (ends - 1) // 64
    of_segments = [
        np.concatenate([each[row_of == row].double().numpy().ravel() for each in values])
        for values in [[*batch.segments.values()]]
        for row in range(rows)
    ]
    return [
        np.concatenate([*(each[row] for each in flat), of_segments[row]]).tobytes()
        for row in range(rows)
    ]


@pytest.mark.parametrize("packing", [pytest.param("bin", marks=pytest.mark.nightly), "sequential"])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(1, 20))]
)
def test_columns_and_changes_do_not_depend_on_the_cluster_or_on_resumes(mix, packing, seed):
    check_chain(mix, seed, packing=packing)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(1, 20))]
)
def test_shares_and_numbers_of_documents_do_not_depend_on_them_either(plain_mix, seed):
    options = {"document_means": True, "document_numbers": True, "mask_boundary_loss": True}
    check_chain(plain_mix, seed, packing="sequential", **options)


def check_chain(mix, seed, **options):
    """Compare every value of every row of a chain of runs with one long run."""
    expected = [sorted(rows_of(batch)) for batch in take(loader_of(mix, **options), STEPS)]
    draw, state, step = random.Random(seed), None, 0
    while step < STEPS:
        ranks, workers = draw.choice([1, 2, 4]), draw.choice([0, 0, 1])
        steps = min(draw.randint(1, 9), STEPS - step)
        found = []
        for rank in range(ranks):
            loader = loader_of(mix, workers=workers, rank=rank, ranks=ranks, **options)
            if state is not None:
                loader.load_state_dict(state)
            found.append([rows_of(batch) for batch in take(loader, steps)])
            after = loader.state_dict()
            loader.close()
        for number, parts in enumerate(zip(*found)):
            assert sorted(sum(parts, [])) == expected[step + number]
        state, step = json.loads(json.dumps(after)), step + steps
