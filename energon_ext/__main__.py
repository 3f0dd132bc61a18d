# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The command ``energon-ext`` as ``python -m energon_ext``, which needs no script on the PATH."""

from energon_ext.cli.main import main

if __name__ == "__main__":
    main()
