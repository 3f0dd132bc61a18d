# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Slices of a batch against plain loops and against one rank that holds everything."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_ext import ConfigError
from energon_ext.megatron import build_packed_seq_params, slice_for_context_parallel
from energon_ext.megatron.attention import SegmentAttention
from energon_ext.megatron.context_parallel import context_parallel_positions
from tests.megatron.small_gpt import small_config, synthetic_batch

PADDING = -1


def slow_positions(ends, size, rank):
    """Chunks of each segment, one after another."""
    held = []
    for start, end in zip(ends, ends[1:]):
        chunk = (end - start) // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            held += range(start + number * chunk, start + (number + 1) * chunk)
    return held


def aligned_batch(lengths, size, seed=0):
    """One row of documents, each padded to a multiple of ``2 * size``, and a tail of padding."""
    alignment = 2 * size
    segments = []  # (length, source)
    padded_ends = [0]
    for index, length in enumerate(lengths):
        padding = -length % alignment
        segments += [(length, index % 2), (padding, PADDING)]
        padded_ends.append(padded_ends[-1] + length + padding)
    segments.append((alignment, PADDING))
    padded_ends.append(padded_ends[-1] + alignment)
    segments = [(length, source) for length, source in segments if length]
    lengths, sources = (torch.tensor(values, dtype=torch.int32) for values in zip(*segments))
    total = padded_ends[-1]
    generator = torch.Generator().manual_seed(seed)
    in_document = torch.repeat_interleave(sources >= 0, lengths.long())
    return dataclasses.replace(
        synthetic_batch(seed),
        tokens=torch.randint(4, 60, (total,), generator=generator),
        labels=torch.arange(total),
        token_weights=in_document.float(),
        position_ids=torch.cat([torch.arange(length) for length in lengths.tolist()]),
        cu_seqlens=torch.tensor([0, *lengths.cumsum(0)], dtype=torch.int32),
        cu_seqlens_padded=torch.tensor(padded_ends, dtype=torch.int32),
        max_seqlen=int(lengths.max()),
        source_ids=sources,
        log_probs=torch.rand(total, generator=generator),
        rewards=torch.arange(len(lengths)).float(),
    ).validate()


LENGTHS = [5, 16, 1, 11]


def test_the_slices_of_two_ranks_by_hand():
    ends = torch.tensor([0, 8, 12], dtype=torch.int32)
    found = [context_parallel_positions(ends, 2, rank).tolist() for rank in (0, 1)]
    assert found == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]


@settings(max_examples=50)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.sampled_from([1, 2, 3, 4]))
def test_slices_are_segment_chunks_and_have_each_position_once(multiples, size):
    lengths = [2 * size * multiple for multiple in multiples]
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    found = [context_parallel_positions(ends, size, rank).tolist() for rank in range(size)]
    assert found == [slow_positions(ends.tolist(), size, rank) for rank in range(size)]
    assert sorted(sum(found, [])) == list(range(int(ends[-1])))


