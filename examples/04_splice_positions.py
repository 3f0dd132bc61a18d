# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Compare training on one passage at every offset with training on it at offset 0 only.

It runs on a CPU:

    python examples/04_splice_positions.py prose.yaml --output positions.png

There are three models of the same size: learned absolute positions with and without splicing, and
RoPE. The loss of the passage is then measured at every offset of the frame.
"""

import torch
import torch.distributed as dist
from options import count, new_parser
from splice_figures import draw_loss_over_offsets
from splice_model import build_model, measure, start_megatron, train

from energon_ext import SpliceTaskEncoder
from energon_ext.batch.collate import BatchAssembler
from energon_ext.batch.rows import Row
from energon_ext.megatron import build_packed_seq_params
from energon_ext.splice import SpliceConfig
from energon_ext.tokenizers.tokenizers import ByteTokenizer

SEQ_LEN = 256
PASSAGE = 64


def main():
    parser = new_parser(
        __doc__.splitlines()[0], "python examples/04_splice_positions.py prose.yaml --steps 300"
    )
    parser.add_argument("data", help="metadataset or dataset with a train split")
    parser.add_argument("--steps", type=count, default=300, help="steps of each model")
    parser.add_argument("--output", default="positions.png", help="path of the figure")
    args = parser.parse_args()
    start_megatron()
    curves = {}
    for name, position_embedding, offset_stride in (
        ("every offset", "learned_absolute", 1),
        ("offset 0 only", "learned_absolute", SEQ_LEN),
        ("RoPE", "rope", SEQ_LEN),
    ):
        encoder = make_encoder(offset_stride)
        model = build_model(SEQ_LEN, position_embedding)
        for _ in train(model, args.data, encoder, args.steps):
            pass
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


def make_encoder(offset_stride):
    """Return an encoder of the longest document's first tokens, several per frame by offset."""
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


@torch.no_grad()
def rope_difference(model):
    """Return the largest difference between a passage's logits at offset 0 and at offset 100."""
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
