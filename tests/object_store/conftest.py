# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause

import json

import pytest

from energon_ext.storage import object_store, range_reader


@pytest.fixture(scope="session")
def server():
    from tests.object_store.store import Store

    server = Store()
    yield server
    server.close()


@pytest.fixture
def client():
    """The client of the store; tests can be parametrised with "rust"."""
    return "boto3"


@pytest.fixture
def store(server, client, tmp_path, monkeypatch):
    provider = {"base_path": "corpus", "endpoint_url": server.url, "region_name": "us-east-1"}
    if client == "rust":
        provider["rust_client"] = {"allow_http": True}
    keys = {"access_key": "key", "secret_key": "secret"}
    profile = {
        "storage_provider": {"type": "s3", "options": provider},
        "credentials_provider": {"type": "S3Credentials", "options": keys},
        "retry": {"attempts": 2, "delay": 0},
    }
    (tmp_path / "msc.json").write_text(json.dumps({"profiles": {"store": profile}}))
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.json"))
    monkeypatch.setenv("ENERGON_EXT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    object_store.msc.shortcuts._reinitialize_after_fork()  # drop the clients of earlier tests
    server.requests.clear()
    server.fault = None
    range_reader.use_requests(16)
    return server
