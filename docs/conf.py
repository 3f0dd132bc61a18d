# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Sphinx configuration: Markdown pages with MyST, and an API reference from docstrings."""

import sys
from pathlib import Path

import energon_ext

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from messages import write_page  # noqa: E402

write_page(HERE / "reference" / "messages.md")

project = "energon_ext"
author = "energon_ext contributors"
copyright = "2026, energon_ext contributors"
release = energon_ext.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"energon_ext {release}"

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings give shapes and units with the types
napoleon_use_ivar = True
myst_heading_anchors = 3
