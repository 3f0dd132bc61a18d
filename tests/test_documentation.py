# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the documentation shows runs: every python, yaml and bash block, and every doctest.

The blocks of one page run in the order written, in an empty folder. A page that names the examples
or the metadatasets of the repository says that it runs in a checkout, and gets these two folders
and nothing else. Python blocks of a page share their names. A yaml block whose first line is a
comment with a file name, ``# mix.yaml``, is written under that name for the blocks after it; a
metadataset is also loaded. A block after the comment ``<!-- skip: reason -->`` is not run.
"""

import ast
import dataclasses
import doctest
import importlib
import os
import pkgutil
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from megatron.energon import WorkerConfig
from megatron.energon.metadataset.metadataset_v2 import MetadatasetJoin

import energon_ext
from energon_ext.config import metadataset
from energon_ext.encoders.tokenizers import ByteTokenizer
from energon_ext.splice.config import MultiSpliceConfig, SpliceConfig, SpliceFields
from energon_ext.weights.schedule import KINDS
from tests.support import loader_for, take, write_texts

CHECKOUT = Path(energon_ext.__file__).parents[1]
PAGES = [
    CHECKOUT / "README.md",
    *(page for page in sorted((CHECKOUT / "docs").rglob("*.md")) if "_build" not in page.parts),
]
MODULES = [
    module.name for module in pkgutil.walk_packages(energon_ext.__path__, prefix="energon_ext.")
]
SPLICE_FIELDS = {field.name for field in dataclasses.fields(SpliceFields)}
LANGUAGES = ("python", "yaml", "bash")
BLOCK = re.compile(
    r"(?:^<!-- skip: (?P<skip>[^\n]*\S) -->\n+)?"
    r"^(?P<fence>```+)(?P<language>\w+)[^\n]*\n(?P<code>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)
FILE_NAME = re.compile(r"# (?P<name>[\w./-]+\.ya?ml)$", re.MULTILINE)
TEXTS = [f"def document_{n}():\n    return {'text ' * (n % 7 + 1)!r}\n" for n in range(60)]


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    line: int


def blocks_of(page):
    """The blocks of a page that are to be run, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(match["language"], match["code"], text.count("\n", 0, match.start("code")))
        for match in BLOCK.finditer(text)
        if match["language"] in LANGUAGES and not match["skip"]
    ]


def needs_a_checkout(page):
    """Whether a block of the page names what lies in the repository."""
    named = re.compile(r"(?<![.\w])(examples|metadatasets)\b")
    return any(named.search(block.code) for block in blocks_of(page))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder to run blocks in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT), prepend=os.pathsep)
    return tmp_path


