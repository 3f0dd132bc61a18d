# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Reads metadatasets: checks their YAML files, builds trees of weights and names the sources."""
