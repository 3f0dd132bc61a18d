# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Names from files reach a log without control characters and logins."""

import io
import logging
import tarfile

import pytest
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.base_webdataset import BaseWebdatasetFactory

from energon_ext import PackedTaskEncoder, PromptTaskEncoder, get_train_dataset
from energon_ext.encoders.tokenizers import ByteTokenizer
from energon_ext.errors import EnergonExtError, SamplerError, log_of
from tests.support import config, loader_for
from tests.test_house_rules import MODULES


def test_what_is_logged_is_printable_and_names_its_place(caplog):
    log = log_of("energon_ext.some.module")
    with caplog.at_level(logging.INFO, "energon_ext"):
        log.warning("%s of %d", "\x1b[31mred\n", 7)
        log.info("100 %% of s3://me:secret@bucket")
        log.debug("unseen")
    assert caplog.messages == ["\\x1b[31mred\\n of 7", "100 %% of s3://***@bucket"]
    assert {record.filename for record in caplog.records} == {"test_printed.py"}
    assert caplog.records[0].name == "energon_ext.some.module"


def test_every_module_logs_in_this_way():
    own = "logging.getLogger("
    assert [name for name, text in MODULES.items() if own in text] == ["errors.py"]


@pytest.mark.parametrize("encoder", [PackedTaskEncoder(ByteTokenizer(), 16), PromptTaskEncoder])
def test_the_name_of_a_member_is_logged_without_control_characters(encoder, tmp_path, caplog):
    folder = tmp_path / "d"
    folder.mkdir()
    with tarfile.open(folder / "a.tar", "w") as tar:
        for number in range(5):
            info = tarfile.TarInfo(f"\x1b[31m{number}.json")
            info.size = 2
            tar.addfile(info, io.BytesIO(b"[1" if number else b"{}"))
    BaseWebdatasetFactory.prepare_dataset(
        EPath(folder),
        ["a.tar"],
        split_parts_patterns=[("train", ".*")],
        progress_fn=lambda items, total: items,
        tar_index_only=False,
        workers=1,
    )
    crude = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    (folder / ".nv-meta" / "dataset.yaml").write_text(crude)
    encoder = encoder(ByteTokenizer()) if isinstance(encoder, type) else encoder
    options = {"worker_config": config(), "batch_size": 2, "task_encoder": encoder}
    with caplog.at_level(logging.DEBUG, "energon_ext"), pytest.raises(EnergonExtError) as found:
        next(iter(loader_for(get_train_dataset(folder, **options))))
    own = [record for record in caplog.records if record.name.startswith("energon_ext")]
    said = "".join(record.getMessage() for record in own) + str(found.value)
    assert "\x1b" not in said and "\\x1b[31m" in said


def test_the_reason_of_a_sampler_is_printable():
    assert SamplerError("http://me:secret@host \x1b").reason == "http://***@host \\x1b"