def partition_of_transformer_engine(ends, total, size, rank):
    """The rule of ``thd_get_partitioned_indices``: each rank sees all ends divided by ``size``.

    A token of the rank lies in a segment by these ends, and in one of its two chunks by its place.
    """
    own_ends, held = [end // size for end in ends], []
    for token in range(total // size):
        segment = max(n for n, end in enumerate(own_ends[:-1]) if end <= token)
        start, half = own_ends[segment], (own_ends[segment + 1] - own_ends[segment]) // 2
        place = token - start
        chunks_before = rank if place < half else 2 * (size - 1) - rank
        held.append(start * size + place + half * chunks_before)
    return held


def test_slices_match_transformer_engine_and_leave_no_gap():
    """400 layouts: documents of 1 to 40 tokens, and padding at their ends and at the tail."""
    random = np.random.default_rng(0)
    for number in range(100):
        for size in (2, 3, 4, 8):
            lengths = random.integers(1, 41, size=random.integers(1, 7)).tolist()
            batch = aligned_batch(lengths, size, seed=number)
            rank = number % size
            part = slice_for_context_parallel(batch, size, rank)
            params = build_packed_seq_params(part)
            ends = params.cu_seqlens_q.tolist()
            assert params.cu_seqlens_q is params.cu_seqlens_q_padded
            assert ends[0] == 0 and ends[-1] == batch.num_tokens
            held = partition_of_transformer_engine(ends, batch.num_tokens, size, rank)
            assert torch.equal(part.labels, batch.labels[held])


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_has_the_same_share_of_causal_attention(size):
    ends = [0, 8 * size, 10 * size, 16 * size]
    start_of = {p: start for start, end in zip(ends, ends[1:]) for p in range(start, end)}
    work = {
        sum(position - start_of[position] + 1 for position in held.tolist())
        for held in (context_parallel_positions(torch.tensor(ends), size, r) for r in range(size))
    }
    assert len(work) == 1


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["tokens", "labels", "token_weights", "position_ids", "log_probs"])
def test_slices_together_are_the_batch(name, size):
    batch = aligned_batch(LENGTHS, size)
    whole = torch.zeros_like(getattr(batch, name))
    for rank in range(size):
        held = slow_positions(batch.cu_seqlens_padded.tolist(), size, rank)
        whole[held] = getattr(slice_for_context_parallel(batch, size, rank), name)
    assert torch.equal(whole, getattr(batch, name))


@pytest.mark.parametrize("size", [2, 4])
def test_columns_are_cut_at_the_same_positions_as_labels(size):
    batch = aligned_batch(LENGTHS, size)
    batch.columns = {"values": batch.labels.float()}
    for rank in range(size):
        part = slice_for_context_parallel(batch, size, rank).validate()
        assert part.columns["values"].tolist() == part.labels.tolist()


@pytest.mark.parametrize("size", [2, 4])
def test_a_slice_knows_the_source_of_each_position(size):
    batch = aligned_batch(LENGTHS, size)
    tokens = dict.fromkeys(batch.tokens_per_source(), 0)
    for rank in range(size):
        part = slice_for_context_parallel(batch, size, rank).validate()
        held = slow_positions(batch.cu_seqlens_padded.tolist(), size, rank)
        assert part.segment_sources().tolist() == batch.segment_sources()[held].tolist()
        assert part.padding_mask().tolist() == batch.padding_mask()[held].tolist()
        rewards = torch.repeat_interleave(part.rewards, part.segment_lengths().long())
        of_whole = torch.repeat_interleave(batch.rewards, batch.segment_lengths().long())
        assert rewards.tolist() == of_whole[held].tolist()
        for source, count in part.tokens_per_source().items():
            tokens[source] += count
    assert tokens == batch.tokens_per_source()


def test_aligned_segments_need_no_padded_ends():
    batch = aligned_batch([8, 4], 2)
    without = dataclasses.replace(batch, cu_seqlens_padded=None)
    one, other = (slice_for_context_parallel(each, 2, 1) for each in (batch, without))
    assert torch.equal(one.tokens, other.tokens)


def test_an_unaligned_segment_is_refused_with_its_length():
    with pytest.raises(ConfigError) as error:
        slice_for_context_parallel(aligned_batch([8, 6, 4], 1), 2, 0)
    assert str(error.value) == (
        "Segment 1 of the batch takes 6 positions; context_parallel_size=2 needs multiples of 4. "
        "Let the task encoder align segments to 4."
    )


def test_every_rank_describes_the_whole_batch_to_attention():
    batch = aligned_batch(LENGTHS, 2)
    for rank in range(2):
        params = build_packed_seq_params(slice_for_context_parallel(batch, 2, rank))
        assert params.qkv_format == "thd"
        assert params.cu_seqlens_q_padded is params.cu_seqlens_kv_padded
        assert params.cu_seqlens_q_padded.tolist() == [0, 8, 24, 28, 40, 44]
        # Told of gaps, Transformer Engine would do without its fast kernels.
        assert params.cu_seqlens_q is params.cu_seqlens_q_padded
        assert getattr(params, "pad_between_seqs", False) is False
        assert params.max_seqlen_q == params.max_seqlen_kv == 16


def rank_attention(params, query, key, value, rank, size):
    """What one rank computes: its queries, the keys of all ranks, the ends of packed_seq_params."""
    ends = params.cu_seqlens_q_padded.tolist()
    output = torch.zeros_like(query)
    for start, stop in zip(ends, ends[1:]):
        chunk = (stop - start) // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            for position in range(start + number * chunk, start + (number + 1) * chunk):
                keys = slice(start, position + 1)
                scores = torch.einsum("hc,khc->hk", query[position], key[keys])
                weights = (scores / query.shape[-1] ** 0.5).softmax(-1)
                output[position] = torch.einsum("hk,khc->hc", weights, value[keys])
    return output


def test_the_ranks_together_attend_like_one_rank(one_rank):
    size = 2
    batch = aligned_batch(LENGTHS, size)
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(batch.num_tokens, 4, 8, generator=generator) for _ in "qkv")
    one = SegmentAttention(small_config(), 1, None, "self")
    expected = one(query, key, value, packed_seq_params=build_packed_seq_params(batch))
    found = torch.zeros_like(query)
    for rank in range(size):
        part = slice_for_context_parallel(batch, size, rank)
        params = build_packed_seq_params(part)
        found += rank_attention(params, query, key, value, rank, size)
    documents = ~batch.padding_mask()
    torch.testing.assert_close(found.flatten(-2)[documents], expected[documents], rtol=0, atol=1e-5)
