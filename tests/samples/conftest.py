# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause

import pytest

from tests.samples.vision import write_photos_and_charts
from tests.support import write_texts

TEXTS = [f"Text {number} {'x' * (number * 7 % 60)}." for number in range(80)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with the sources photos, charts and, as token files, text/train."""
    folder = write_photos_and_charts(tmp_path_factory.mktemp("data"))
    write_texts(folder / "text", TEXTS)
    return folder
