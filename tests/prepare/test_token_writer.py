# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause

import subprocess
import sys

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset

from energon_ext.errors import ConfigError
from energon_ext.prepare.token_writer import TokenWriter
from energon_ext.tokens.file_set import open_token_files
from energon_ext.tokens.origins import origins_of

DOCUMENTS = [[1, 2, 3], [], [4], *([n % 300] * (n % 7) for n in range(20_000))]


@pytest.mark.parametrize("vocab_size", [300, 65_499, 65_500, 130_000])
def test_megatron_reads_what_is_written(tmp_path, vocab_size):
    writer = TokenWriter(tmp_path / "web", vocab_size)
    for document in DOCUMENTS:
        writer.write(np.array(document, np.int64))
    writer.close()
    found = IndexedDataset(str(tmp_path / "web"))
    assert found.index.dtype is DType.optimal_dtype(vocab_size)
    assert found.sequence_lengths.tolist() == [len(document) for document in DOCUMENTS]
    assert found.document_indices.tolist() == list(range(len(DOCUMENTS) + 1))
    for number in (0, 1, 2, 5000, len(DOCUMENTS) - 1):
        assert found[number].tolist() == DOCUMENTS[number]
    ours = open_token_files(tmp_path / "web")
    assert len(ours) == len(DOCUMENTS) and ours.document(19_999).tolist() == DOCUMENTS[19_999]


def test_a_pair_may_have_no_documents(tmp_path):
    TokenWriter(tmp_path / "web", 300).close()
    assert len(open_token_files(tmp_path / "web")) == 0
    assert len(IndexedDataset(str(tmp_path / "web"), mmap=False)) == 0


def test_weights_begin_with_the_first_weighted_document(tmp_path):
    writer = TokenWriter(tmp_path / "chat", 300)
    writer.write(np.array([1, 2, 3]), origin="first")
    writer.write(np.array([4, 5]), np.array([0.0, 1.0]), origin="second\nline")
    writer.write(np.array([6]))
    writer.close({"tokenizer": {"kind": "bytes"}})
    files = open_token_files(tmp_path / "chat")
    assert files.label_weights(0, 0, 6).tolist() == [1, 1, 1, 0, 1, 1]
    assert (tmp_path / "chat.weights.bin").stat().st_size == 6
    assert [origins_of(str(tmp_path / "chat"))[n] for n in range(2)] == ["first", "second line"]


def test_weights_between_0_and_1_widen_those_written_before(tmp_path):
    writer = TokenWriter(tmp_path / "chat", 300)
    writer.write(np.array([1, 2]), np.array([0.0, 1.0]))
    writer.write(np.array([3, 4]), np.array([0.25, 0.5]))
    writer.write(np.array([5]), np.array([1.0]))
    writer.close({"tokenizer": {"kind": "bytes"}})
    files = open_token_files(tmp_path / "chat")
    assert files.label_weights(0, 0, 5).tolist() == [0, 1, 0.25, 0.5, 1]
    assert sorted(path.name for path in tmp_path.glob("chat.weights*")) == ["chat.weights.bin"]


@pytest.mark.parametrize("token", [-1, 300])
def test_an_id_outside_the_vocabulary_is_refused_naming_its_document(tmp_path, token):
    writer = TokenWriter(tmp_path / "web", 300)
    with pytest.raises(ConfigError, match=f"a.txt: token id {token}, but the tokenizer has 300"):
        writer.write(np.array([1, token]), origin="a.txt")


def test_prepare_does_not_import_megatron_core(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    program = (
        "import sys\nfrom energon_ext.cli.main import main\n"
        "main(standalone_mode=False)\nassert 'megatron.core' not in sys.modules"
    )
    call = [
        "prepare",
        "out",
        "--tokenizer",
        "bytes",
        "--text",
        "a.txt",
        "--val",
        "0",
        "--jobs",
        "1",
    ]
    command = [sys.executable, "-c", program, *call]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
