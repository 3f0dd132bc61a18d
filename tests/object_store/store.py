# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""moto's S3 server on loopback, behind a proxy that counts requests and injects faults."""

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import boto3

BUCKET = "corpus"


class Store:
    """The server and its proxy.

    Attributes:
        requests: method and path of each request.
        fault: ``down``, ``short``, ``denied`` or None, for ranges of objects.
        delay: seconds before a range is answered.
        objects: content and headers of each object by path. The proxy answers requests for them
            itself, since moto takes long for one; moto answers all others.
    """

    def __init__(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self._server = subprocess.Popen(command, **quiet)
        self.requests, self.fault, self.delay, self.objects = [], None, 0.0, {}
        self._proxy = ThreadingHTTPServer(
            ("127.0.0.1", 0), type("Proxy", (_Proxy,), {"store": self})
        )
        self._proxy.daemon_threads = True
        threading.Thread(target=self._proxy.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._proxy.server_port}"
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                break
            except OSError:
                time.sleep(0.1)
        login = {"aws_access_key_id": "key", "aws_secret_access_key": "secret"}
        direct = f"http://127.0.0.1:{self.port}"
        self.s3 = boto3.client("s3", endpoint_url=direct, region_name="us-east-1", **login)
        self.s3.create_bucket(Bucket=BUCKET)

    def put(self, folder, name):
        """Store every file below a folder under a name."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put_object(os.path.join(name, path.relative_to(folder)), path.read_bytes())

    def put_object(self, key, content):
        tag = self.s3.put_object(Bucket=BUCKET, Key=key, Body=content)["ETag"]
        headers = {"ETag": tag, "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        self.objects[f"/{BUCKET}/{key}"] = content, headers

    def asked(self, method, ending):
        """Return the paths of all requests with a method for objects with an ending."""
        return [path for way, path in self.requests if way == method and path.endswith(ending)]

    def close(self):
        self._proxy.shutdown()
        self._server.kill()
        self._server.wait()


class _Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Headers and content in one packet; otherwise the client's delayed ACK costs 40 ms.
    wbufsize = 2**16
    disable_nagle_algorithm = True

    def _pass_on(self):
        store = self.store
        is_range = bool(self.headers.get("Range"))
        store.requests.append((self.command, self.path))
        if is_range and store.fault == "down":
            self.close_connection = True
            return
        if is_range and store.fault == "denied":
            self._answer(403, {}, b"<Error><Code>AccessDenied</Code></Error>")
            return
        if is_range:
            time.sleep(store.delay)
            content, headers = store.objects[self.path]
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            place = {"Content-Range": f"bytes {first}-{last}/{len(content)}"}
            content = content[first : last + 1]
            if store.fault == "short":
                content = content[: len(content) // 2]
            self._answer(206, {**headers, **place}, content)
            return
        if self.command in ("GET", "HEAD") and self.path in store.objects:
            content, headers = store.objects[self.path]
            headers = {**headers, "Content-Length": str(len(content))}
            self._answer(200, headers, content if self.command == "GET" else b"")
            return
        server = http.client.HTTPConnection("127.0.0.1", store.port)
        server.request(self.command, self.path, headers=dict(self.headers))
        response = server.getresponse()
        self._answer(response.status, dict(response.getheaders()), response.read())
        server.close()

    do_GET = do_HEAD = _pass_on

    def _answer(self, status, headers, content):
        self.send_response(status)
        for name, value in headers.items():
            is_set = name.lower() in ("connection", "transfer-encoding", "date", "server")
            if not is_set and (self.command == "HEAD" or name.lower() != "content-length"):
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def handle(self):
        with contextlib.suppress(ConnectionError):  # a client that ended early
            super().handle()

    def log_message(self, *_):
        pass
