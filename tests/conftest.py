# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause

import gc
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import warnings
from pathlib import Path

import pytest
from hypothesis import settings

import tests.fast  # noqa: F401
from tests.garbage import keep_in_large_pages, leave_imports_alone
from tests.megatron.processes import SERVER

warnings.filterwarnings("ignore", message=".*pin_memory.*|.*worker processes in total.*")


GPU_TESTS = Path(__file__).parent / "gpu"

# The duration of an example does not matter.
settings.register_profile("suite", deadline=None, max_examples=40)
settings.register_profile("nightly", deadline=None, max_examples=400)


def pytest_configure(config):
    is_suite = "not nightly" in config.option.markexpr
    settings.load_profile("suite" if is_suite else "nightly")
    hide_gpu_or_select_its_tests(config)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Import what tests need without collections, which would go through it again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        leave_imports_alone()
        keep_in_large_pages()
        let_loggers_propagate()
        if "torch" in sys.modules:
            from tests.gloo import share_one_device

            share_one_device()


def let_loggers_propagate():
    """Let the logs of libraries reach pytest at the root.

    It would add its handlers to each logger that does not propagate, of which torch has fifty, six
    times a test.
    """
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


def pytest_sessionfinish():
    for child in multiprocessing.active_children():
        child.kill()  # of a failed test; Python would wait for it when it exits


def hide_gpu_or_select_its_tests(config):
    if _is_for_gpu(config):
        config.option.markexpr = "gpu"
    else:
        # Other tests use CPU tensors, and fork, which CUDA does not survive.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _is_for_gpu(config):
    """Return whether a run asks for the tests marked ``gpu``, by the mark or by their folder."""
    words = config.option.markexpr.split()
    asks_by_mark = "gpu" in words and "not gpu" not in config.option.markexpr
    paths = [Path(config.invocation_params.dir, each.partition("::")[0]) for each in config.args]
    asks_by_folder = all(path.resolve().is_relative_to(GPU_TESTS) for path in paths)
    return asks_by_mark or asks_by_folder


@pytest.fixture(scope="module", autouse=True)
def _imports_are_no_garbage():
    leave_imports_alone()


@pytest.fixture(autouse=True)
def _no_workers_left():
    # It imports Megatron, which the process that only hands out tests does without.
    from tests.support import close_loaders

    yield
    close_loaders()


@pytest.fixture(scope="session")
def processes():
    """Processes that start fast: they are forked from a server that has imported everything."""
    return SERVER


@pytest.fixture(scope="session")
def texts_once(tmp_path_factory):
    from tests.support import write_dataset

    return write_dataset(tmp_path_factory.mktemp("texts") / "d", [f"text {n}" for n in range(20)])


@pytest.fixture
def good(tmp_path, texts_once):
    """A prepared dataset of 20 texts, for tests that damage it."""
    return shutil.copytree(texts_once, tmp_path / "good")


CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory):
    """A tiny character tokenizer with a chat template, saved like a model folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<|im_start|>", "<|im_end|>", "<pad>"]
    characters = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
    vocabulary = {token: index for index, token in enumerate(special + characters)}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        eos_token="<|im_end|>",
        pad_token="<pad>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return folder


# Background jobs of a shell ignore Ctrl-C, and child processes inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


#: Files with few, long tests: if they started last, one process would be left with them.
SLOW_FILES = (
    "test_random_chains.py",
    "test_example.py",
    "test_task_examples.py",
    "test_energons_loader.py",
    "test_starved_workers.py",
    "test_killed_rank.py",
    "test_yaml_spy.py",
    "test_documentation.py",
    "test_packed_samples.py",
    "test_lockstep.py",
    "test_parallel_training.py",
    "test_random_configurations.py",
)


def pytest_collection_modifyitems(items):
    """Start with the slow files."""
    items.sort(key=lambda item: item.path.name not in SLOW_FILES)
