# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Private names of other libraries that this package reads or sets.

They may change in any release. Each has one function here and a test in ``tests/test_compat.py``
that fails if the installed library has another name.
"""

import sys
from typing import Any

from megatron.energon import WorkerConfig
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.itar_reader import JoinIndexFileITarReader
from megatron.energon.metadataset.metadataset_v2 import DatasetReference, SubsetRatioMixin
from megatron.energon.wrappers.repeat_dataset import RepeatDataset
from multistorageclient import shortcuts
from torch.distributed import distributed_c10d
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

# Torch ------------------------------------------------------------------------------------------


def end_workers(loader: DataLoader[Any]) -> None:
    """Kill the processes of a loader; torch would wait for each of them."""
    iterator: Any = loader._iterator
    if not hasattr(iterator, "_workers"):  # not begun, or without processes
        return
    iterator._shutdown = True
    signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
    iterator._worker_pids_set = False
    for worker in iterator._workers:
        worker.kill()
        worker.join()


def default_store() -> Any:
    """Return the store by which the ranks of torch.distributed found each other; MPI has none."""
    return distributed_c10d._get_default_store()


# Energon ----------------------------------------------------------------------------------------


def set_worker(number: int, process: int, workers: int) -> None:
    """Make a worker process number ``process`` act as worker ``number``, for all configurations."""
    WorkerConfig.worker_id_offset = (number - process) % workers


def url_of_data_service(path: EPath) -> str:
    """Return the ``msc://`` URL of a ``dss://`` path."""
    return f"msc://{path.fs.profile}{path._internal_str_path}"


def resolve_path(reference: DatasetReference, metadataset: EPath | None) -> EPath:
    """Resolve the path of a reference relative to its metadataset, and return it."""
    return reference._resolve_path(metadataset)


def set_dataset(reference: DatasetReference, loader: Any) -> None:
    """Set the loader of the dataset that a reference names."""
    reference._dataset = loader


def combine_subsets(entry: SubsetRatioMixin, outer: Any) -> Any:
    """Return the subset of an entry, of which a subset around it selects a part."""
    return entry._get_subset(outer)


def joined_shard(reader: JoinIndexFileITarReader, number: int) -> int:
    """Return the shard with a sample of a joined dataset; below 0 if the dataset lacks it."""
    return int(reader._get_itar_sample_pointer(number).tar_file_id)


def repetitions_read(dataset: RepeatDataset[Any]) -> int:
    """Return how many whole times a repeated dataset was read."""
    return int(dataset._repetition)


def set_repetitions_read(dataset: RepeatDataset[Any], repetitions: int) -> None:
    """Set how many whole times a repeated dataset was read."""
    dataset._repetition = repetitions


# Multi-storage client ---------------------------------------------------------------------------


def cached_clients() -> list[Any]:
    """Return the clients that the library keeps in this process, and forgets in a fork."""
    return list(shortcuts._STORAGE_CLIENT_CACHE.values())


def has_rust_client(client: Any) -> bool:
    """True if a client sends its requests through its Rust client."""
    provider = getattr(client, "_storage_provider", None)  # None: several stores behind one client
    return getattr(provider, "_rust_client", None) is not None  # only some stores have one


def drop_rust_client(client: Any) -> None:
    """Make a client send its requests through the store's Python library."""
    client._storage_provider._rust_client = None


def attempts_of(client: Any) -> int:
    """Return how often a client sends a request that fails."""
    return int(getattr(client._retry_config, "attempts", 1))  # None: not configured


# OpenAI -----------------------------------------------------------------------------------------


def http_timeout_of(client: Any) -> Any:
    """Return the time-out of an HTTP client of ``openai``, which then tries again.

    The client is one of ``httpx``, or of ``httpx2`` since version 3.
    """
    library = type(client).__mro__[1].__module__.partition(".")[0]
    return sys.modules[library].ReadTimeout


# Hugging Face -----------------------------------------------------------------------------------


def jinja_environment(chat_template_utils: Any, template: str) -> Any:
    """Return the Jinja environment in which ``transformers`` renders a chat template.

    Args:
        chat_template_utils: the module ``transformers.utils.chat_template_utils``.
    """
    return chat_template_utils._compile_jinja_template(template).environment


def version_of_dataset(dataset: Any) -> str | None:
    """Return the fingerprint of the rows of a Hugging Face dataset; None if it is streamed."""
    return getattr(dataset, "_fingerprint", None)
