# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""One training step's data, forward pass and loss, as Megatron's schedules call them."""

import contextlib
import sys
from typing import Any, Callable, Iterator, TypeVar

import megatron.core
import torch
from megatron.core import parallel_state
from megatron.core.utils import StragglerDetector

from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.batch.transport import build
from energon_ext.errors import ConfigError
from energon_ext.losses.distillation import Distillation
from energon_ext.megatron.broadcast import broadcast
from energon_ext.megatron.chunked_output import loss_in_chunks
from energon_ext.megatron.context_groups import check_follows, context_group
from energon_ext.megatron.context_parallel import (
    document_ends,
    slice_class,
    slice_for_context_parallel,
)
from energon_ext.megatron.distillation import check_student, distillation_of, labels_for
from energon_ext.megatron.loss import LossFunc, PositionLosses, check_loss_inputs, loss_func_of
from energon_ext.megatron.moe import check_router_losses, padding_mask_for, unwrap
from energon_ext.megatron.mtp import loss_mask_for
from energon_ext.megatron.packed_params import build_packed_seq_params
from energon_ext.megatron.routing_replay import check_experts, check_replayable, replay_experts
from energon_ext.megatron.virtual_stages import take_for_stage
from energon_ext.state.together import collective_device

B = TypeVar("B", bound=PackedBatch)

#: Megatron-core has one for the process; it measures with --log-straggler only. Made on import, as
#: by Megatron-LM's scripts, because this switches it off.
_straggler_detector = StragglerDetector()

_NOTHING = contextlib.nullcontext()

_CORE_VERSION = tuple(map(int, megatron.core.__version__.split(".")[:2]))


def get_batch(
    data_iterator: Iterator[B] | None,
    check: Callable[[B], None] | None = None,
    *,
    batch_class: type[B] = PackedBatch,  # type: ignore[assignment]
    vp_stage: int | None = None,
) -> B:
    """Return the next micro-batch on this rank's device, the same on all ranks of a replica.

    Tensor-parallel rank 0 of every pipeline stage draws it; the loader is deterministic, so all
    stages draw the same batch. It travels with all fields of its class. With context parallelism
    each rank gets its :func:`~energon_ext.megatron.slice_for_context_parallel`, in a layout among
    the ranks that share the micro-batch. Nothing here waits for the device.

    Args:
        data_iterator: the loader on tensor-parallel rank 0; ignored on other ranks.
        check: called with the batch on the rank that drew it; may raise to reject the batch.
        batch_class: class of the batches, if they are of a subclass of ``PackedBatch``.
        vp_stage: virtual pipeline stage of the model; the stages of a process then share one copy
            of each batch, and each must call this for every micro-batch.

    Raises:
        ConfigError: tensor-parallel rank 0 has no iterator; the batch is not of ``batch_class``, or
            has a field that cannot be pickled;
            :func:`~energon_ext.megatron.create_broadcast_groups` was not called; the batch cannot
            be cut for context parallelism; a layout's
            :func:`~energon_ext.megatron.create_context_groups` was not called.
        SampleError: tensor-parallel rank 0 failed to draw; it raises the original error.
        StopIteration: the iterator has ended.
    """
    device = collective_device()
    is_shared = parallel_state.get_tensor_model_parallel_world_size() > 1
    drawn: list[B] = []  # on the rank that draws

    def draw() -> B:
        if data_iterator is None:
            raise ConfigError(
                "Tensor-parallel rank 0 has no data iterator, but loads the data of its pipeline "
                "stage and data-parallel rank. Set is_distributed = True on the dataloaders "
                "provider."
            )
        batch = next(data_iterator)
        _check_class(batch, batch_class, is_shared)
        drawn.append(batch)
        if check is not None:
            check(batch)
        return _own_part(batch)

    def get() -> tuple[B | None, B]:
        if not is_shared:
            batch = draw().to(device)
            return drawn[0], batch
        name, values = broadcast(draw, device)
        expected = {each.__name__: each for each in (batch_class, slice_class(batch_class))}
        if name not in expected:
            raise ConfigError(
                f"get_batch: a batch of class {name} arrived where {batch_class.__name__} was "
                f"expected; name the same batch_class on all ranks."
            )
        received = build(expected[name], values).to(device)
        return (drawn[0] if drawn else None), received

    return take_for_stage(vp_stage, data_iterator, get)


