# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""For tools that look for this file; the package is described in pyproject.toml."""

from setuptools import setup

setup()
