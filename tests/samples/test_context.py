# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the methods of an encoder know of the source that they are called for."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
from megatron.energon import stateless

from energon_ext import PackedTaskEncoder
from energon_ext.errors import ConfigError
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.samples.test_planned_samples import dataset_of, write
from tests.samples.test_tokens_beside_samples import CaptionsAndText
from tests.samples.vision import PlannedCaptions
from tests.support import loader_for, take, write_dataset


@pytest.fixture
def data(data, tmp_path):
    """A copy in which nothing has been measured."""
    return shutil.copytree(data, tmp_path, dirs_exist_ok=True)


class Seeing(CaptionsAndText):
    """Notes the source that each of its methods is called for."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def see(self, method):
        self.seen.setdefault(method, set()).add(self.source_key)

    @stateless
    def encode_sample(self, sample):
        self.see("encode_sample")
        return super().encode_sample(sample)

    def length_of(self, encoded):
        self.see("length_of")
        return super().length_of(encoded)

    @stateless
    def pack_selected_samples(self, samples):
        self.see("pack_selected_samples")
        return super().pack_selected_samples(samples)

    def pack_tokens(self, row):
        self.see("pack_tokens")
        return super().pack_tokens(row)

    def make_padding(self, row):
        self.see("make_padding")
        return row


def test_methods_know_their_source_while_samples_are_measured_read_and_padded(data):
    path = write(data / "photos.yaml", {"blend": [{"path": "photos", "max_epochs": 1}]})
    encoder = Seeing()
    dataset = dataset_of(path, encoder=encoder)
    keys = set(dataset.run.keys)
    assert encoder.seen == dict.fromkeys(["encode_sample", "length_of"], keys)
    list(loader_for(dataset))
    methods = ["encode_sample", "length_of", "pack_selected_samples", "make_padding"]
    assert encoder.seen == dict.fromkeys(methods, keys)


def test_methods_know_the_source_of_rows_of_tokens(data):
    path = write(data / "text.yaml", {"blend": [{"path": "text/train", "max_epochs": 1}]})
    encoder = Seeing()
    dataset = dataset_of(path, encoder=encoder)
    list(loader_for(dataset))
    assert encoder.seen["pack_tokens"] == encoder.seen["make_padding"] == set(dataset.run.keys)


class InAThread(PlannedCaptions):
    @stateless
    def encode_sample(self, sample):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: self.source_key).result()
        return super().encode_sample(sample)


class InABatch(PlannedCaptions):
    def encode_batch(self, batch):
        return self.source_key, batch


class InText(PackedTaskEncoder):
    """Its tokens are cached for all sources that have the same files."""

    encoding_fingerprint = {"version": 1}

    @stateless
    def encode_document(self, sample):
        sample.text = f"{self.source_key} {sample.text}"
        return super().encode_document(sample)


@pytest.mark.parametrize("encoder", [InAThread, InABatch])
def test_a_source_that_is_unknown_is_refused_and_not_empty(data, encoder):
    path = write(data / "photos.yaml", {"path": "photos"})
    with pytest.raises(ConfigError, match=rf"^{encoder.__name__}.source_key: unknown, since no "):
        take(loader_for(dataset_of(path, encoder=encoder())), 1)


def test_cached_tokens_do_not_depend_on_the_key_of_a_source(tmp_path):
    write_dataset(tmp_path / "web", ["some text"])
    path = write(tmp_path / "mix.yaml", {"path": "web"})
    with pytest.raises(ConfigError, match=r"source_key: unknown, .*use `__subflavors__`"):
        dataset_of(path, encoder=InText(ByteTokenizer(), 16))
