# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause

import logging
import pickle

import numpy as np
import pytest

from energon_ext.tokens.cut import CutLengths
from energon_ext.tokens.file_set import TokenFiles
from tests.support import write_tokens, write_weights

#: (tokens, weights) of each document; 2 ends a conversation.
DOCUMENTS = [
    ([5, 6, 7, 2], [0, 0, 1, 1]),
    ([5] * 4 + [6] * 4 + [2], [0] * 4 + [1] * 5),  # too long; part of its answer is kept
    ([5] * 7 + [6, 2], [0] * 7 + [1, 1]),  # too long; nothing of its answer is kept
    ([5, 2], [0, 1]),  # only its end is trained
    ([5, 6], [1, 0]),  # nothing predicts the first token
    ([], []),
    ([5] * 6, [0] * 5 + [1]),  # as long as a row
]


@pytest.fixture
def files(tmp_path):
    halves = DOCUMENTS[:3], DOCUMENTS[3:]
    prefixes = [
        write_weights(write_tokens(tmp_path / name, [t for t, _ in half]), [w for _, w in half])
        for name, half in zip("ab", halves)
    ]
    return TokenFiles(prefixes)


def lengths(documents):
    return documents.lengths(np.arange(len(documents))).tolist()


def test_long_documents_are_cut_and_dropped_if_no_answer_is_left(files, caplog):
    with caplog.at_level(logging.WARNING):
        cut = CutLengths(files, source="chat", max_tokens=6, over_long="cut")
    assert lengths(cut) == [4, 6, 0, 2, 2, 0, 6]
    assert (cut.tokens_in(0, 7), cut.tokens_in(1, 5)) == (20, 10)
    assert cut.num_tokens == 20 and cut.fingerprint() == files.fingerprint()
    assert caplog.messages == [
        "chat: 1 of 7 documents have no trained label in their first 6 tokens and are excluded; "
        "the first is chat:2."
    ]
    assert lengths(pickle.loads(pickle.dumps(cut))) == lengths(cut)


def test_every_document_is_checked_if_the_end_is_not_trained(files):
    cut = CutLengths(files, source="chat", max_tokens=6, over_long="cut", untrained=2)
    assert lengths(cut) == [4, 6, 0, 0, 0, 0, 6]


@pytest.mark.parametrize("over_long", ["drop", "error"])
def test_long_documents_are_left_out_on_request(files, over_long, caplog):
    cut = CutLengths(files, source="chat", max_tokens=6, over_long=over_long)
    whole = lengths(CutLengths(files, source="chat", max_tokens=99, over_long=over_long))
    assert lengths(cut) == [length if length <= 6 else 0 for length in whole]
    (message,) = caplog.messages
    assert "have more than the 6 tokens of a row and are left out" in message
    assert "the first is chat:1 (number 1 in " in message
