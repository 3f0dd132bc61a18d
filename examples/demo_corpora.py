# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Real text from any Python installation, on which the demo trains without a network."""

import ast
import importlib.metadata
import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

NOT_LIBRARY_CODE = {"test", "tests", "idle_test", "lib2to3", "site-packages", "dist-packages"}


def reference_prose():
    """Return the topics of Python's ``help()``: the language reference in English."""
    return [text for _, text in sorted(topics.items())]


def library_source():
    """Return the modules of Python's standard library, without its tests."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(folder.glob("**/*.py"))
    return [
        path.read_text(encoding="utf-8", errors="ignore")
        for path in paths
        if not NOT_LIBRARY_CODE.intersection(path.relative_to(folder).parts)
    ]


def package_documentation():
    """Return the long descriptions (READMEs) of the installed packages, one per package."""
    descriptions = {}
    for package in importlib.metadata.distributions():
        metadata = package.metadata
        if metadata["Name"]:
            text = metadata.get("Description") or metadata.get_payload()
            descriptions[metadata["Name"]] = text
    return [text for _, text in sorted(descriptions.items())]


def library_questions():
    """Return questions and answers about the public functions of the standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    conversations = []
    for path in sorted(folder.glob("[!_]*.py")):
        module = ast.parse(path.read_text(encoding="utf-8", errors="ignore"))
        for function in module.body:
            if not isinstance(function, ast.FunctionDef) or function.name.startswith("_"):
                continue
            if answer := ast.get_docstring(function):
                question = f"What does {path.stem}.{function.name} do?"
                conversations.append({"prompt": question, "response": answer})
    return conversations


#: Name -> function that returns texts in a fixed order.
CORPORA = {"prose": reference_prose, "code": library_source, "docs": package_documentation}


def write_corpora(folder):
    """Write each corpus to a folder as token files of bytes, with parts for train and val."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, texts in CORPORA.items():
        output = folder / name
        if (output / "prepared.json").exists():
            print(f"{output}: already exists.")
            continue
        # --force replaces the remains of an interrupted run.
        write_tokens(output, texts(), "--min-chars", 200, "--force")


def write_tokens(output, texts, *options):
    """Write texts as token files of bytes, with a tenth of them in val."""
    lines = output.with_suffix(".jsonl")
    write_lines(lines, [{"text": text} for text in texts])
    command = [sys.executable, "-m", "energon_ext", "prepare", output, "--jsonl", lines]
    command += ["--tokenizer", "bytes", "--val", 0.1, *options]
    subprocess.run(list(map(str, command)), check=True)
    lines.unlink()


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