def _own_part(batch: B) -> B:
    """Return this rank's part of a batch, all of it without context parallelism."""
    size = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank()
    if batch.context_size is not None:
        if size > 1:
            raise ConfigError(
                f"get_batch: a batch of a layout was drawn with context_parallel_size={size}; set "
                f"it to 1, since layouts choose a size for each document."
            )
        if (group := context_group(batch)) is not None:
            size, rank = group.size(), group.rank()
    if size == 1:
        return batch
    return slice_for_context_parallel(batch, size, rank)  # type: ignore[return-value]


def _check_class(batch: Any, batch_class: type[PackedBatch], is_exact: bool) -> None:
    """Raise ConfigError if the batch is not of the class that the caller has named."""
    found = type(batch)
    if found is batch_class or (isinstance(batch, batch_class) and not is_exact):
        return
    if isinstance(batch, PackedBatch):
        raise ConfigError(
            f"get_batch: a batch of class {found.__name__} was drawn, but {batch_class.__name__} "
            f"is expected; ranks that receive a batch must know its class: pass "
            f"batch_class={found.__name__}."
        )
    raise ConfigError(
        f"get_batch: a {found.__name__} was drawn; let the task encoder's `batch` return a "
        f"PackedBatch, or draw other batches with a step of your own."
    )


def forward_step(
    data_iterator: Iterator[PackedBatch] | None,
    model: torch.nn.Module,
    *,
    denominator: str = "weights",
    weight_scale: int = 1,
    ratio_limit: float | None = None,
    position_losses: PositionLosses | None = None,
    loss_chunk: int | None = None,
    distillation: Distillation | None = None,
    batch_class: type[PackedBatch] = PackedBatch,
    experts: str | None = None,
) -> tuple[torch.Tensor, LossFunc]:
    """Run one micro-batch through the model, as Megatron's schedules call it.

    The batch is one packed sequence: give the schedule ``micro_batch_size=1`` and
    ``seq_length=rows * seq_len``. To change the defaults pass, for example,
    ``functools.partial(forward_step, denominator="tokens")``.

    Args:
        data_iterator: the loader on tensor-parallel rank 0; ignored on other ranks.
        model: a ``GPTModel`` or a hybrid model, wrapped or not.
        denominator, weight_scale, ratio_limit, position_losses: see
            :func:`energon_ext.megatron.make_loss_func`.
        loss_chunk: positions of which the output layer has logits at any time, such as 1024; None
            for all of them. The backward pass then computes the logits again. With sequence
            parallelism, positions of each tensor-parallel rank.
        distillation: mixes the loss of each label with the divergence from a teacher whose
            words are columns of the batch.
        batch_class: see :func:`get_batch`.
        experts: the column with the experts that routers choose, see
            :func:`energon_ext.megatron.replay_experts`.

    Returns:
        The model's output (on the last stage the loss at each position, [1, N], and with
        ``distillation`` its divergence, [2, N]) and the loss function.

    Raises:
        ConfigError: a ``weight_scale`` that the routers were not scaled by (see
            :func:`energon_ext.megatron.scale_router_losses`), or such losses with ``"pairs"`` or
            ``"documents"``; multi-token prediction with a ``weight_scale``, a ``loss_chunk``,
            ``"documents"`` or context parallelism;
            a ``loss_chunk`` with ``defer_embedding_wgrad_compute``; context parallelism with a
            ``cp_partition_mode`` other than ``"zigzag"``; state-space layers in megatron-core 0.15;
            ``experts`` that are not experts of the model, or routers that take no choice;
            ``distillation`` with ``position_losses``, multi-token prediction or a batch without the
            columns.
    """
    check_router_losses(model, weight_scale, denominator)
    _check_state_spaces(model)
    _check_context_parallel(model)
    if experts is not None:
        check_replayable(model)
    check_student(model, distillation, position_losses)
    options = (denominator, weight_scale, ratio_limit, position_losses)

    def check(drawn: PackedBatch) -> None:
        check_loss_inputs(drawn, *options)
        words: int | None = getattr(unwrap(model), "vocab_size", None)
        if words is not None:
            _check_words(drawn, words)
        if experts is not None:
            check_experts(model, drawn, experts)
        if (chosen := distillation_of(drawn, distillation)) is not None:
            chosen.check(drawn, words)

    with _measure_batch(model):
        batch = get_batch(
            data_iterator,
            check,
            batch_class=batch_class,
            vp_stage=getattr(unwrap(model), "vp_stage", None),
        )
    _check_layout(model, batch)
    _count_work(batch, model)
    distillation = distillation_of(batch, distillation)
    replay = replay_experts(model, batch, experts) if experts is not None else _NOTHING
    with (
        _straggler_detector,
        labels_for(model, batch, distillation) as labels,
        loss_in_chunks(model, loss_chunk),
        replay,
    ):
        output = model(
            batch.tokens[None],
            batch.position_ids[None],
            None,  # no attention mask: the segments replace it
            labels=labels[None],
            packed_seq_params=build_packed_seq_params(batch, _segments_of_graphs(model)),
            **padding_mask_for(model, batch),
            **loss_mask_for(model, batch, weight_scale, denominator),
        )
    return output, loss_func_of(batch, *options, distillation)


