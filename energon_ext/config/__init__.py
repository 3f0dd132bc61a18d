# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""From a YAML file to sources: what it names, whether it may, and what each is called."""
