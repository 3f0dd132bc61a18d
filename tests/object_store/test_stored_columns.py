# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Columns in an object store are read by ranges, and equal a function of each token's id."""

import numpy as np
import pytest

from energon_ext.errors import ConfigError
from energon_ext.prepare.columns import write_columns
from energon_ext.tokens.formats import open_documents
from energon_ext.tokens.transformed import read_columns
from tests.support import take, write_mix, write_tokens
from tests.tokens.test_column_folder import COLUMNS, check_batch, mix_with, produce
from tests.tokens.test_columns import check_columns, documents, loader_of, write_columns_of

pytest.importorskip("moto", reason="moto is not installed: pip install 'energon_ext[test]'")


@pytest.mark.parametrize("path", ["data", "data/web*", "data/web"])
def test_columns_beside_pairs_are_read_by_ranges(tmp_path, store, path):
    write_columns_of(tmp_path / "data" / "web", documents(1))
    store.put(tmp_path / "data", f"{tmp_path.name}/data")
    mix = write_mix(tmp_path / "mix.yaml", [(f"msc://store/{tmp_path.name}/{path}", 1)])
    batches = take(loader_of(mix), 4)
    assert sum(map(check_columns, batches)) > 300
    asked = store.asked("GET", "web.experts.npy")
    assert len(asked) > 4


def test_a_column_that_is_missing_in_a_store_is_named(tmp_path, store):
    write_columns_of(tmp_path / "data" / "web", documents(1))
    (tmp_path / "data" / "web.teacher.npy").unlink()
    store.put(tmp_path / "data", f"{tmp_path.name}/data")
    with pytest.raises(ConfigError, match=r"web\.teacher\.npy: does not exist"):
        open_documents(f"msc://store/{tmp_path.name}/data")


@pytest.mark.parametrize(
    ("change", "reason"),
    [(np.asfortranarray, "'fortran_order': True"), (lambda own: own.astype(">i2"), "'>i2'")],
    ids=["column by column", "big-endian"],
)
def test_a_column_of_equal_size_with_another_header_is_refused(tmp_path, store, change, reason):
    write_columns_of(tmp_path / "data" / "web", documents(1))
    path = tmp_path / "data" / "web.experts.npy"
    np.save(path, change(np.load(path)))
    store.put(tmp_path / "data", f"{tmp_path.name}/data")
    opened = open_documents(f"msc://store/{tmp_path.name}/data")
    with pytest.raises(ConfigError, match=rf"web\.experts\.npy: its header is .*{reason}"):
        read_columns(opened, {}, [0], [0], [1])


def test_a_folder_of_others_may_be_in_a_store(tmp_path, store):
    write_tokens(tmp_path / "web", documents(1))
    write_columns(tmp_path / "web", tmp_path / "teacher", COLUMNS, produce, unit_documents=9)
    store.put(tmp_path / "teacher", f"{tmp_path.name}/teacher")
    mix = mix_with(tmp_path / "mix.yaml", {"ids": f"msc://store/{tmp_path.name}/teacher"})
    assert all(map(check_batch, take(loader_of(mix), 4)))
