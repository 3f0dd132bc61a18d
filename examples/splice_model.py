# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A small GPT that memorizes documents within a minute on a CPU."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from initial_weights import initialize_weights
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.energon import WorkerConfig

from energon_ext import ExactDataLoader, get_train_dataset, get_val_datasets
from energon_ext.megatron import enable_cpu, forward_step, gpt_layer_spec
from energon_ext.splice import LossMap
from energon_ext.splice.frames import splices_of
from energon_ext.tokenizers.tokenizers import ByteTokenizer

ALONE = WorkerConfig(rank=0, world_size=1, num_workers=0)


def start_megatron():
    enable_cpu()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1, inference_rng_tracker=True)


def build_model(seq_len, position_embedding="learned_absolute", hidden_size=32, seed=0):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden_size,
        ffn_hidden_size=4 * hidden_size,
        num_attention_heads=4,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        calculate_per_token_loss=True,
    )
    model = GPTModel(
        config,
        gpt_layer_spec(config),
        ByteTokenizer().padded_vocab_size(64),
        seq_len,
        position_embedding_type=position_embedding,
    )
    initialize_weights(model, seed=seed)
    return model


def train(model, data, encoder, steps, batch_size=1, lr=2e-3, decay=False):
    """Train, yielding the number of every completed step; with decay the rate falls to 0."""
    dataset = get_train_dataset(
        data, worker_config=ALONE, batch_size=batch_size, task_encoder=encoder
    )
    batches = iter(ExactDataLoader(dataset))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(1, steps + 1):
        output, loss_func = forward_step(batches, model)
        loss_sum, num_tokens, _ = loss_func(output)
        optimizer.zero_grad()
        (loss_sum / num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = lr * (1 - (step - 1) / steps if decay else 1)
        optimizer.step()
        yield step


@torch.no_grad()
def measure(model, data, encoder, *, prompt_tokens=1, batch_size=4):
    """Return the loss on the grid of the training documents, including untrained positions."""
    ((dataset, _),) = get_val_datasets(
        data,
        worker_config=ALONE,
        batch_size=batch_size,
        task_encoder=encoder,
        split_part="train",
    )
    (splice,) = splices_of(dataset)
    losses = LossMap(splice.examples, splice.names, prompt_tokens=prompt_tokens)
    for batch in ExactDataLoader(dataset):
        output, _ = forward_step(iter([batch]), model)
        losses.add_batch(batch, output.view(-1).numpy())
    return losses
