# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Stock Energon on the same task: documents packed as its documentation shows, with all fields.

Its packing example sorts a buffer of samples by length and fills one pack after another in that
order. It leaves the content of packs and batches to the user; here a batch has the fields of a
PackedBatch, written with a few NumPy calls.
"""

import megatron.energon
import numpy as np
import torch
from megatron.energon import Cooker, Sample, TaskEncoder, TextSample, WorkerConfig, stateless
from megatron.energon.edataclass import edataclass
from megatron.energon.task_encoder.cooking import basic_sample_keys


@edataclass
class TokenSample(Sample):
    tokens: np.ndarray


@edataclass
class Packed(Sample):
    arrays: list


@stateless
def cook(sample):
    """Return a sample with text, or with tokens from bytes."""
    if "txt" in sample:
        return TextSample(**basic_sample_keys(sample), text=sample["txt"])
    return TokenSample(**basic_sample_keys(sample), tokens=np.frombuffer(sample["bin"], np.uint16))


class StockEncoder(TaskEncoder):
    """An encoder of packs of at most ``seq_len`` tokens; longer documents are truncated."""

    cookers = [Cooker(cook)]

    def __init__(self, seq_len, tokenizer=None):
        self.seq_len = seq_len
        self.tokenizer = tokenizer

    @stateless
    def encode_sample(self, sample):
        if isinstance(sample, TextSample):
            tokens = self.tokenizer.encode_array(sample.text)
            sample = TokenSample.derive_from(sample, tokens=tokens)
        sample.tokens = sample.tokens[: self.seq_len]
        return sample

    def select_samples_to_pack(self, samples):
        packs, pack, space = [], [], self.seq_len
        for sample in sorted(samples, key=lambda sample: len(sample.tokens)):
            if len(sample.tokens) > space:
                packs.append(pack)
                pack, space = [], self.seq_len
            pack.append(sample)
            space -= len(sample.tokens)
        return [*packs, pack]

    @stateless
    def pack_selected_samples(self, samples):
        return Packed.derive_from(samples[0], arrays=[sample.tokens for sample in samples])

    @stateless
    def batch(self, packs):
        shape = (len(packs), self.seq_len)
        tokens, labels, position_ids = (np.zeros(shape, np.int64) for _ in range(3))
        weights = np.zeros(shape, np.float32)
        ends = []
        for row, pack in enumerate(packs):
            stop = 0
            for array in pack.arrays:
                start, stop = stop, stop + len(array)
                tokens[row, start:stop] = array
                labels[row, start : stop - 1] = array[1:]
                position_ids[row, start:stop] = np.arange(len(array))
                weights[row, start : stop - 1] = 1.0
                ends.append(row * self.seq_len + stop)
        arrays = {
            "tokens": tokens,
            "labels": labels,
            "position_ids": position_ids,
            "token_weights": weights,
            "cu_seqlens": np.array([0, *ends], np.int32),
        }
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def stock_loader(path, *, seq_len, batch_size, num_workers=0, tokenizer=None, buffer=512):
    """Return Energon's own loader with its defaults and a shuffle buffer of 100 samples."""
    dataset = megatron.energon.get_train_dataset(
        path,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=num_workers),
        batch_size=batch_size,
        task_encoder=StockEncoder(seq_len, tokenizer),
        shuffle_buffer_size=100,
        max_samples_per_sequence=None,
        packing_buffer_size=buffer,
    )
    return megatron.energon.get_savable_loader(dataset)