@contextlib.contextmanager
def _measure_batch(model: torch.nn.Module) -> Iterator[None]:
    """Measure how long a batch takes, if the loop does: as Megatron-LM's own forward step."""
    timers = getattr(unwrap(model).config, "timers", None)
    if timers is not None:
        timers("batch-generator", log_level=2).start()
    with _straggler_detector(bdata=True):
        yield
    if timers is not None:
        timers("batch-generator").stop()


def _check_state_spaces(model: torch.nn.Module) -> None:
    if _CORE_VERSION >= (0, 16):
        return
    # Compare names, as the class cannot be imported without triton.
    if any(type(module).__name__ == "MambaMixer" for module in model.modules()):
        raise ConfigError(
            "The model has state-space layers (Mamba), which mix the documents of a packed row in "
            "this version of megatron-core; use megatron-core 0.16 or later."
        )


def _check_words(batch: PackedBatch, words: int) -> None:
    """Raise ConfigError for a token or a trained label that the model does not have.

    Megatron's embedding on tensor-parallel ranks and its cross-entropy would take 0 for it.
    """
    # NumPy, as torch would wake all its threads in every micro-batch.
    tokens, labels, weights = (
        each.cpu().numpy() for each in (batch.tokens, batch.labels, batch.token_weights)
    )
    trained = labels[weights != 0]
    for name, values in (("token", tokens), ("trained label", trained)):
        if (largest := int(values.max(initial=0))) >= words:
            raise ConfigError(
                f"forward_step: the {name} {largest} found, but the model has {words} words; build "
                f"it with all ids of the tokenizer."
            )
    if (lowest := int(trained.min(initial=0))) < 0:
        raise ConfigError(f"forward_step: the trained label {lowest} found; give it the weight 0.")


def _check_layout(model: torch.nn.Module, batch: PackedBatch) -> None:
    """Raise ConfigError for a micro-batch of a layout whose model does not expect one."""
    if batch.context_size is None:
        return
    check_follows(model)
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    if stages > 1 and not unwrap(model).config.variable_seq_lengths:
        raise ConfigError(
            "TransformerConfig.variable_seq_lengths=False: the micro-batches of a layout differ in "
            "length, which pipeline stages must tell each other; set it to True."
        )


def _check_context_parallel(model: torch.nn.Module) -> None:
    mode = getattr(unwrap(model).config, "cp_partition_mode", "zigzag")
    if mode != "zigzag" and parallel_state.get_context_parallel_world_size() > 1:
        raise ConfigError(
            f"TransformerConfig.cp_partition_mode={mode!r}: context parallelism gives each rank "
            f"two chunks of a segment, as 'zigzag' does; set that."
        )


def _segments_of_graphs(model: torch.nn.Module) -> int | None:
    """Return the segments of each row if a Megatron-LM run replays graphs of whole layers."""
    training = sys.modules.get("megatron.training")
    if training is None or getattr(unwrap(model).config, "cuda_graph_impl", None) != "local":
        return None
    documents: int = training.get_args().energon_packing_max_docs_per_bin
    return documents + 1  # the last one is padding


def _count_work(batch: PackedBatch, model: torch.nn.Module) -> None:
    """Report the document lengths to Megatron-LM (with megatron-core 0.18 and later).

    Otherwise its FLOPs and throughput assume attention over whole rows. It counts each report, so
    only the first virtual stage of a rank reports, and only in training.
    """
    training = sys.modules.get("megatron.training.training")
    update = getattr(training, "update_seqlen_stats_from_cu_seqlens", None)
    if update and torch.is_grad_enabled() and not getattr(unwrap(model), "vp_stage", None):
        update(document_ends(batch))
