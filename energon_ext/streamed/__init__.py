# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Blends any Energon datasets under Energon's loader, with scheduled weights and keyed state."""
