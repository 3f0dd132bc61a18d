# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Names from files are logged without control characters and logins."""

import io
import logging
import os
import tarfile

import pytest

from energon_ext import PackedTaskEncoder, PromptTaskEncoder, get_train_dataset
from energon_ext.errors import EnergonExtError, SamplerError, log_of, printable
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.cli.command import energon_ext, error_line
from tests.support import CRUDE, config, loader_for, prepare_shards, write_mix, write_tokens
from tests.test_house_rules import MODULES


def test_log_records_are_printable_and_name_their_place(caplog):
    log = log_of("energon_ext.some.module")
    with caplog.at_level(logging.INFO, "energon_ext"):
        log.warning("%s of %d", "\x1b[31mred\n", 7)
        log.info("100 %% of s3://me:secret@bucket")
        log.debug("unseen")
    assert caplog.messages == ["\\x1b[31mred\\n of 7", "100 %% of s3://***@bucket"]
    assert {record.filename for record in caplog.records} == {"test_printed.py"}
    assert caplog.records[0].name == "energon_ext.some.module"


def test_every_module_uses_this_logger():
    users = [name for name, text in MODULES.items() if "logging.getLogger(" in text]
    assert users == ["errors.py"]


@pytest.mark.parametrize("encoder", [PackedTaskEncoder(ByteTokenizer(), 16), PromptTaskEncoder])
def test_member_names_are_logged_without_control_characters(encoder, tmp_path, caplog):
    folder = tmp_path / "d"
    folder.mkdir()
    with tarfile.open(folder / "a.tar", "w") as tar:
        for number in range(5):
            info = tarfile.TarInfo(f"\x1b[31m{number}.json")
            info.size = 2
            tar.addfile(info, io.BytesIO(b"[1" if number else b"{}"))
    prepare_shards(folder, CRUDE)
    encoder = encoder(ByteTokenizer()) if isinstance(encoder, type) else encoder
    options = {"worker_config": config(), "batch_size": 2, "task_encoder": encoder}
    with caplog.at_level(logging.DEBUG, "energon_ext"), pytest.raises(EnergonExtError) as found:
        next(iter(loader_for(get_train_dataset(folder, **options))))
    ours = [record for record in caplog.records if record.name.startswith("energon_ext")]
    logged = "".join(record.getMessage() for record in ours) + str(found.value)
    assert "\x1b" not in logged and "\\x1b[31m" in logged


def test_the_reason_of_a_sampler_error_is_printable():
    assert SamplerError("http://me:secret@host \x1b").reason == "http://***@host \\x1b"


@pytest.mark.parametrize(
    "mark", ["\u061c", "\u200e", "\u200f", "\u200b", "\u2066", "\ufeff", "\U000e0041", "\u180e"]
)
def test_marks_of_direction_and_characters_without_a_form_are_escaped(mark):
    assert printable(f"a{mark}b") == f"a{ascii(mark)[1:-1]}b"


def test_joiners_of_scripts_and_emoji_are_printed_as_they_are():
    text = "می\u200cخواهم 👩\u200d💻 क्\u200dष"
    assert printable(text) == text


def test_a_path_that_is_not_utf_8_is_called_so(tmp_path):
    path = tmp_path / os.fsdecode(b"\xff.yaml")
    found = error_line(energon_ext("plan", path))
    assert r"\udcff.yaml found, whose bytes are not UTF-8; rename it." in found
    found = error_line(energon_ext("import", tmp_path / "o.yaml", path))
    assert r"SOURCES: " in found and "whose bytes are not UTF-8" in found
    assert not list(tmp_path.iterdir())


def test_a_path_may_have_marks_of_text_direction(tmp_path):
    write_tokens(tmp_path / "\u200eweb", [[5, 6, 7]] * 9)
    mix = write_mix(tmp_path / "mix.yaml", [("\u200eweb", 1)])
    result = energon_ext("plan", mix)
    assert result.exit_code == 0 and "\u200e" not in result.output and r"\u200eweb" in result.output
