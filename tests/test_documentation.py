# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Every python, yaml and bash block of the documentation runs, and every doctest passes.

The blocks of a page run in order, in an empty folder. A page that uses the examples or metadatasets
of the repository must say that it needs a checkout, and gets only these two folders. Python blocks
of a page share their names. A yaml block whose first line is a comment with a file name,
``# mix.yaml``, is written under that name for later blocks; a metadataset is also loaded. A block
after the comment ``<!-- skip: reason -->`` is not run.
"""

import ast
import dataclasses
import doctest
import importlib
import importlib.util
import itertools
import os
import pkgutil
import re
import runpy
import shlex
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
from energon_ext.splice.config import MultiSpliceConfig, SpliceConfig, SpliceFields
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from energon_ext.weights.schedule import KINDS
from tests.cli.command import energon_ext as energon_ext_command
from tests.support import loader_for, take, write_texts

CHECKOUT = Path(energon_ext.__file__).parents[1]
PAGES = [
    CHECKOUT / "README.md",
    *(page for page in sorted((CHECKOUT / "docs").rglob("*.md")) if "_build" not in page.parts),
]
MODULES = [
    module.name for module in pkgutil.walk_packages(energon_ext.__path__, prefix="energon_ext.")
]
WITH_DOCTESTS = [
    module
    for module in ["energon_ext", *MODULES]
    if ">>> " in Path(importlib.util.find_spec(module).origin).read_text()
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
    """Return the blocks of a page to run, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(match["language"], match["code"], text.count("\n", 0, match.start("code")))
        for match in BLOCK.finditer(text)
        if match["language"] in LANGUAGES and not match["skip"]
    ]


def needs_a_checkout(page):
    """Return whether a block of the page uses folders of the repository."""
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
        # Leading newlines make tracebacks show line numbers of the page.
        exec(compile("\n" * block.line + block.code, str(page), "exec"), names)


def run_in_process(block, page, names, folder):
    """Run a block, with the commands of energon-ext in this process."""
    if block.language != "bash":
        run_block(block, page, names, folder)
        return
    lines = block.code.splitlines(keepends=True)
    for is_command, group in itertools.groupby(lines, lambda line: line.startswith("energon-ext ")):
        if not is_command:
            run_block(dataclasses.replace(block, code="".join(group)), page, names, folder)
            continue
        for line in group:
            result = energon_ext_command(*shlex.split(line, comments=True)[1:])
            assert result.exit_code == 0, result.output


def page_params():
    """Return each page and how to run it: pages with commands take minutes, so the suite runs only
    the README of these, in this process."""
    for page in PAGES:
        has_commands = any(block.language == "bash" for block in blocks_of(page))
        marks = [pytest.mark.nightly] if has_commands else []
        yield pytest.param(page, run_block, id=str(page.relative_to(CHECKOUT)), marks=marks)
    yield pytest.param(CHECKOUT / "README.md", run_in_process, id="README.md, in process")


def test_a_page_that_needs_a_checkout_says_so():
    texts = {page: " ".join(page.read_text().lower().split()) for page in PAGES}
    silent = [page.name for page, text in texts.items() if "checkout of the repository" not in text]
    assert [page.name for page in PAGES if needs_a_checkout(page) and page.name in silent] == []


@pytest.mark.parametrize(("page", "run"), [*page_params()])
def test_the_code_blocks_of_a_page_run(page, run, folder):
    if needs_a_checkout(page):
        for name in ("examples", "metadatasets"):
            shutil.copytree(CHECKOUT / name, folder / name)
    names = {"__name__": "__main__"}
    for block in blocks_of(page):
        where = f"{page.name}:{block.line}: this {block.language} block does not run"
        try:
            run(block, page, names, folder)
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{where}: {error}") from error


@pytest.mark.parametrize("module", WITH_DOCTESTS)
def test_the_doctests_of_a_module_pass(module):
    result = doctest.testmod(
        importlib.import_module(module),
        optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS,
    )
    assert result.failed == 0


