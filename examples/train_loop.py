# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The training loop of the examples: steps, checkpoints of model and data together, and resuming.

The token_weights of a batch encode its task, so the loop is the same for all tasks. A source is an
endless iterator over PackedBatch on tensor-parallel rank 0, and None on other ranks.

A checkpoint contains the model and the optimizer, as Megatron's distributed checkpoint, and the
data state. A planned run saves one cursor, and can resume with other model parallelism, ranks,
workers and micro-batches. Reinforcement learning saves the state of every data-parallel rank, and
any number of ranks can resume with all of them. A streamed run saves the state of every rank, too,
and must resume with the same total number of workers.
"""

import contextlib
import copy
import signal
import sys
import time
from functools import partial

import torch.distributed as dist
from checkpoints import Checkpoints
from megatron.core import parallel_state
from megatron_gpt import build_optimizer, learning_rate, load_model, save_model, train_step
from run_log import ProgressLog, summarize_step
from tqdm import tqdm

from energon_ext import ConfigError
from energon_ext.cli.shown_rows import describe_answers
from energon_ext.errors import DataExhaustedError
from energon_ext.megatron import DocumentLossLog
from energon_ext.metrics.file import describe_blend, epochs_after
from energon_ext.plan.cursor import digest_of_state
from energon_ext.plan.lookup import find_blend
from energon_ext.state.consumption import Consumption
from energon_ext.state.match import check_fingerprint
from energon_ext.state.together import on_all_ranks

#: Arguments that a resumed run may change; the data state checks those that the data depends on.
FREE_ARGUMENTS = {"metadataset", "run_dir", "resume", "stop_after", "save_interval"}
FREE_ARGUMENTS |= {"tensorboard", "wandb_project", "eval_interval", "eval_iters", "num_workers"}
FREE_ARGUMENTS |= {"document_losses"}
FREE_ARGUMENTS |= {"train_iters", "log_interval", "balance", "micro_batch_rows", "micro_batches"}
FREE_ARGUMENTS |= {"tensor_model_parallel_size", "pipeline_model_parallel_size"}
FREE_ARGUMENTS |= {"seq_length", "global_batch_rows"}


def train(args, folder, model, source, evaluate=lambda step: {}, may_begin=False, tokenizer=None):
    """Train to the last step or the end of the data; return True if SIGTERM stopped it earlier.

    Args:
        args: arguments of the script; with --resume, continue from the last checkpoint.
        folder: folder for the log and the checkpoints.
        source: source of this rank.
        evaluate: step -> further values to log.
        may_begin: with --resume, start if there is no checkpoint yet.
        tokenizer: decodes answers for the log, with every evaluation; None not to log any.
    """
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(args, model, source)
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(stop_signals())
        if hasattr(source, "close"):
            stack.callback(source.close)
        checkpoints = Checkpoints(folder / "checkpoints")
        step = saved_step = run.restore(checkpoints, may_begin)
        log = stack.enter_context(run.start_log(folder, step))
        if getattr(args, "document_losses", False):
            run.documents = stack.enter_context(DocumentLossLog(folder, step))
        last_step = min(args.train_iters, args.stop_after or args.train_iters)
        log.show("sampling the first answers" if run.is_rl else "reading the first rows")
        log.write_evaluation(step, evaluate(step))
        asked_to_stop = set()
        while (
            step < last_step
            and not asked_to_stop
            and (fields := run.train_step(step + 1)) is not None
        ):
            step += 1
            log.write_step(step, fields)
            if log.enabled:
                log.write_boards(step, run.counts())
            if found := evaluate(step):
                log.write_evaluation(step, found)
                if tokenizer is not None and log.enabled:
                    log.write_answers(step, describe_answers(run.last_batches, tokenizer))
            if step % args.save_interval == 0:
                saved_step = run.save(checkpoints, step, log)
            asked_to_stop = set().union(*on_all_ranks(lambda: [*signals]))
        if step != saved_step:
            saved_step = run.save(checkpoints, step, log)
        reason = "finished" if step >= args.train_iters else "stopped"
        saved = checkpoints.folder_of(step) if saved_step else None
        log.write_end(step, "exhausted" if run.data_ended else reason, saved)
        was_stopped = bool(asked_to_stop)
        if signal.SIGINT in asked_to_stop:
            raise KeyboardInterrupt(f"saved step {step} in {folder}; continue with --resume")
    return was_stopped


@contextlib.contextmanager
def stop_signals():
    """Make Ctrl-C and SIGTERM save and stop after the current step; a second Ctrl-C stops at once.

    torchrun forwards signals that its processes also receive, so a signal within a second of the
    first is its copy.
    """
    received = {}  # signal -> time of its first arrival

    def receive(number, frame):
        now = time.monotonic()
        if number == signal.SIGINT and now - received.setdefault(number, now) > 1:
            raise KeyboardInterrupt
        received.setdefault(number, now)

    earlier = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


class Run:
    """One process of a run: model, optimizer, source, and consumption so far."""

    def __init__(self, args, model, source):
        self.args, self.model, self.source = args, model, source
        self.optimizer = build_optimizer(args, model)
        self.consumed = Consumption()
        self.data_ended = False
        self.documents = None  # the log of their losses
        self.is_rl = hasattr(source, "prompts")
        if source is not None:
            self.blend = find_blend(source.prompts if self.is_rl else source.loader)

    def train_step(self, step):
        """Train a step; return its fields for the log, or None if the data ended before it."""
        start = time.perf_counter()
        batches = self.last_batches = self.draw()
        if not batches:
            return None
        data_seconds = time.perf_counter() - start
        losses = train_step(self.args, step, self.model, self.optimizer, batches, self.documents)
        seconds = time.perf_counter() - start
        if self.source is None:
            return losses
        summary = summarize_step(batches, self.args.seq_length)
        for key, tokens in summary["tokens"].items():
            self.consumed.add(key, rows=summary["documents"].get(key, 0), tokens=tokens)
        rollout = self.source.metrics_of_all_ranks() if self.is_rl else {}
        return {
            **losses,
            **summary,
            "planned_share": {} if self.is_rl else self.blend.shares_at_step(step - 1),
            "learning_rate": learning_rate(self.args, step),
            "step_seconds": seconds,
            "data_seconds": data_seconds,
            "waiting_share": data_seconds / seconds,
            "tokens_per_second": sum(summary["tokens"].values()) / seconds,
            **{f"rollout/{name}": value for name, value in rollout.items()},
        }

    def draw(self):
        """Return the step's micro-batches, fewer at the end of the data; Nones without a source."""
        batches = []

        def draw_here():
            try:
                while self.source is not None and len(batches) < self.args.micro_batches:
                    batches.append(next(self.source))
            except DataExhaustedError as error:
                if dist.get_rank() == 0:
                    tqdm.write(str(error), file=sys.stderr)
            return len(batches)

        count = max(on_all_ranks(draw_here))
        self.data_ended = count < self.args.micro_batches
        return batches or [None] * count

    def start_log(self, folder, step):
        """Open the log on the one rank that has a source and, on the last stage, the loss."""
        args = self.args
        if self.source is not None:
            self.begun_with = describe_blend(self.blend), copy.deepcopy(self.consumed)
        enabled = (
            self.source is not None
            and parallel_state.is_pipeline_last_stage()
            and parallel_state.get_data_parallel_rank() == 0
            and parallel_state.get_tensor_model_parallel_rank() == 0  # in RL, others have a source
        )
        boards = {"tensorboard": args.tensorboard, "wandb_project": args.wandb_project}
        log = ProgressLog(
            folder, step, args.train_iters, enabled=enabled, interval=args.log_interval, **boards
        )
        if enabled:
            log.write_start(
                step,
                self.blend,
                seq_len=args.seq_length,
                rows_per_step=args.global_batch_rows,
                config={**fixed_arguments(args), "world_size": dist.get_world_size()},
            )
        return log

    def save(self, checkpoints, step, log):
        """Save the model and the data state; return the step."""
        if self.documents is not None:
            on_all_ranks(self.documents.flush)
        run, cursor, states = {}, None, []
        if self.source is not None:
            consumed = self.consumed.to_json(list(self.blend.documents))
            run = {"arguments": fixed_arguments(self.args), "consumed": consumed}
            run["resumed"] = [change.to_json() for change in getattr(self.source, "changes", ())]
            if self.blend.is_planned and not self.is_rl:
                cursor = self.source.state_dict()
            elif dist.get_rank() == parallel_state.get_model_parallel_src_rank():
                # All stages and tensor-parallel ranks have the same state.
                rank = parallel_state.get_data_parallel_rank()
                save = self.source.save_state
                states = [(rank, save if self.is_rl else lambda folder: save())]
            log.write("consumption", step, **consumed, **self.counts())
        write_model = partial(save_model, self.model, self.optimizer)
        path = checkpoints.save(
            step, write_model=write_model, run=run, cursor=cursor, states=states
        )
        digest = {} if cursor is None else {"state_digest": digest_of_state(cursor)}
        log.write("save", step, path=str(path), **digest)
        return step

    def counts(self):
        """Return the consumption so far by source, and the epochs left of sources with a limit."""
        epochs = self.epochs()
        return {
            "tokens_in_all": self.consumed.tokens,
            "shares": self.consumed.shares(),
            "epochs": epochs,
            "epochs_left": {
                key: max(0.0, source.max_epochs - epochs.get(key, 0.0))
                for key, source in self.blend.sources.items()
                if source.max_epochs is not None
            },
        }

    def epochs(self):
        """Return the epochs read so far by source; a resume may change the size of an epoch."""
        about, before = self.begun_with
        found = {}
        for key in self.blend.documents:
            earlier = before.tokens[key], before.rows[key]
            tokens, rows = self.consumed.tokens[key], self.consumed.rows[key]
            found[key] = epochs_after(about, key, tokens - earlier[0], rows - earlier[1], earlier)
        return found

    def restore(self, checkpoints, may_begin):
        """Restore the last checkpoint; return its step, or 0 if there is none."""
        step = checkpoints.newest()
        if step is None:
            if self.args.resume and not may_begin:
                raise ConfigError(
                    f"{checkpoints.folder} has no checkpoint; start the run without --resume."
                )
            return 0
        if not self.args.resume:
            raise ConfigError(
                f"{checkpoints.folder} has checkpoints; use --resume or another --run-dir."
            )
        run = checkpoints.run_of(step)
        check_fingerprint(run["arguments"], fixed_arguments(self.args))
        folder = checkpoints.folder_of(step)
        on_all_ranks(lambda: self.restore_source(checkpoints.data_of(step), folder))
        load_model(self.model, self.optimizer, folder)
        changes = getattr(self.source, "changes", ())
        self.consumed = Consumption.from_json(run["consumed"], changes)
        return step

    def restore_source(self, states, folder):
        if self.source is None:
            return
        ranks = parallel_state.get_data_parallel_world_size()
        if None in states:
            self.source.load_state_dict(states[None])
        elif self.is_rl:
            self.source.restore_state([*states.values()], folder)
        elif sorted(states) == [*range(ranks)]:
            self.source.restore_state(states[parallel_state.get_data_parallel_rank()])
        else:
            raise ConfigError(
                f"Resume with {len(states)} data-parallel ranks, as saved; {ranks} found."
            )


def fixed_arguments(args):
    return {name: value for name, value in vars(args).items() if name not in FREE_ARGUMENTS}
