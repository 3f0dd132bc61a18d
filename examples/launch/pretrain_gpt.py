# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A Megatron-LM launch script that reads its data with Energon.

Compared with Megatron-LM's own pretrain_gpt.py, three arguments change, marked 1 to 3 at the end.
Run it with torchrun.sh or slurm.sh.
"""
# ruff: noqa: E402

import time

PROGRAM_START = time.time()

from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
from megatron.training import get_args, inprocess_restart, pretrain, set_startup_timestamps
from megatron.training.arguments import core_transformer_config_from_args

try:  # Megatron-LM of megatron-core 0.18 and later
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args
except ImportError:
    parse_and_validate_args = None

from energon_ext.megatron import (
    add_energon_args,
    forward_step,
    gpt_layer_spec,
    mtp_block_spec,
    train_valid_test_dataloaders_provider,
)
from energon_ext.megatron.lm.script_options import MODEL_OPTIONS


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, **_):
    """Build the model from Megatron-LM's arguments; your script keeps its own provider."""
    args = get_args()
    MODEL_OPTIONS.check(args)  # your own provider may know these
    config = config or core_transformer_config_from_args(args)
    layers = gpt_layer_spec(config, vp_stage)
    return GPTModel(
        config,
        layers,
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        mtp_block_spec=mtp_block_spec(config, layers, vp_stage),
        vp_stage=vp_stage,
    )


def get_embedding_ranks(pipeline_ranks):
    """Return the pipeline ranks with the embedding: the first, and those that share its weights."""
    args = get_args()
    ranks = {pipeline_ranks[0]}
    if len(pipeline_ranks) > 1:
        if not args.untie_embeddings_and_output_weights:
            ranks.add(pipeline_ranks[-1])
        ranks.update(get_mtp_ranks(pipeline_ranks, core_transformer_config_from_args(args)))
    return sorted(ranks)


if __name__ == "__main__":
    set_startup_timestamps(program_start=PROGRAM_START, main_entry=time.time())
    pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    run = {
        "store": store,
        "get_embedding_ranks": get_embedding_ranks,
        # 1: the data; for your own encoder, functools.partial(..., task_encoder=MyEncoder())
        "train_valid_test_dataset_provider": train_valid_test_dataloaders_provider,
        "model_provider": model_provider,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": forward_step,  # 2: packed batches, with a loss for every source
    }
    extra = {"extra_args_provider": add_energon_args}  # 3: --dataloader-save and --energon-*
    if parse_and_validate_args is None:
        pretrain(**run, **extra)
    else:
        # Do not pass a model config: 0.19 would build the model itself without the provider.
        pretrain(pretrain_cfg_container_from_args(parse_and_validate_args(**extra)), **run)
