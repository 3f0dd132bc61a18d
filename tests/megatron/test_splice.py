# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Splices at different offsets in a real GPTModel."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.models.gpt import GPTModel

from energon_ext import MultiSpliceTaskEncoder, get_train_dataset, get_val_datasets
from energon_ext.megatron import (
    forward_step,
    gpt_layer_spec,
    mean_losses,
)
from energon_ext.splice import LossMap, MultiSpliceConfig
from energon_ext.splice.frames import splices_of
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.megatron.example_code import initialize_weights
from tests.megatron.small_gpt import run_packed, small_config
from tests.support import config, loader_for, take, write_dataset, write_mix

CHECKOUT = Path(__file__).parents[2]
sys.path.insert(0, str(CHECKOUT / "examples"))
from splice_figures import draw_loss_map  # noqa: E402

SEQ_LEN = 48
TEXTS = ["all work and no play", "the quick brown foxes", "pack my box with five jugs"]


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    folder = write_dataset(tmp_path_factory.mktemp("splice") / "texts", TEXTS)
    return write_mix(folder.parent / "mix.yaml", [("texts", 1)])


def model_with(position_embedding):
    options = small_config(init_method_std=0.1)
    model = GPTModel(
        options,
        gpt_layer_spec(options),
        ByteTokenizer().padded_vocab_size(64),
        SEQ_LEN,
        position_embedding_type=position_embedding,
    )
    initialize_weights(model, seed=0)
    return model


def encoder(**fields):
    splice = MultiSpliceConfig(
        num_docs=3, content_start_mode="slide_within", balance_mode="by_document", **fields
    )
    return MultiSpliceTaskEncoder(ByteTokenizer(), SEQ_LEN, splice)


def logits_by_offset(model, path, **fields):
    """Return the logits of the longest document by its offset in the row."""
    dataset = get_train_dataset(
        path, worker_config=config(), batch_size=1, task_encoder=encoder(**fields), repeat=False
    )
    length, found = len(TEXTS[2]) + 2, {}
    with torch.no_grad():
        for batch in loader_for(dataset):
            if int(batch.token_weights.sum()) == length - 1:
                offset = int(batch.token_weights.nonzero()[0])
                found[offset] = run_packed(model, batch)[offset : offset + length]
    assert sorted(found) == list(range(SEQ_LEN - length + 1))
    return found


def largest_difference(logits):
    return max(float((logits[0] - other).abs().max()) for other in logits.values())


@pytest.mark.nightly
def test_under_rope_a_confined_document_does_not_see_its_offset(one_rank, documents):
    model = model_with("rope")
    assert largest_difference(logits_by_offset(model, documents)) <= 1e-5
    assert largest_difference(logits_by_offset(model, documents, attend_prefix=True)) > 0.01


@pytest.mark.nightly
def test_learned_positions_reveal_the_offset(one_rank, documents):
    assert largest_difference(logits_by_offset(model_with("learned_absolute"), documents)) > 0.01


def test_training_lowers_the_loss_of_the_documents_it_shows(one_rank, documents, tmp_path):
    names = [f"texts:train/doc{number}" for number in (2, 1, 0)]  # longest first
    task_encoder = encoder(doc_weights=[1, 1, 0], pack_contents=True)
    model = model_with("learned_absolute")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dataset = get_train_dataset(
        documents, worker_config=config(), batch_size=2, task_encoder=task_encoder
    )
    steps = 60
    batches, history = iter(take(loader_for(dataset), steps)), []
    for _ in range(steps):
        output, loss_func = forward_step(batches, model)
        loss_sum, num_tokens, report = loss_func(output)
        optimizer.zero_grad()
        (loss_sum / num_tokens).backward()
        optimizer.step()
        history.append(mean_losses([report]))
    assert set(history[-1]["loss_by_source"]) == set(names[:2])
    assert history[-1]["loss"] < 1 < 4 < history[0]["loss"]

    ((dataset, _),) = get_val_datasets(
        documents,
        worker_config=config(),
        batch_size=3,
        task_encoder=task_encoder,
        split_part="train",
    )
    (source,) = splices_of(dataset)
    losses = LossMap(source.examples, source.names)
    with torch.no_grad():
        for batch in loader_for(dataset):
            losses.add_batch(batch, forward_step(iter([batch]), model)[0].view(-1).numpy())
    means = losses.per_document()
    assert means[names[0]] < 1.5 and means[names[1]] < 1.5 and means[names[2]] > 3
    assert not np.isnan(losses.losses).any()
    draw_loss_map(losses, tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.nightly
def test_the_example_makes_the_loss_flat_over_all_offsets(tmp_path):
    write_dataset(tmp_path / "data", ["A passage that is long enough to fill a window. " * 3])
    run = subprocess.run(
        [sys.executable, "examples/04_splice_positions.py", tmp_path / "data"]
        + ["--output", tmp_path / "positions.png"],
        cwd=CHECKOUT,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    mean, largest = {}, {}
    for name, *figures in re.findall(
        r"^(.+): mean loss over 193 offsets ([\d.]+), smallest [\d.]+, largest ([\d.]+)",
        run.stdout,
        re.MULTILINE,
    ):
        mean[name], largest[name] = map(float, figures)
    assert largest["every offset"] < 0.3 and mean["offset 0 only"] > 1 and largest["RoPE"] < 0.3
    assert float(re.search(r"differ by (\S+)", run.stdout)[1]) <= 1e-5
    assert (tmp_path / "positions.png").exists()


@pytest.mark.nightly
def test_the_experiments_draw_what_they_print(tmp_path):
    """In a short training the loss is lower with fewer documents, and pictures are drawn."""
    texts = [f"Document {n}: " + "abcdefghij"[n % 10 :] * (8 + n) for n in range(12)]
    write_dataset(tmp_path / "data", texts)
    run = subprocess.run(
        [sys.executable, "examples/05_splice_experiments.py", tmp_path / "data", "--steps", "30"]
        + ["--output", tmp_path / "figures", "--experiment", "documents"],
        cwd=CHECKOUT,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    losses = [float(found) for found in re.findall(r"mean loss ([\d.]+)", run.stdout)]
    assert len(losses) == 4 and losses[0] < losses[2]
    assert (tmp_path / "figures" / "documents.png").read_bytes().startswith(b"\x89PNG")
