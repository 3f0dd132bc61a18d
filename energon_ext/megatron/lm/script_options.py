# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The options that Megatron-LM implements in its own launch scripts, and their effect here.

A script with this package replaces functions of ``pretrain_gpt.py`` and ``pretrain_hybrid.py``, so
an option that is implemented in one of them would be ignored silently. The tables here name
every option that these scripts read; one that a newer script reads is refused until it is listed.
"""

import argparse
import ast
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Collection, Mapping

from energon_ext.errors import ConfigError


@dataclass(frozen=True)
class ScriptOptions:
    """The options that some of Megatron-LM's scripts read.

    Attributes:
        scripts: their paths in a checkout of Megatron-LM.
        works: names of the options that do here what they do there.
        without_effect: those that have no effect here, or only together with a refused one.
        refused: those that must be left out, with the reason.
    """

    scripts: tuple[str, ...]
    works: frozenset[str]
    without_effect: frozenset[str]
    refused: Mapping[str, str]

    @cached_property
    def known(self) -> set[str]:
        return {*self.works, *self.without_effect, *self.refused}

    def check(self, args: argparse.Namespace) -> None:
        """Raise ConfigError for an option that is refused, or that only Megatron-LM's script knows.

        A wheel of megatron-core has no scripts to compare with.
        """
        for name, reason in self.refused.items():
            found = getattr(args, name, None)
            if found and found != "none":
                raise ConfigError(left_out(name, reason, found))
        from megatron import training

        if getattr(training, "__file__", None) is None:
            return
        for script in self.scripts:
            path = Path(str(training.__file__)).parents[2] / script
            unknown = options_read_by(path) - self.known if path.is_file() else set()
            for name in given_options(unknown):
                found = getattr(args, name, None)
                reason = f"{script} of this Megatron-LM reads it, and its code does not run"
                raise ConfigError(left_out(name, reason, found))


def left_out(name: str, reason: str, found: Any) -> str:
    """Return the message that an option must be left out."""
    return f"{flag(name)} must be left out ({reason}) with energon_ext, got {found!r}."


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def options_read_by(script: Path) -> set[str]:
    """Return every NAME that a script reads as ``args.NAME`` or by ``getattr(args, "NAME", ...)``.

    Raises:
        ConfigError: this Python cannot parse the script.
    """
    try:
        tree = ast.parse(script.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{script}: the options it reads cannot be found: {error}") from error
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=name) if _is_args(value):
                names.add(name)
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr"),
                args=[value, ast.Constant(value=str(name)), *_],
            ) if _is_args(value):
                names.add(name)
    return names


def _is_args(node: ast.expr) -> bool:
    """Return whether an expression is ``args`` or ``get_args()``."""
    match node:
        case ast.Name(id="args") | ast.Call(func=ast.Name(id="get_args")):
            return True
    return False


def given_options(names: Collection[str]) -> list[str]:
    """Return those of the names to which the command line gives a value that is not the default.

    Megatron-LM changes its arguments after it has parsed them, so they do not tell.
    """
    if not names:
        return []
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    defaults = vars(parser.parse_args([]))
    given, others = parser.parse_known_args()
    further = {word.partition("=")[0] for word in others}  # those that a script has added
    return [
        name
        for name in sorted(names)
        if flag(name) in further or getattr(given, name, None) != defaults.get(name)
    ]


_DISTILLATION = (
    "write the teacher's words as columns and pass distillation to forward_step, see "
    "docs/tasks/distillation.md"
)

#: Of the forward step, the loss and the data, which this package replaces; also options of data
#: that Megatron-LM reads elsewhere.
STEP_OPTIONS = ScriptOptions(
    scripts=(
        *("pretrain_gpt.py", "pretrain_hybrid.py", "pretrain_mamba.py"),
        "megatron/post_training/loss_func.py",
    ),
    works=frozenset(
        (
            *("seq_length", "micro_batch_size", "seed", "check_for_nan_in_loss_and_grad"),
            *("context_parallel_size", "data_parallel_size", "pipeline_model_parallel_size"),
            *("sequence_parallel", "tensor_model_parallel_size"),
            *("untie_embeddings_and_output_weights", "modelopt_enabled"),
        )
    ),
    without_effect=frozenset(
        (
            # There are no indexed datasets.
            *("split", "data_cache_path", "num_dataset_builder_threads", "mmap_bin_files"),
            *("mid_level_dataset_surplus", "object_storage_cache_path"),
            *("dataloader_fast_cache_load", "dataloader_defer_npy_index_mmap"),
            *("per_dataset_sequences_path", "legacy_tokenizer", "allow_ambiguous_pad_tokens"),
            # Documents of a row are always apart.
            *("reset_position_ids", "reset_attention_mask", "dataloader_inter_document_masking"),
            "create_attention_mask_in_dataloader",
            # Megatron-LM reads them only with --fim-data or --logits-load-dir.
            *("fim_rate", "fim_spm_rate", "fim_split_sample", "fim_fragment_rate"),
            *("fim_no_prefix", "fim_prefix_token", "fim_middle_token", "fim_suffix_token"),
            *("fim_pad_token", "fim_eod_token"),
            *("logits_load_decode_threads", "logits_load_prefetch_factor"),
            *("logits_load_msc_prefetch_depth", "logits_load_kd_loss_alpha"),
            "logits_load_ignore_errors",
        )
    ),
    refused={
        "yaml_cfg": "a YAML configuration has none of the options of energon_ext",
        **dict.fromkeys(
            ("train_data_path", "valid_data_path", "test_data_path", "per_split_data_args_path"),
            "the metadataset of --data-path has all splits",
        ),
        **dict.fromkeys(
            ("mock_data", "sft", "use_varlen_dataset"),
            "it selects one of Megatron-LM's own datasets",
        ),
        "fim_data": "give the entries of the metadataset a `transform`, which `energon-ext import "
        "--fim-rate` writes",
        "logits_load_dir": f"its logits are numbered by Megatron-LM's batches, which do not "
        f"exist; {_DISTILLATION}",
        **dict.fromkeys(
            (
                *("export_kd_teacher_load", "export_kd_teacher_model_config"),
                *("export_kd_teacher_ckpt_format", "export_kd_cfg"),
            ),
            f"its loss does not run; {_DISTILLATION}",
        ),
        "use_legacy_models": "its models know no packed rows",
        "perform_rl_step": "it replaces the data with its own rollouts; use energon_ext.rl",
        "eod_mask_loss": "use --energon-mask-boundary-loss",
        "full_validation": "it needs a validation loader that ends; use --eval-iters",
        **dict.fromkeys(
            ("multiple_validation_sets", "validation_set_names"),
            "the loss of each source is reported anyway",
        ),
        "sequence_packing_scheduler": "it packs documents, but rows of energon_ext are already "
        "packed",
        **dict.fromkeys(
            ("dynamic_context_parallel", "hybrid_context_parallel"),
            "Megatron-LM would schedule documents itself, by an interface that no release has; a "
            "loop of your own runs long documents on more ranks, see docs/run/context_sizes.md",
        ),
        "overlap_moe_expert_parallel_comm": "its schedule needs a forward step in parts",
        "check_for_spiky_loss": "the losses of packed rows are not checked for spikes",
        **dict.fromkeys(("enable_cuda_graph", "external_cuda_graph"), "use --cuda-graph-impl"),
    },
)

#: Of the model, for scripts with the ``model_provider`` of ``examples/launch/pretrain_gpt.py``.
MODEL_OPTIONS = ScriptOptions(
    scripts=("model_provider.py", "gpt_builders.py", "hybrid_builders.py", "mamba_builders.py"),
    works=frozenset(
        (
            *("padded_vocab_size", "max_position_embeddings", "position_embedding_type"),
            *("rotary_percent", "rotary_base", "use_rope_scaling", "fp16_lm_cross_entropy"),
            *("untie_embeddings_and_output_weights", "mtp_num_layers", "num_experts"),
            *("normalization", "qk_layernorm", "qk_l2_norm", "multi_latent_attention"),
            *("moe_grouped_gemm", "moe_use_legacy_grouped_gemm"),
        )
    ),
    # Transformer Engine is used where it is installed.
    without_effect=frozenset(("transformer_impl", "memory_snapshot_path")),
    refused={
        **dict.fromkeys(
            (
                *("spec", "experimental_attention_variant", "heterogeneous_layers_config_path"),
                *("logit_dtype", "record_memory_history", "use_legacy_models", "yaml_cfg"),
            ),
            "the model_provider of this script does not read it; use your own",
        ),
        **dict.fromkeys(
            (
                *("hybrid_layer_pattern", "hybrid_override_pattern"),
                *("hybrid_attention_ratio", "hybrid_mlp_ratio"),
            ),
            "the model_provider of this script builds only GPT models; use your own",
        ),
        "modelopt_enabled": "the model_provider of this script builds no model of ModelOpt; use "
        "your own",
    },
)
