# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause

import functools

import pytest

from tests.chats.tokenized import Tokenized


@pytest.fixture(scope="session")
def tokenized(tmp_path_factory):
    """Return a function that makes a tokenizer by its name, once."""
    return functools.lru_cache(None)(lambda kind: Tokenized(kind, tmp_path_factory.mktemp("made")))