def run_yaml(code, folder):
    content = yaml.safe_load(code)
    name = FILE_NAME.match(code)
    path = folder / (name["name"] if name else "block.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
    if not isinstance(content, dict) or content.get("__module__") != "energon_ext":
        return
    dataset = energon_ext.get_train_dataset(
        path,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=2,
        task_encoder=energon_ext.PackedTaskEncoder(ByteTokenizer(), seq_len=64),
    )
    for batch in take(loader_for(dataset), 2):
        batch.validate()


def run_block(block, page, names, folder):
    if block.language == "yaml":
        run_yaml(block.code, folder)
    elif block.language == "bash":
        subprocess.run(["bash", "-euo", "pipefail", "-c", block.code], check=True, cwd=folder)
    else:
        # Leading newlines make tracebacks show the line of the page.
        exec(compile("\n" * block.line + block.code, str(page), "exec"), names)


def page_param(page):
    """Pages with commands take processes and minutes; the README stands for them in the suite."""
    has_commands = any(block.language == "bash" for block in blocks_of(page))
    is_long = has_commands and page.name != "README.md"
    marks = [pytest.mark.nightly] if is_long else []
    return pytest.param(page, id=str(page.relative_to(CHECKOUT)), marks=marks)


def test_a_page_that_needs_the_repository_says_so():
    texts = {page: " ".join(page.read_text().lower().split()) for page in PAGES}
    silent = [page.name for page, text in texts.items() if "checkout of the repository" not in text]
    assert [page.name for page in PAGES if needs_a_checkout(page) and page.name in silent] == []


@pytest.mark.parametrize("page", [page_param(page) for page in PAGES])
def test_the_code_blocks_of_a_page_run(page, folder):
    if needs_a_checkout(page):
        for name in ("examples", "metadatasets"):
            shutil.copytree(CHECKOUT / name, folder / name)
    names = {"__name__": "__main__"}
    for block in blocks_of(page):
        where = f"{page.name}:{block.line}: this {block.language} block does not run"
        try:
            run_block(block, page, names, folder)
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{where}: {error}") from error


@pytest.mark.parametrize("module", ["energon_ext", *MODULES])
def test_the_doctests_of_a_module_hold(module):
    result = doctest.testmod(
        importlib.import_module(module),
        optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS,
    )
    assert result.failed == 0


def test_the_reference_has_every_public_name():
    """What a package lists as public, and what a page imports from it."""
    reference = "".join(page.read_text() for page in PAGES if page.parent.name == "api")
    listed = set(re.findall(r"^\.\. auto\w+:: [\w.]*\b(\w+)$", reference, re.MULTILINE))
    public = {
        name
        for module in ["energon_ext", *MODULES]
        for name in getattr(importlib.import_module(module), "__all__", ())
    }
    blocks = [
        block.code for page in PAGES for block in blocks_of(page) if "python" in block.language
    ]
    shown = {
        alias.name
        for node in (node for code in blocks for node in ast.walk(ast.parse(code)))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("energon_ext")
        for alias in node.names
    }
    assert sorted((public | shown) - listed) == []


def test_every_test_that_a_page_names_exists():
    named = {
        (path, name)
        for page in PAGES
        for path, name in re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", page.read_text())
    }
    assert len(named) > 30
    missing = [
        f"{path}::{name}"
        for path, name in sorted(named)
        if not (CHECKOUT / path).is_file() or f"def {name}(" not in (CHECKOUT / path).read_text()
    ]
    assert missing == []


def test_the_page_of_the_data_flow_has_every_module():
    table = (
        (CHECKOUT / "docs/reference/internals/data_flow.md")
        .read_text()
        .split("## From the YAML")[0]
    )
    listed = set(re.findall(r"`(\w+)`", table))
    names = {name for module in MODULES for name in module.split(".")[1:]}
    assert sorted(names - listed) == []


def table_of(title):
    """Default by field, of the table under a heading of the page of YAML fields."""
    text = (CHECKOUT / "docs/reference/yaml.md").read_text()
    section = re.split(r"^## ", text, flags=re.MULTILINE)
    (found,) = [each for each in section if each.startswith(f"{title}\n")]
    rows = [line.split("|") for line in found.splitlines() if line.startswith("| `")]
    return {row[1].strip(" `"): row[4].strip(" `") for row in rows}


@pytest.mark.parametrize(
    ("title", "kind", "elsewhere"),
    [
        ("The metadataset", metadataset.ScheduledMetadataset, {"path"}),
        ("Blend", metadataset.ScheduledBlend, set()),
        ("Interleave", metadataset.Interleave, set()),
        ("Entry of a blend or an interleave", metadataset.ScheduledDatasetReference, set()),
        ("Join", MetadatasetJoin, set()),
        ("Splice", SpliceFields, set()),
        ("Splice of one document", SpliceConfig, SPLICE_FIELDS),
        ("Splice of many documents", MultiSpliceConfig, SPLICE_FIELDS),
    ],
)
def test_the_page_of_yaml_fields_is_that_of_the_code(title, kind, elsewhere):
    fields = {
        field.name: field.default
        for field in dataclasses.fields(kind)
        if field.init and not field.name.startswith("_") and field.name not in elsewhere
    }
    shown = table_of(title)
    assert sorted(shown) == sorted(fields)
    if title.startswith("Splice"):
        defaults = {name: default.split("`")[0] for name, default in shown.items()}
        assert defaults == {name: str(default) for name, default in fields.items()}


def test_the_page_of_yaml_fields_has_all_kinds_of_weights():
    assert sorted(table_of("Weights")) == sorted(KINDS)


def test_the_page_of_messages_has_every_error_with_its_placeholders():
    code = (
        "def read(path):\n"
        "    if not path:\n"
        '        raise ConfigError(f"{path!r}: no " + "file; "\n'
        '                          f"give {len(path)} more.")\n'
        "    raise KeyError(path)\n"
        "def damaged(path):\n"
        "    return StateFormatError(said(path))\n"
    )
    page = runpy.run_path(str(CHECKOUT / "docs/messages.py"))
    assert page["messages_in"](code, {"ConfigError", "StateFormatError"}) == [
        ("ConfigError", "{path}: no file; give {len(path)} more."),
        ("StateFormatError", "{said(path)}"),
    ]
    assert page["error_types"]() > {"ConfigError", "StoreError", "StateMismatchError"}
    assert page["page"]().count("\n| ConfigError |") > 300


def test_blocks_are_found_in_order_and_skipped_with_a_reason_only(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "text\n```python\na = 1\n```\n"
        "<!-- skip: needs eight GPUs -->\n```bash\nfalse\n```\n"
        "<!-- skip: -->\n```bash\ntrue\n```\n"
        "```text\nno code\n```\n"
        "````yaml\na: |\n  ```\n````\n"
    )
    assert blocks_of(page) == [
        Block("python", "a = 1\n", 2),
        Block("bash", "true\n", 10),
        Block("yaml", "a: |\n  ```\n", 16),
    ]


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("python", "assert 1 == 2\n"),
        ("bash", "false | true\n"),
        ("yaml", "a: [\n"),
        (
            "yaml",
            "__module__: energon_ext\n__class__: ScheduledMetadataset\n"
            "splits: {train: {blend: [{path: ./web/train, weight: -1}]}}\n",
        ),
    ],
)
def test_a_block_that_fails_is_noticed(language, code, folder):
    write_texts(folder / "web", TEXTS)
    with pytest.raises((AssertionError, ValueError, yaml.YAMLError, subprocess.SubprocessError)):
        run_block(Block(language, code, 1), Path("page.md"), {}, folder)


def test_blocks_share_names_and_named_files_and_find_nothing_else(folder):
    write_texts(folder / "web", TEXTS)
    names = {}
    for language, code in (
        (
            "yaml",
            "# mixes/mix.yaml\n__module__: energon_ext\n__class__: ScheduledMetadataset\n"
            "splits: {train: {blend: [{path: ../web/train, weight: {step: {0: 1}}}]}}\n",
        ),
        ("python", "from pathlib import Path\npath = Path('mixes/mix.yaml')\n"),
        ("python", "text = path.read_text()\n"),
        ("bash", "test -f mixes/mix.yaml && test \"$(echo *)\" = 'mixes web'\n"),
    ):
        run_block(Block(language, code, 1), Path("page.md"), names, folder)
    assert names["text"].startswith("# mixes/mix.yaml")
