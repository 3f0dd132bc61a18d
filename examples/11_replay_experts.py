# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Route tokens in training to the experts that the sampler chose, on a CPU, in half a minute.

    python examples/11_replay_experts.py --run-dir runs/experts

A sampler does not compute exactly as training does, so its routers choose other experts for some
tokens. Here it rounds the weights to bfloat16. GRPO trains a small model with experts on its
answers. Before each step the script prints by how much the log-probabilities of the answers differ
between the sampler and the model, once if the model chooses its experts itself, and once if it
replays those of the sampler, as the step then does.
"""

import contextlib
from dataclasses import replace

# First, as it hides warnings of what is imported after it.
from megatron_gpt import build_model, build_optimizer, forward, run, train_step

# isort: split
import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron_sampler import MegatronSampler
from options import add_arguments, new_parser
from policy import write_data
from sorting import SAMPLING, TOKENIZER, sorting_records
from torch.nn.utils.rnn import pad_sequence

from energon_ext import PromptTaskEncoder, get_train_dataset
from energon_ext.megatron import data_parallel_worker_config
from energon_ext.rl import RLDataset, RoutedExperts

SEQ_LEN, ROWS, GROUPS = 66, 22, 16


class RoundingSampler(MegatronSampler):
    """Answers with rounded weights, and says which experts its routers chose."""

    def answer(self, prompts, seeds):
        with rounded(self.model):
            answers = super().answer(prompts, seeds)
            samples = [[*p, *answer.tokens] for p, answer in zip(prompts, answers)]
            experts = chosen_experts(self.model, samples)
        return [replace(a, columns={"experts": e}) for a, e in zip(answers, experts)]


@contextlib.contextmanager
def rounded(model):
    """Round the weights of a model to bfloat16 for a while."""
    own = {parameter: parameter.data for parameter in model.parameters()}
    for parameter, data in own.items():
        parameter.data = data.bfloat16().to(data.dtype)
    yield
    for parameter, data in own.items():
        parameter.data = data


@torch.no_grad()
def chosen_experts(model, samples):
    """Return the experts of the tokens of samples, int16 [tokens, layers, k] each."""
    tokens = pad_sequence([torch.tensor(sample) for sample in samples], batch_first=True)
    tokens = tokens.to(next(model.parameters()).device)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    model(tokens, torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens), None)
    RouterReplay.clear_global_router_replay_action()
    # Of each layer [positions * samples, k].
    recorded = torch.stack(RouterReplay.get_recorded_data(), 1).unflatten(0, (-1, len(samples)))
    found = recorded.transpose(0, 1).to("cpu", torch.int16)
    found[torch.arange(len(samples)), torch.tensor([*map(len, samples)]) - 1] = -1  # as servers do
    return [each[: len(sample)].numpy() for each, sample in zip(found, samples)]


def right_places(prompt, responses):
    """Return the share of right tokens."""
    answer = TOKENIZER.encode(prompt.metadata["answer"])[1:]
    return [sum(map(int.__eq__, each.tokens, answer)) / len(answer) for each in responses]


def gap(args, model, batch, experts):
    """Return the mean difference of log-probabilities on the trained tokens of a batch."""
    losses = []
    args.experts = experts
    forward(args, model, [batch], losses)
    is_trained = batch.token_weights != 0
    return (batch.log_probs + losses[0])[is_trained].abs().mean().item()


def train(args):
    prompts, _, _ = sorting_records(args.seed)
    write_data(args.run_dir, {"prompts": prompts})
    model = build_model(args, TOKENIZER.vocab_size)
    optimizer = build_optimizer(args, model)
    experts = RoutedExperts(layers=args.num_layers, top_k=2, experts=args.num_experts)
    source = RLDataset(
        get_train_dataset(
            args.run_dir / "prompts.yaml",
            worker_config=data_parallel_worker_config(num_workers=0, seed=args.seed),
            batch_size=GROUPS,
            task_encoder=PromptTaskEncoder(TOKENIZER),
        ),
        RoundingSampler(model, right_places, group_size=8, sampling=SAMPLING),
        seq_len=SEQ_LEN,
        rows=ROWS,
        groups_per_batch=GROUPS,
        max_staleness=0,  # no answers of older weights, so that the gap is that of the sampler
        columns={experts.name: experts.column},
        pad_id=TOKENIZER.pad_id,
        seed=args.seed,
    )
    print("step  reward  gap, own experts  gap, the sampler's experts")
    for step in range(1, args.train_iters + 1):
        batch = next(source)
        gaps = [gap(args, model, batch, name) for name in (None, "experts")]
        reward = source.metrics["reward/mean"]
        print(f"{step:4}  {reward:6.3f}  {gaps[0]:16.6f}  {gaps[1]:26.6f}", flush=True)
        train_step(args, step, model, optimizer, [batch])


def parse_args():
    parser = new_parser(__doc__.splitlines()[0], "python examples/11_replay_experts.py --run-dir r")
    add_arguments(parser)
    sizes = {"num_layers": 4, "hidden_size": 64, "num_experts": 16, "seq_length": SEQ_LEN}
    steps = {"train_iters": 20, "lr": 2e-3, "lr_warmup_iters": 2, "micro_batch_rows": ROWS}
    parser.set_defaults(seed=1, experts=None, **sizes, **steps)
    return parser.parse_args()


if __name__ == "__main__":
    run(train, parse_args())
