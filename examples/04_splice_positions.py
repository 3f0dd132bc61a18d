# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Train on one passage at every offset, and on the same passage at offset 0 only; compare.

Small enough for a CPU:

    python examples/04_splice_positions.py demo/data/prose --output positions.png

Three models of the same size: learned absolute positions trained with splicing, the same trained
plainly, and RoPE. The loss of the passage is then measured at every offset of the frame.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.energon import WorkerConfig
from options import count, new_parser
from splice_figures import draw_loss_over_offsets

from energon_ext import ExactDataLoader, SpliceTaskEncoder, get_train_dataset, get_val_datasets
from energon_ext.batch.collate import BatchAssembler
from energon_ext.batch.rows import Row
from energon_ext.encoders.tokenizers import ByteTokenizer
from energon_ext.megatron import (
    build_packed_seq_params,
    enable_cpu,
    forward_step,
    gpt_layer_spec,
    initialize_weights,
)
from energon_ext.splice import LossMap, SpliceConfig
from energon_ext.splice.source import splices_of

SEQ_LEN = 256
PASSAGE = 64
ALONE = WorkerConfig(rank=0, world_size=1, num_workers=0)
LOADER = {"watchdog_timeout_seconds": None, "gc_collect_every_n_steps": 0}


def main():
    parser = new_parser(
        __doc__.splitlines()[0], "python examples/04_splice_positions.py prose.yaml --steps 300"
    )
    parser.add_argument("data", help="metadataset or prepared folder with a train split")
    parser.add_argument("--steps", type=count, default=300, help="of each of the three models")
    parser.add_argument("--output", default="positions.png", help="the picture")
    args = parser.parse_args()
    start_megatron()
    curves = {}
    for name, position_embedding, offset_stride in (
        ("every offset", "learned_absolute", 1),
        ("offset 0 only", "learned_absolute", SEQ_LEN),
        ("RoPE", "rope", SEQ_LEN),
    ):
        encoder = make_encoder(offset_stride)
        model = build_model(position_embedding)
        train(model, args.data, encoder, args.steps)
        losses = curves[name] = measure(model, args.data, encoder)
        values = losses.losses
        print(
            f"{name}: mean loss over {len(values)} offsets {values.mean():.3f}, "
            f"smallest {values.min():.3f}, largest {values.max():.3f}"
        )
        if position_embedding == "rope":
            print(f"RoPE: logits at offsets 0 and 100 differ by {rope_difference(model):.1e}")
    draw_loss_over_offsets(curves, args.output)
    dist.destroy_process_group()


def start_megatron():
    enable_cpu()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1, inference_rng_tracker=True)


def make_encoder(offset_stride):
    """The first tokens of the longest document; several to a frame, each at its own offset."""
    splice = SpliceConfig(
        content_length=PASSAGE,
        content_start_mode="anchor_start",
        offset_stride=offset_stride,
        pack_contents=True,
    )
    every_offset = SEQ_LEN - PASSAGE + 1
    return SpliceTaskEncoder(
        ByteTokenizer(), SEQ_LEN, splice, validation_starts=1, validation_offsets=every_offset
    )


def build_model(position_embedding):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        ffn_hidden_size=128,
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
        SEQ_LEN,
        position_embedding_type=position_embedding,
    )
    initialize_weights(model, seed=0)
    return model


def train(model, data, encoder, steps):
    dataset = get_train_dataset(data, worker_config=ALONE, batch_size=1, task_encoder=encoder)
    batches = iter(ExactDataLoader(dataset, **LOADER))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(steps):
        output, loss_func = forward_step(batches, model)
        loss_sum, num_tokens, _ = loss_func(output)
        optimizer.zero_grad()
        (loss_sum / num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@torch.no_grad()
def measure(model, data, encoder):
    """The loss of the passage at every offset, whatever the training showed."""
    ((dataset, _),) = get_val_datasets(
        data, worker_config=ALONE, batch_size=4, task_encoder=encoder, split_part="train"
    )
    (splice,) = splices_of(dataset)
    losses = LossMap(splice.examples, splice.names)
    for batch in ExactDataLoader(dataset, **LOADER):
        output, _ = forward_step(iter([batch]), model)
        losses.add_batch(batch, output.view(-1).numpy())
    return losses


@torch.no_grad()
def rope_difference(model):
    """Largest difference of the logits of a passage at offset 0 and at offset 100."""
    passage = torch.randint(260, (PASSAGE,), generator=torch.Generator().manual_seed(0)).numpy()
    logits = []
    for offset in (0, 100):
        row = Row([passage], gaps=[offset], first_positions=[offset])
        batch = BatchAssembler(SEQ_LEN)([row], sources=[""])
        output = model(
            batch.tokens[None],
            batch.position_ids[None],
            None,
            packed_seq_params=build_packed_seq_params(batch),
        )
        logits.append(output.view(SEQ_LEN, -1)[offset : offset + PASSAGE])
    return float((logits[0] - logits[1]).abs().max())


if __name__ == "__main__":
    main()