def names_imported(code):
    """Yield the full names that Python code imports from the package."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("energon_ext"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.startswith("energon_ext."))


def test_the_reference_lists_every_name_that_a_package_page_or_example_shows():
    """All other names are private; blocks that do not run count as well."""
    reference = "".join(page.read_text() for page in PAGES if page.parent.name == "api")
    listed = re.findall(r"^\.\. auto\w+:: (energon_ext[\w.]*)$", reference, re.MULTILINE)
    shown = {
        f"{module}.{name}"
        for module in ["energon_ext", *MODULES]
        for name in getattr(importlib.import_module(module), "__all__", ())
    }
    codes = [
        match["code"]
        for page in PAGES
        for match in BLOCK.finditer(page.read_text())
        if match["language"] == "python"
    ]
    codes += [path.read_text() for path in (CHECKOUT / "examples").rglob("*.py")]
    for code in codes:
        shown.update(names_imported(code))
    public = {id(pkgutil.resolve_name(name)) for name in listed}
    assert len(codes) > 100
    assert [name for name in sorted(shown) if id(pkgutil.resolve_name(name)) not in public] == []


def test_every_test_named_on_a_page_exists():
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


#: Names of files of other projects that pages mention.
OF_OTHERS = {
    *("preprocess_data.py", "pretrain_gpt.py", "pretrain_hybrid.py", "pretrain_vlm.py"),
    *("dataloader_provider.py", "data_schedule.py", "utils/seqlen_balancing.py"),
    *("1_s1_get_tokenlens_v3-sft.py", "2_do_hashbacket.py", "3_s2_prepare_rawsamples-vqa.py"),
    *("4_convert_packedsample_to_wds.py", "5_make_mix_wds_config.py"),
    "prepare_gpt_sft_packed_data.py",
}


def test_every_path_and_module_named_on_a_page_exists():
    """Paths are relative to the repository, to the package, to a folder of it or to the page."""
    tops = ("energon_ext", "docs", "examples", "benchmarks", "tests", "metadatasets")
    files = {path.name for top in tops for path in (CHECKOUT / top).rglob("*")}
    named, missing = 0, []
    for page in [*PAGES, CHECKOUT / "CONTRIBUTING.md", CHECKOUT / "SECURITY.md"]:
        text, roots = page.read_text(), (CHECKOUT, CHECKOUT / "energon_ext", page.parent)
        for path in re.findall(r"`([\w./*-]+\.(?:py|sh|toml|md))[`:]", text):
            named += 1
            is_here = any(any(root.glob(path)) for root in roots)
            is_name = "/" not in path and path in files
            if not (is_here or is_name or path in OF_OTHERS or "NAME" in path):
                missing.append(f"{page.name}: {path}")
        for folder in re.findall(r"`([\w/]+/)`", text) if page.parent == CHECKOUT else ():
            named += 1
            if not any((root / folder).is_dir() for root in (*roots[:2], CHECKOUT / "tests")):
                missing.append(f"{page.name}: {folder}")
        for name in re.findall(r"`(energon_ext(?:\.\w+)+)", text):
            named += 1
            try:
                pkgutil.resolve_name(name)
            except (ImportError, AttributeError):
                missing.append(f"{page.name}: {name}")
    assert missing == []
    assert named > 150


def test_every_module_named_in_a_docstring_exists():
    named, missing = set(), []
    for path in (CHECKOUT / "energon_ext").rglob("*.py"):
        pattern = r":(?:mod|func|class|data|meth|attr):`~?(energon_ext[\w.]+)`"
        named |= {(name, path.name) for name in re.findall(pattern, path.read_text())}
    for name, module in sorted(named):
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            missing.append(f"{module}: {name}")
    assert missing == []
    assert len(named) > 50


def test_the_data_flow_page_lists_every_module():
    table = (
        (CHECKOUT / "docs/reference/internals/data_flow.md")
        .read_text()
        .split("## From the YAML")[0]
    )
    listed = set(re.findall(r"`(\w+)`", table))
    names = {name for module in MODULES for name in module.split(".")[1:]}
    assert sorted(names - listed) == []


def table_of(title):
    """Return the default of each field from the table under a heading of the YAML page."""
    text = (CHECKOUT / "docs/reference/yaml.md").read_text()
    parts = re.split(r"^## ", text, flags=re.MULTILINE)
    (table,) = [part for part in parts if part.startswith(f"{title}\n")]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
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
def test_the_yaml_page_matches_the_fields_in_the_code(title, kind, elsewhere):
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


def test_the_yaml_page_lists_every_kind_of_weight():
    assert sorted(table_of("Weights")) == sorted(KINDS)


def test_the_messages_page_lists_every_error_with_its_placeholders():
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


def test_blocks_are_found_in_order_and_skipped_only_with_a_reason(tmp_path):
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
def test_a_failing_block_raises(language, code, folder):
    write_texts(folder / "web", TEXTS)
    with pytest.raises((AssertionError, ValueError, yaml.YAMLError, subprocess.SubprocessError)):
        run_block(Block(language, code, 1), Path("page.md"), {}, folder)


def test_blocks_share_names_and_named_files_only(folder):
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
