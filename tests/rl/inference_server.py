# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A local HTTP server that speaks as vLLM and SGLang do, with faults on request."""

import base64
import functools
import gzip
import io
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import torch


@functools.cache
def make_bomb():
    """Return 256 MiB in a quarter of a megabyte."""
    return gzip.compress(bytes(2**28), 1)


class Server(ThreadingHTTPServer):
    """Answer n of a group has n tokens: the last token of the prompt + 1, + 2, ...

    With a ``policy``, the logits of one token, answers are drawn from it, one token each.
    """

    daemon_threads = True

    def __init__(self, port=0):
        super().__init__(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.requests = []
        self.says = "out of luck"
        self.policy = None
        self.experts_of = None  # function: token -> its experts [layers, k], which are sent then
        self.generation_config = {}  # the model's sampling parameters, for those not in a request
        self.raw = None  # the bytes of every answer
        self.misfortunes = []  # faults of the next requests, in order
        self.refuses = None  # status and content of the answer to every request
        self.forbidden_path = None
        self.release = threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def handle_error(self, request, client_address):
        pass  # a client that disconnected

    def stop(self):
        self.release.set()
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.headers = dict(self.headers)
        server.requests.append((self.path, self.headers.get("Authorization"), body))
        happens = server.misfortunes.pop(0) if server.misfortunes else None
        if happens == "hang":
            server.release.wait(30)
        elif happens == "bomb":
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Encoding", "gzip")
            self.end_headers()
            self.wfile.write(make_bomb())
        elif happens == "drip":
            self.send_response(200)
            self.end_headers()
            while not server.release.wait(0.05):
                self.wfile.write(b" ")
        elif server.raw is not None:
            self._send(200, server.raw)
        elif happens == "drop":
            self.connection.shutdown(socket.SHUT_RDWR)
        elif isinstance(happens, tuple):
            self._send(happens[0], {"error": server.says}, headers=happens[1])
        elif happens is not None:
            self._send(200, happens)
        elif self.path == server.forbidden_path:
            self._send(403, {"error": server.says})
        elif server.refuses is not None:
            self._send(*server.refuses)
        elif self.path == "/update_weights_from_disk":
            server.policy = torch.load(body["model_path"])
            self._send(200, {"success": True})
        elif server.policy is not None:
            self._send(200, _POLICIES[self.path](server, body))
        elif self.path in _ANSWERS:
            content = _ANSWERS[self.path](body)
            if server.experts_of is not None:
                _EXPERTS[self.path](server.experts_of, body, content)
            self._send(200, content)
        else:
            self._send(404, {"detail": "Not Found"})

    def _send(self, status, content, headers=()):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


def vllm_answers(body):
    last = body["prompt"][-1]
    choices = [
        {
            "index": n,
            "text": "?",
            "finish_reason": "stop" if n < 2 else "length",
            "token_ids": [last + 1 + k for k in range(n + 1)],
            "logprobs": {"token_logprobs": [-0.5 * (k + 1) for k in range(n + 1)]},
        }
        for n in range(body["n"])
    ]
    return {"choices": choices[::-1]}


def sglang_answers(body):
    """Return one answer per prompt, or ``n`` to a single prompt."""
    prompts = body["input_ids"]
    if not isinstance(prompts[0], list):
        prompts = [prompts] * body["sampling_params"]["n"]
    return [
        {
            "text": "?",
            "meta_info": {
                "finish_reason": {"type": "stop" if n < 2 else "length"},
                "output_token_logprobs": [
                    [-0.5 * (k + 1), prompt[-1] + 1 + k, None] for k in range(n + 1)
                ],
            },
        }
        for n, prompt in enumerate(prompts)
    ]


def add_vllm_experts(experts_of, body, content):
    """Add the experts of all tokens but the last one to each choice: a NumPy file in base64."""
    for choice in content["choices"]:
        tokens = [*body["prompt"], *choice["token_ids"]][:-1]
        file = io.BytesIO()
        np.save(file, np.array([experts_of(token) for token in tokens], np.uint8))
        choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()


def add_sglang_experts(experts_of, body, content):
    """Add them to each answer if the request asks for them: the bytes of int32 in base64."""
    for prompt, answer in zip(body["input_ids"], content):
        about = answer["meta_info"]
        tokens = [*prompt, *(token for _, token, _ in about["output_token_logprobs"])][:-1]
        experts = np.array([experts_of(token) for token in tokens], np.int32)
        if body.get("return_routed_experts"):
            about["routed_experts"] = base64.b64encode(experts.tobytes()).decode()


_EXPERTS = {"/v1/completions": add_vllm_experts, "/generate": add_sglang_experts}
_ANSWERS = {"/v1/completions": vllm_answers, "/generate": sglang_answers}


def draw(logits, sampling, seed):
    """Draw a token; return it and its log-probability before any sampling parameter, as vLLM."""
    scaled = logits / sampling.get("temperature", 1.0)
    if (top_k := sampling.get("top_k", -1)) > 0:
        scaled = scaled.masked_fill(scaled < scaled.topk(top_k).values[-1], -torch.inf)
    chances = torch.softmax(scaled, -1)
    chances = chances * (chances >= sampling.get("min_p", 0.0) * chances.max())
    token = int(torch.multinomial(chances, 1, generator=torch.Generator().manual_seed(seed)))
    return token, float(torch.log_softmax(logits, -1)[token])


def vllm_policy(server, body):
    """Fill in the model's generation_config; answer n has the seed of the request + n."""
    sampling = {**server.generation_config, **body}
    drawn = [draw(server.policy, sampling, body["seed"] + n) for n in range(body["n"])]
    choices = [
        {
            "index": n,
            "token_ids": [token],
            "finish_reason": "stop",
            "logprobs": {"token_logprobs": [log_prob]},
        }
        for n, (token, log_prob) in enumerate(drawn)
    ]
    return {"choices": choices}


def sglang_policy(server, body):
    """Answers to one prompt share its seed; a batch of prompts has its own parameters each."""
    prompts, parameters = body["input_ids"], body["sampling_params"]
    if not isinstance(prompts[0], list):
        parameters = [parameters] * parameters.get("n", 1)
    drawn = [draw(server.policy, each, each["sampling_seed"]) for each in parameters]
    return [
        {
            "meta_info": {
                "finish_reason": {"type": "stop"},
                "output_token_logprobs": [[log_prob, token, None]],
            }
        }
        for token, log_prob in drawn
    ]


_POLICIES = {"/v1/completions": vllm_policy, "/generate": sglang_policy}
