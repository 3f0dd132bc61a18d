# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The share of time that a trainer waits for answers of a server, sampled ahead or not.

The server is local and needs ``STEPS_PER_ANSWER`` times as long for an answer as the trainer for a
step, however many it answers at a time. Both only sleep, so the shares depend little on the
machine.
"""

import json
import random
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from megatron.energon import WorkerConfig
from timing import markdown

from energon_ext import PromptTaskEncoder, get_train_dataset
from energon_ext.rl import OpenAISampler, RLDataset
from energon_ext.tokenizers.tokenizers import ByteTokenizer

STEP_SECONDS, STEPS_PER_ANSWER = 0.1, 20
GROUPS_PER_STEP, GROUP_SIZE = 4, 4
VERSIONS = 8  # of the weights that a run has at least


class Handler(BaseHTTPRequestHandler):
    """Answers each request with random tokens, as vLLM does."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(STEP_SECONDS * STEPS_PER_ANSWER)
        draw = random.Random(body["seed"])
        answers = [
            {
                "index": index,
                "token_ids": [draw.randrange(256) for _ in range(8)],
                "logprobs": {"token_logprobs": [-5.5] * 8},
                "finish_reason": "stop",
            }
            for index in range(body["n"])
        ]
        content = json.dumps({"choices": answers}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 1024


def run():
    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.jsonl"
        records = [{"prompt": f"{number}?"} for number in range(1000)]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        rows = [[ahead, *measure(url, path, ahead)] for ahead in (0, 1, 10, 20, 30)]
    server.shutdown()
    header = ("ahead", "waiting", "waiting after the first two versions", "mean age, steps")
    title = f"Waiting for answers that take {STEPS_PER_ANSWER} steps"
    return markdown(title, header, rows)


def measure(url, path, ahead):
    """Return the share of time that the trainer waits, in all and later, and the answers' age."""
    steps = VERSIONS * max(2, ahead)
    sampler = OpenAISampler(
        url,
        lambda prompt, responses: [float(n % 2) for n in range(len(responses))],
        group_size=GROUP_SIZE,
        max_new_tokens=8,
        max_concurrent=1024,
    )
    prompts = get_train_dataset(
        path,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=GROUPS_PER_STEP,
        task_encoder=PromptTaskEncoder(ByteTokenizer()),
    )
    sizes = {"seq_len": 64, "rows": 4, "groups_per_batch": GROUPS_PER_STEP}
    dataset = RLDataset(prompts, sampler, ahead=ahead, sync_weights=lambda step: None, **sizes)
    waited, ages = [], []
    for _ in range(steps):
        begin = time.perf_counter()
        next(dataset)
        waited.append(time.perf_counter() - begin)
        ages.append(dataset.metrics["staleness"])
        time.sleep(STEP_SECONDS)
    later = waited[2 * max(1, ahead) :]
    return (
        f"{share(waited):.0%}",
        f"{share(later):.0%}",
        f"{sum(ages) / len(ages):.1f}",
    )


def share(waited):
    return sum(waited) / (sum(waited) + STEP_SECONDS * len(waited))
