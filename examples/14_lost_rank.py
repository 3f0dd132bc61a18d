# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Train a GPT on replicas that come and go, without a restart of the others (torchft).

Each replica is a Megatron world of its own, here of one process; torchft adds up the gradients over
the replicas that are alive. Start four of them, kill one with `kill -9`, and start it again:

    pip install torchft
    torchft_lighthouse --min_replicas 1 --join_timeout_ms 5000 &
    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    for replica in 0 1 2 3; do
        python examples/14_lost_rank.py mix.yaml --run-dir runs/a --replica $replica &
    done

Every step trains the same rows, however many replicas there are. If one dies in a step, the others
do this step again with the rows of all; one that starts gets the model and the place in the data
from another one. Each process writes what it trained to the run folder, as rows-REPLICA-PID.jsonl.
"""

import json
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from initial_weights import initialize_weights
from megatron.core.models.gpt import GPTModel
from megatron.energon import WorkerConfig
from megatron_gpt import build_config, start_megatron
from options import add_arguments, add_data_arguments, count_or_none, new_parser
from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL
from train_data import build_tokenizer

from energon_ext import ExactDataLoader, PackedTaskEncoder, get_train_dataset
from energon_ext.batch.row_hashes import row_digests
from energon_ext.megatron import forward_step, gpt_layer_spec


def parse_args():
    parser = new_parser(
        __doc__.splitlines()[0],
        "python examples/14_lost_rank.py mix.yaml --run-dir runs/a --replica 0",
    )
    add_data_arguments(parser)
    add_arguments(parser)
    parser.add_argument("--replica", type=count_or_none, required=True, help="number of this one")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for others")
    parser.set_defaults(
        train_iters=100,
        global_batch_rows=12,
        micro_batch_rows=1,
        seq_length=128,
        seed=1234,
        num_layers=2,
        hidden_size=64,
        lr=1e-3,
    )
    return parser.parse_args()


class Replica:
    """The model, the optimizer and the data of one replica.

    Attributes:
        start: where the data is before the current step: a mark, or the state of another replica.
    """

    def __init__(self, args):
        tokenizer = build_tokenizer(args)
        config = build_config(args)
        words = tokenizer.padded_vocab_size(128)
        self.model = GPTModel(config, gpt_layer_spec(config), words, args.seq_length)
        initialize_weights(self.model, args.seed)
        self.model.to("cuda" if torch.cuda.is_available() else "cpu")
        self.parameters = [*self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=args.lr)
        # The rank and the number of ranks follow before each step.
        dataset = get_train_dataset(
            args.metadataset,
            worker_config=WorkerConfig(
                rank=0, world_size=1, num_workers=args.num_workers, seed_offset=args.seed
            ),
            batch_size=args.micro_batch_rows,
            rows_per_step=args.global_batch_rows,
            task_encoder=PackedTaskEncoder(tokenizer, args.seq_length),
        )
        self.loader = ExactDataLoader(dataset)
        self.batches = iter(self.loader)
        self.start = self.loader.mark()

    def state_dict(self):
        """Return what a replica that starts needs, as it was before the current step."""
        return {
            "parameters": [each.detach() for each in self.parameters],
            "optimizer": self.optimizer.state_dict(),
            "data": self.loader.state_dict(self.start),
        }

    @torch.no_grad()
    def load_state_dict(self, state):
        for own, other in zip(self.parameters, state["parameters"]):
            own.copy_(other)
        self.optimizer.load_state_dict(state["optimizer"])
        self.start = state["data"]

    def train_step(self, manager, write):
        """Try to take one step together with the others, of which some may be lost meanwhile."""
        manager.start_quorum()  # waits for those that are alive; may call load_state_dict
        rank, ranks = manager.participating_rank(), manager.num_participants()
        self.loader.continue_from(self.start, rank=rank, ranks=ranks)
        self.optimizer.zero_grad(set_to_none=False)
        loss, tokens, rows = 0.0, 0.0, []
        for batch in self.batches:
            rows += read_rows(batch, self.model.max_sequence_length)
            output, loss_of = forward_step(iter([batch]), self.model)
            batch_loss, batch_tokens, _ = loss_of(output)
            batch_loss.backward()
            loss, tokens = loss + batch_loss.detach(), tokens + batch_tokens
            if self.loader.ends_step:
                break
        flat = [each.grad.flatten() for each in self.parameters]
        sums = torch.cat([*flat, torch.stack([loss, tokens.to(loss)])])
        manager.allreduce(sums, reduce_op=dist.ReduceOp.SUM).wait()
        if not manager.should_commit():  # one was lost: the sums are wrong, so do the step again
            # First end the workers: their copies of the connections would keep these open, and
            # others would wait for this replica in their sums.
            self.loader.continue_from(self.start)
            return
        *grads, loss, tokens = sums.split([*map(torch.numel, flat), 1, 1])
        for each, grad in zip(self.parameters, grads):
            each.grad.copy_(grad.view_as(each) / tokens)
        self.optimizer.step()
        self.start = self.loader.mark()
        step = manager.current_step()
        write(step=step, rank=rank, ranks=ranks, loss=float(loss / tokens), rows=rows)


def read_rows(batch, seq_len):
    """Return a name for each row of a batch, without padding that completes a step."""
    is_trained = batch.token_weights.view(-1, seq_len).any(1).tolist()
    names = [digest.hex() for digest in row_digests(batch, seq_len)]
    return [name for name, trained in zip(names, is_trained) if trained]


def train(args):
    replica = Replica(args)
    timeout = timedelta(seconds=args.timeout)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    group = (ProcessGroupNCCL if torch.cuda.is_available() else ProcessGroupGloo)(timeout)
    manager = Manager(
        pg=group,
        load_state_dict=replica.load_state_dict,
        state_dict=replica.state_dict,
        min_replica_size=1,
        use_async_quorum=False,  # which rows a rank reads depends on who is there
        replica_id=f"replica_{args.replica}",
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        timeout=timeout,
        quorum_timeout=timeout,
    )
    args.run_dir.mkdir(parents=True, exist_ok=True)
    path = args.run_dir / f"rows-{args.replica}-{os.getpid()}.jsonl"
    with path.open("w", buffering=1) as file:

        def write(**fields):
            file.write(json.dumps(fields) + "\n")
            print("step {step}: rank {rank} of {ranks}, loss {loss:.4f}".format(**fields))

        while manager.current_step() < args.train_iters:
            replica.train_step(manager, write)
    replica.loader.close()
    manager.shutdown()


if __name__ == "__main__":
    args = parse_args()
    start_megatron(args)
    train(args)
