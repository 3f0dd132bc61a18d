# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Real text that every Python installation carries: what the demo trains on, without a network."""

import importlib.metadata
import sysconfig
from collections.abc import Iterable
from email.message import Message
from pathlib import Path
from typing import cast

from energon_ext.cli.documents import Corpus, Document, folder_files, text_files

NOT_LIBRARY_CODE = {"test", "tests", "idle_test", "lib2to3", "site-packages", "dist-packages"}


def reference_prose() -> Corpus:
    """The topics of Python's ``help()``: the language reference in English."""
    from pydoc_data.topics import topics

    return _corpus((f"help({name!r})", text) for name, text in sorted(topics.items()))


def library_source() -> Corpus:
    """The modules of Python's standard library, its tests left out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return text_files(
        path
        for path in folder_files(folder, "**/*.py")
        if not NOT_LIBRARY_CODE.intersection(path.relative_to(folder).parts)
    )


def package_documentation() -> Corpus:
    """The long descriptions (READMEs) of the installed packages, one of each."""
    descriptions: dict[str, str] = {}
    for package in importlib.metadata.distributions():
        # Its documented protocol has neither `get` nor the body.
        metadata = cast("Message[str, str]", package.metadata)
        if metadata["Name"]:
            text = metadata.get("Description") or metadata.get_payload()
            descriptions[metadata["Name"]] = cast(str, text)  # it has one part
    return _corpus(sorted(descriptions.items()))


def _corpus(texts: Iterable[tuple[str, str]]) -> Corpus:
    documents = [Document(text, origin, len(text)) for origin, text in texts]
    return Corpus(iter(documents), sum(document.num_bytes for document in documents))


CORPORA = {"prose": reference_prose, "code": library_source, "docs": package_documentation}
