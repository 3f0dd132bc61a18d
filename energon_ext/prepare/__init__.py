# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Text into token files, unit by unit: what `energon-ext prepare` and the cache of text run."""
