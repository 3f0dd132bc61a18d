# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A source that is shorter than one row has short rows, and is named with what to do."""

import pytest

from energon_ext import PackedTaskEncoder, get_train_dataset, get_val_datasets
from energon_ext.plan.forecast import forecast
from energon_ext.plan.lookup import find_blend
from energon_ext.plan.remarks import describe_short_sources
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.cli.command import energon_ext
from tests.plan.runs import write_split
from tests.support import config, loader_for, take, write_mix, write_tokens

SEQ_LEN = 256
SHORT = [30, 20, 50, 7]  # 107 tokens, 41.8 % of a row
LINE = (
    "short: its documents together fill 41.8% of a row of 256 positions, and no row has a document "
    "twice, so its rows stay short. Read it together with other data as one source (a folder or a "
    "pattern of both), or lower its weight; for text, packing='sequential' fills rows with copies."
)


@pytest.fixture
def folder(tmp_path):
    write_tokens(tmp_path / "both" / "short", [[65] * length for length in SHORT])
    write_tokens(tmp_path / "both" / "long", [[66] * length for length in range(20, 200)])
    for name in ("short", "long"):
        for suffix in (".bin", ".idx"):
            (tmp_path / (name + suffix)).symlink_to(tmp_path / "both" / (name + suffix))
    return tmp_path


def load(folder, entries=(), packing="bin", rank=0, ranks=1, mix=None):
    return get_train_dataset(
        mix or write_mix(folder / "mix.yaml", entries),
        worker_config=config(0, rank, ranks),
        batch_size=1,
        rows_per_step=2,
        task_encoder=PackedTaskEncoder(ByteTokenizer(), SEQ_LEN, packing=packing),
    )


def test_a_source_shorter_than_a_row_keeps_its_rows_short_and_is_named(folder):
    blend = find_blend(load(folder, [("short", 1)]))
    found = forecast(blend, 500)
    assert found.tokens.sum() / found.positions == pytest.approx(sum(SHORT) / SEQ_LEN, abs=0.001)
    assert list(describe_short_sources(blend)) == [LINE]


def test_of_many_short_sources_five_are_named(tmp_path):
    names = [f"source-{n}" for n in range(7)]
    for name in names:
        write_tokens(tmp_path / name, [[65] * 9])
    *named, rest = describe_short_sources(find_blend(load(tmp_path, [(n, 1) for n in names])))
    assert [line.split(":")[0] for line in named] == names[:5]
    assert rest == "The rows of 2 more sources stay short."


@pytest.mark.parametrize(
    ("entries", "packing"),
    [
        ([("short", 1)], "sequential"),
        ([("both", 1)], "bin"),
        ([("long", 1)], "bin"),
    ],
)
def test_the_remedies_fill_rows_and_nothing_is_named(folder, entries, packing):
    blend = find_blend(load(folder, entries, packing))
    found = forecast(blend, 200)
    assert found.tokens.sum() / found.positions > 0.97
    assert list(describe_short_sources(blend)) == []


def test_a_source_that_is_read_once_is_not_named(folder):
    blend = [{"path": "../long"}, {"path": "../short", "max_epochs": 1}]
    (folder / "once").mkdir()
    mix = write_split(folder / "once" / "mix.yaml", {"blend": blend})
    once = find_blend(load(folder, mix=mix))
    assert list(describe_short_sources(once)) == []
    ((validation, _),) = get_val_datasets(
        write_mix(folder / "mix.yaml", [("short", 1)]),
        worker_config=config(),
        batch_size=1,
        split_part="train",
        task_encoder=PackedTaskEncoder(ByteTokenizer(), SEQ_LEN),
    )
    assert list(describe_short_sources(find_blend(validation))) == []


def test_plan_names_the_source_with_shares_and_in_a_forecast(folder):
    mix = write_mix(folder / "mix.yaml", [("long", 1), ("short", 3)])
    for options in ([], ["--steps", 20]):
        result = energon_ext("plan", mix, "--seq-length", SEQ_LEN, *options)
        assert result.exit_code == 0 and result.stdout.splitlines()[-1] == LINE
    long_rows = energon_ext("plan", mix, "--seq-length", 64)
    assert "rows stay short" not in long_rows.stdout


def test_the_first_rank_logs_it_once(folder, caplog):
    for rank in (1, 0):
        loader = loader_for(load(folder, [("long", 1), ("short", 3)], rank=rank, ranks=2))
        take(loader, 2)
        assert caplog.text.count(LINE) == (rank == 0)
    take(loader, 2)
    assert caplog.text.count(LINE) == 1
