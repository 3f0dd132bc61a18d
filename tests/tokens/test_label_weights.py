# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Label weights next to a pair are read as written, and never assumed."""

import json
import os

import numpy as np
import pytest

from energon_ext.errors import ConfigError
from energon_ext.tokens.file_set import TokenFiles
from tests.support import write_tokens, write_weights

DOCUMENTS = [[1, 2, 3], [4], [5, 6]]


@pytest.fixture
def pair(tmp_path):
    return write_weights(write_tokens(tmp_path / "chat", DOCUMENTS), [[0, 1, 1], [0], [1, 1]])


def slices(files, *wanted):
    """Weights of ``(document, start, stop)``."""
    found = files.read(*map(list, zip(*wanted)))["label_weights"]
    assert all(weights is None or weights.dtype == np.float32 for weights in found)
    return [weights if weights is None else weights.tolist() for weights in found]


def test_weights_of_0_and_1_are_bytes(pair):
    assert (pair.parent / "chat.weights.bin").read_bytes() == bytes([0, 1, 1, 0, 1, 1])
    assert slices(TokenFiles([pair]), (0, 0, 3), (2, 0, 2), (0, 1, 2)) == [[0, 1, 1], [1, 1], [1]]


def test_other_weights_are_floats(pair):
    write_weights(pair, [[0, 1, 1], [0.25], [-1, 2]], "float32")
    found = slices(TokenFiles([pair]), (0, 0, 3), (1, 0, 1), (2, 1, 2))
    assert found == [[0, 1, 1], [0.25], [2]]


def test_pairs_with_and_without_weights_are_one_source(tmp_path, pair):
    plain = write_tokens(tmp_path / "plain", [[7, 8]])
    files = TokenFiles([plain, pair, plain])
    assert slices(files, (0, 0, 2), (1, 0, 3), (4, 0, 2)) == [None, [0, 1, 1], None]
    assert files.fingerprint() != TokenFiles([plain, write_tokens(pair, DOCUMENTS), plain])


def test_weights_change_the_fingerprint(tmp_path, pair):
    plain = write_tokens(tmp_path / "plain", DOCUMENTS)
    assert TokenFiles([pair]).fingerprint() != TokenFiles([plain]).fingerprint()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: os.truncate(path, 5), r"has 5 bytes; 6 tokens need 6 bytes, 1 each; copy"),
        (lambda path: os.remove(path), r"does not exist; 6 tokens need 6"),
        (lambda path: write_meta(path, {"dtype": "float32"}), r"has 6 bytes; 6 tokens need 24"),
        (
            lambda path: write_meta(path, {"dtype": "int8"}),
            "must be uint8 or float32, found 'int8'",
        ),
        (lambda path: write_meta(path, 5), "must be uint8 or float32, found 5"),
        (lambda path: write_meta(path, None), r"chat.meta.json does not mention it"),
    ],
)
def test_weights_of_the_wrong_size_are_refused(pair, damage, message):
    damage(pair.parent / "chat.weights.bin")
    with pytest.raises(ConfigError, match=message):
        TokenFiles([pair])


def write_meta(path, described):
    meta = {"tokenizer": {"kind": "bytes"}, "label_weights": described}
    (path.parent / "chat.meta.json").write_text(json.dumps(meta))


def test_weights_without_metadata_are_refused(pair):
    (pair.parent / "chat.meta.json").unlink()
    with pytest.raises(ConfigError, match=r"chat.weights.bin: .*chat.meta.json does not mention"):
        TokenFiles([pair])
