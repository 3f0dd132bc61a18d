# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Distil a small GPT into a smaller one, on a CPU, in about a minute.

    python examples/12_distillation.py --run-dir runs/distilled
    python examples/12_distillation.py --run-dir runs/plain --alpha 0     (learns from labels alone)
    torchrun --nproc-per-node 2 examples/12_distillation.py --run-dir runs/split \
        --tensor-model-parallel-size 2     (or pipeline; by default data parallel)

1. A teacher is trained on the English reference of Python.
2. It writes its most probable words for each byte of a few documents, once: columns of them.
3. A student reads these documents and learns from both, the next byte and the teacher's words.

The loss and the divergence from the teacher are measured on documents that neither has seen. A
stopped run continues exactly with --resume.
"""

import copy
import functools
import json

import torch.distributed as dist
from demo_corpora import reference_prose, write_tokens
from megatron.core.utils import unwrap_model
from megatron_gpt import build_model, run
from options import add_arguments, count, new_parser
from train_data import build_source, validation
from train_loop import train

from energon_ext import PackedTaskEncoder
from energon_ext.losses import Distillation
from energon_ext.megatron import forward_step, write_teacher_of
from energon_ext.tokenizers.tokenizers import ByteTokenizer

SEQ_LEN = 256
TOKENIZER = ByteTokenizer()


def parse_args():
    example = "python examples/12_distillation.py --run-dir runs/distilled"
    parser = new_parser(__doc__.splitlines()[0], example)
    add = parser.add_argument
    add_arguments(parser)
    add("--alpha", type=float, default=0.9, help="share of the divergence in the loss")
    add("--temperature", type=float, default=1.0, help="of teacher and student in the divergence")
    add("--words", type=count, default=16, help="words that the teacher writes for each label")
    add("--documents", type=count, default=8, help="documents that the student reads")
    add("--teacher-iters", type=count, default=120, help="steps of the teacher")
    add("--eval-interval", type=count, default=20, help="steps between two evaluations")
    parser.set_defaults(
        train_iters=120,
        save_interval=60,
        seed=1,
        num_layers=1,
        hidden_size=64,
        lr=8e-3,
        lr_warmup_iters=10,
        seq_length=SEQ_LEN,
        global_batch_rows=8,
        micro_batch_rows=None,
        num_workers=0,
        eval_iters=2,
    )
    return parser.parse_args()


def teach_and_distil(args):
    data = args.run_dir.resolve() / "data"
    if dist.get_rank() == 0:
        write_data(args, data)
    dist.barrier()
    teacher, was_stopped = train_teacher(args, data)
    if was_stopped:
        return
    for name in ("few", "held_out"):
        write_teacher_of(
            teacher,
            data / name / "train",
            data / "words" / name,
            k=args.words,
            made_by=f"{args.teacher_iters} steps, seed {args.seed}",
        )
    distil(args, data)


def write_data(args, data):
    """Write all documents, and the few that the student reads, as token files of bytes."""
    data.mkdir(parents=True, exist_ok=True)
    texts = reference_prose()
    held_out = texts[::10]
    known = [text for text in texts if text not in held_out]
    for name, chosen in {
        "all": known,
        "few": known[: args.documents],
        "held_out": held_out,
    }.items():
        if not (data / name / "prepared.json").exists():
            write_tokens(data / name, chosen, "--force", "--val", 0)
    write_mix(data / "teacher.yaml", "all")
    write_mix(data / "student.yaml", "few", with_words=True)


def write_mix(path, train, with_words=False):
    """Write the metadataset of a model that trains on one folder; the held-out one is val."""

    def split(name):
        words = dict.fromkeys(("teacher_ids", "teacher_log_probs"), f"words/{name}")
        columns = {"columns": words} if with_words else {}
        return {"blend": [{"path": f"{name}/train", "weight": 1, **columns}]}

    splits = {"train": split(train), "val": split("held_out")}
    content = {"__module__": "energon_ext", "__class__": "ScheduledMetadataset", "splits": splits}
    path.write_text(json.dumps(content))


def train_teacher(args, data):
    """Return the trained teacher, and whether a signal stopped it."""
    args = copy.copy(args)
    args.metadataset, args.stop_after = data / "teacher.yaml", None
    args.train_iters = args.teacher_iters
    args.num_layers, args.hidden_size, args.lr = 2, 128, 4e-3
    model = build_model(args, TOKENIZER.vocab_size)
    encoder = PackedTaskEncoder(TOKENIZER, SEQ_LEN, packing_buffer_docs=64)
    source = build_source(args, encoder)
    evaluate = validation(args, encoder, model)
    folder = args.run_dir / "teacher"
    return model, train(args, folder, model, source, evaluate=evaluate, may_begin=True)


def distil(args, data):
    args.metadataset = data / "student.yaml"
    model = build_model(args, TOKENIZER.vocab_size)
    encoder = PackedTaskEncoder(TOKENIZER, SEQ_LEN, packing_buffer_docs=64)
    source = build_source(args, encoder)
    validate = validation(args, encoder, model)

    def learn(distillation):
        step = functools.partial(forward_step, distillation=distillation)
        unwrap_model(model).forward_step = step

    def evaluate(step):
        learn(Distillation(alpha=0))  # the loss of labels alone; the divergence is reported
        found = validate(step)
        learn(Distillation(args.alpha, args.temperature))
        return found

    train(args, args.run_dir / "student", model, source, evaluate=evaluate, may_begin=True)


if __name__ == "__main__":
    run(teach_and_distil, parse_args())
