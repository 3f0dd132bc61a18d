# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Gives an inference server the weights in training, by a folder that both can read.

    def sync_weights(step):  # of RLDataset
        partial = Path(f"/shared/policy/{step}.partial")
        export(model, partial)  # in Hugging Face's format, such as Megatron-Bridge's
        sync_vllm("http://localhost:8000", finish_export(partial))

With several ranks, all of them export, and after a barrier one of them calls the other functions.
"""

import json
import os
import shutil
import time
import urllib.error
import urllib.request
from pathlib import Path

#: Ending of a folder that is being written; ``serve_newest.sh`` does not serve it.
PARTIAL = ".partial"

#: Statuses of a proxy before a server that is not there, and of a server that starts.
_OUTAGE = (502, 503)


def finish_export(partial: Path) -> Path:
    """Rename ``NAME.partial``, which is complete, to ``NAME``, and return that.

    A folder of this name, which a run wrote that was resumed at an earlier step, is replaced.
    """
    if partial.suffix != PARTIAL:
        raise ValueError(f"{partial}: an export is written as NAME{PARTIAL}")
    if not partial.is_dir():
        raise FileNotFoundError(f"{partial}: no such export, or it was finished before")
    folder = partial.with_suffix("")
    old = folder.with_name(f"{folder.name}.old{PARTIAL}")
    now = time.time_ns()  # more exact than the clock of a file system
    os.utime(partial, ns=(now, now))  # the newest export is the one that was finished last
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    return folder


def sync_vllm(url: str, folder: Path, outage_seconds: float = 600.0) -> None:
    """Make a vLLM server load a folder; it must run with ``VLLM_SERVER_DEV_MODE=1``.

    Args:
        url: the server, without ``/v1``.
        folder: the weights, under a path that is valid on the server.
        outage_seconds: how long to wait for a server that is not there, as during a restart.

    Raises:
        RuntimeError: the server did not load the folder, or has kept results of the old weights.
        OSError: the server was not there for too long.
    """
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    _post(f"{url}/collective_rpc", reload, outage_seconds)
    # Otherwise keys and values of the old weights stay in use for prompts that are known.
    reset = _post(f"{url}/reset_prefix_cache", {}, outage_seconds)
    if not reset["success"]:
        raise RuntimeError(f"{url}: the prefix cache was not reset, as requests are running")


def sync_sglang(url: str, folder: Path, outage_seconds: float = 600.0) -> None:
    """Make an SGLang server load a folder; arguments and errors are those of :func:`sync_vllm`."""
    body = {"model_path": str(folder)}
    _post(f"{url}/update_weights_from_disk", body, outage_seconds)


def _post(url: str, body: dict, outage_seconds: float) -> dict:
    """Return the server's answer; wait while it is not there."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    deadline = time.monotonic() + outage_seconds
    while True:
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                text = answer.read().decode(errors="replace")
            break
        except urllib.error.HTTPError as error:
            if error.code not in _OUTAGE or time.monotonic() >= deadline:
                text = error.read(500).decode(errors="replace")
                raise RuntimeError(f"{url} answered status {error.code}: {text}") from None
        except OSError:  # no connection, or one that broke
            if time.monotonic() >= deadline:
                raise
        time.sleep(1)
    try:
        return json.loads(text)
    except ValueError:
        raise RuntimeError(f"{url} answered {text[:500]!r}, which is not JSON") from None
