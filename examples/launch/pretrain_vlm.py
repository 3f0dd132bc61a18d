# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A Megatron-LM launch script that trains megatron-core's LLaVA on images and text.

Encoder, model and forward step are those of ../vision_language.py; replace them by your own. The
differences from pretrain_gpt.py are these three and the encoder, which the data provider gets.
"""
# ruff: noqa: E402

import functools
import sys
import time
from pathlib import Path

PROGRAM_START = time.time()

from megatron.core.enums import ModelType
from megatron.training import get_args, inprocess_restart, pretrain, set_startup_timestamps
from megatron.training.arguments import core_transformer_config_from_args

try:  # Megatron-LM of megatron-core 0.18 and later
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args
except ImportError:
    parse_and_validate_args = None

sys.path.append(str(Path(__file__).parents[1]))

from vision_language import ImageTextEncoder, build_llava, forward_step, vision_configs

from energon_ext import load_tokenizer
from energon_ext.megatron import add_energon_args, train_valid_test_dataloaders_provider
from energon_ext.megatron.lm.script_options import MODEL_OPTIONS
from energon_ext.plan.cost import AttentionCost, VisionCost


@functools.cache
def build_encoder():
    """Return the encoder of this run; with --energon-balance it counts the cost of images, too."""
    args, costs = get_args(), None
    if args.energon_balance:
        config = core_transformer_config_from_args(args)
        language = AttentionCost.of_model(config, args.padded_vocab_size)
        costs = language, VisionCost.of_model(*vision_configs(config))
    tokenizer = load_tokenizer(args.energon_tokenizer or "bytes")
    return ImageTextEncoder(tokenizer, args.seq_length, costs)


def data_provider(samples, vp_stage=None):
    return train_valid_test_dataloaders_provider(samples, vp_stage, task_encoder=build_encoder())


data_provider.is_distributed = True  # every rank calls it


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, **_):
    """Build the model from Megatron-LM's arguments."""
    args = get_args()
    MODEL_OPTIONS.check(args)
    config = config or core_transformer_config_from_args(args)
    return build_llava(config, args.padded_vocab_size, args.seq_length, build_encoder().image_id)


def run_forward_step(data_iterator, model):
    return forward_step(data_iterator, model, image_id=build_encoder().image_id)


if __name__ == "__main__":
    set_startup_timestamps(program_start=PROGRAM_START, main_entry=time.time())
    pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    run = {
        "store": store,
        "train_valid_test_dataset_provider": data_provider,
        "model_provider": model_provider,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": run_forward_step,
    }
    extra = {"extra_args_provider": add_energon_args}
    if parse_and_validate_args is None:
        pretrain(**run, **extra)
    else:
        pretrain(pretrain_cfg_container_from_args(parse_and_validate_args(**extra)), **run)
