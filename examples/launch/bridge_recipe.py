# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A dataset provider for Megatron-Bridge, and its forward step.

    config = ...  # any recipe of Megatron-Bridge for pretraining
    use_energon(config, path="mix.yaml", tokenizer="tokenizer.json")
    pretrain(config, forward_step_func=bridge_forward_step)

    config = ...  # any recipe for SFT or PEFT
    use_energon(config, path="chats.yaml", tokenizer="models/base", task_encoder=SFTTaskEncoder)
    finetune(config, forward_step_func=bridge_forward_step)

Megatron-Bridge saves the data state next to the model and restores it. Written for version 0.6.2,
in which it trained, fine-tuned, evaluated and resumed on CPUs; it has not run on GPUs.
"""

from dataclasses import dataclass
from datetime import timedelta

from megatron.bridge.training.config import DatasetBuildContext, DatasetProvider
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_current_global_batch_size

from energon_ext import ConfigError, PackedTaskEncoder, get_train_dataset, get_val_datasets
from energon_ext.megatron import (
    ValidationLoader,
    create_broadcast_groups,
    data_parallel_worker_config,
    forward_step,
)
from energon_ext.megatron.loader import RerunLoader
from energon_ext.plan.cost import AttentionCost
from energon_ext.state.together import on_all_ranks
from energon_ext.tokenizers.tokenizers import load_tokenizer


@dataclass(kw_only=True)
class EnergonExtProvider(DatasetProvider):
    """Packed rows of a metadataset; tensor-parallel rank 0 of every pipeline stage loads data."""

    path: str
    seq_length: int
    rows_per_step: int
    # Bridge's setup overwrites a field named `tokenizer` with its own tokenizer.
    tokenizer_name: str = "bytes"
    seed: int = 1234
    timeout_minutes: float = 10
    dataloader_type: str = "external"

    # Set by use_energon; not fields, so that Bridge does not save them.
    _recipe = None
    _task_encoder = PackedTaskEncoder
    _encoder_options = {}

    def finalize(self):
        """Refuse what packed rows do not support, before Bridge starts."""
        super().finalize()
        self._check()

    def build_datasets(self, context: DatasetBuildContext):
        """Return the iterators that Bridge passes to the step unchanged."""
        self._check()  # a callback may have changed the recipe
        size = get_current_global_batch_size()
        if self.rows_per_step != size:
            raise ConfigError(
                f"train.global_batch_size: {size} found, but use_energon was called with "
                f"{self.rows_per_step}; call it after the last change, and without a ramp-up."
            )
        create_broadcast_groups(timedelta(minutes=self.timeout_minutes))  # on all ranks
        loaders = [None, None, None]

        def build():
            if parallel_state.get_tensor_model_parallel_rank() == 0:
                loaders[:] = self._build_loaders()

        on_all_ranks(build)
        return tuple(loaders)

    def _build_loaders(self):
        options = {
            "worker_config": data_parallel_worker_config(self.num_workers, seed=self.seed),
            "batch_size": 1,  # a packed micro-batch is one sequence
            "task_encoder": self._build_encoder(),
        }
        train = RerunLoader(
            get_train_dataset(self.path, rows_per_step=self.rows_per_step, **options)
        )
        batches = self._batches_per_evaluation()
        if not batches:
            return train, None, None
        validation = get_val_datasets(self.path, **options)
        if batches < len(validation):  # Bridge expects a loss for every source
            raise ConfigError(
                f"validation.eval_iters: a rank evaluates {batches} micro-batches, too few for "
                f"{len(validation)} validation sources; raise it, or eval_global_batch_size."
            )
        return train, ValidationLoader(validation, batches), None

    def _build_encoder(self):
        ranks = parallel_state.get_context_parallel_world_size()
        options = {"alignment": 2 * ranks if ranks > 1 else 1, **self._encoder_options}
        if options.get("balance") is not None:
            model = self._recipe.model
            pattern = getattr(model, "hybrid_layer_pattern", None)
            cost = AttentionCost.of_model(model, model.vocab_size, pattern)
            options.setdefault("cost", cost)
        return self._task_encoder(load_tokenizer(self.tokenizer_name), self.seq_length, **options)

    def _batches_per_evaluation(self):
        """Return the micro-batches of one rank in an evaluation; 0 for no evaluation."""
        if self._recipe is None:
            return 0
        validation = self._recipe.validation
        rows = validation.eval_global_batch_size or self.rows_per_step
        per_rank = rows // parallel_state.get_data_parallel_world_size()
        return (validation.eval_iters or 0) * per_rank

    def _check(self):
        """Raise ConfigError for a setting of the recipe that packed rows do not support."""
        if self._recipe is None:
            return
        for name, found, allowed in _unsupported(self._recipe, self.seq_length):
            raise ConfigError(f"{name}: {found!r} found, {allowed}")


def _unsupported(config, seq_length):
    """Yield the settings that packed rows do not support: name, value and what is allowed."""
    model, train, validation = config.model, config.train, config.validation
    if model.seq_length != seq_length:
        called = f"but use_energon was called with {seq_length}; call it after the last change."
        yield "model.seq_length", model.seq_length, called
    for name, size in (
        ("train.micro_batch_size", train.micro_batch_size),
        ("validation.eval_micro_batch_size", validation.eval_micro_batch_size),
    ):
        if size not in (None, 1):
            yield name, size, "1 is needed: a packed micro-batch is one sequence."
    if (epochs := getattr(train, "num_epochs", None)) is not None:
        advice = "None is needed: set train.train_iters, and limit the sources by max_epochs."
        yield "train.num_epochs", epochs, advice
    if model.cuda_graph_impl != "none":
        advice = "'none' is needed: the recipe has no fixed number of documents per row."
        yield "model.cuda_graph_impl", model.cuda_graph_impl, advice
    for name in ("dynamic_context_parallel", "hybrid_context_parallel"):
        if getattr(model, name, False):
            advice = (
                "False is needed: Megatron would schedule documents itself, by an interface that "
                "no release has; see docs/run/context_sizes.md."
            )
            yield f"model.{name}", True, advice
    if _overlaps_experts(config):
        advice = "False is needed: the step does not return a schedule plan."
        yield "overlap_moe_expert_parallel_comm", True, advice
    if config.dist.use_decentralized_pg:
        advice = "False is needed: the data is assigned by Megatron-core's own groups."
        yield "dist.use_decentralized_pg", True, advice


def _overlaps_experts(config):
    return any(
        getattr(part, "overlap_moe_expert_parallel_comm", None)
        for part in (config.model, config.comm_overlap)
    )


def use_energon(config, path, tokenizer, task_encoder=PackedTaskEncoder, **encoder_options):
    """Make a recipe read ``path``, keeping its model, its adapters and its optimizer.

    Micro-batches become one row and losses are averaged per token. CUDA graphs and the overlap of
    expert-parallel communication, which packed rows do not support, are switched off.

    Args:
        config: a recipe for pretraining, SFT or PEFT.
        path: of the metadataset.
        tokenizer: of :func:`energon_ext.load_tokenizer`.
        task_encoder: called with a tokenizer, the row length, the ``alignment`` for context
            parallelism and the options: a class such as :class:`~energon_ext.SFTTaskEncoder` for
            chats or :class:`~energon_ext.PreferenceTaskEncoder` for pairs, or a function.
        **encoder_options: such as ``packing``, ``balance="attention"``, with the costs of this
            model, or ``over_long``.
    """
    config.train.micro_batch_size = 1
    config.validation.eval_micro_batch_size = 1
    config.dataset = EnergonExtProvider(
        path=path,
        tokenizer_name=tokenizer,
        seq_length=config.model.seq_length,
        rows_per_step=config.train.global_batch_size,
        timeout_minutes=config.dist.distributed_timeout_minutes,
    )
    config.dataset._recipe = config
    config.dataset._task_encoder = task_encoder
    config.dataset._encoder_options = encoder_options
    # Sum gradients over ranks and divide once by the step's tokens; recipes average by default.
    config.model.calculate_per_token_loss = True
    config.ddp.average_in_collective = False
    config.model.cuda_graph_impl = "none"
    for part in (config.model, config.comm_overlap):
        if getattr(part, "overlap_moe_expert_parallel_comm", None):
            part.overlap_moe_expert_parallel_comm = part.delay_wgrad_compute = False


def make_bridge_step(**options):
    """Return a step that runs one micro-batch, as Bridge's schedules call it.

    Args:
        **options: of :func:`energon_ext.megatron.forward_step`, for pairs ``position_losses`` and
            ``denominator="pairs"``.
    """

    def step(state, data_iterator, model, return_schedule_plan=False):
        return forward_step(data_iterator, model, **options)

    return step


bridge_forward_step = make_bridge_step()
