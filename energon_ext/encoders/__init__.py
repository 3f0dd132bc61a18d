# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""TaskEncoders: how samples of a source become what the model sees."""
