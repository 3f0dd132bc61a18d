# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""List the options that the launch scripts of a Megatron-LM read, for tests/megatron.

    PYTHONPATH=. .venv/bin/python .ci/list_script_options.py ~/Megatron-LM

Writes them, under the version of that checkout, to tests/megatron/script_options.json. An option
that is new there fails a test until energon_ext/megatron/lm/script_options.py lists it.
"""

import json
import re
import sys
from pathlib import Path

from energon_ext.megatron.lm.script_options import MODEL_OPTIONS, STEP_OPTIONS, options_read_by

LISTS = Path(__file__).resolve().parents[1] / "tests" / "megatron" / "script_options.json"


def main(checkout: Path) -> None:
    version = ".".join(
        re.findall(
            r"^(?:MAJOR|MINOR|PATCH) = (\d+)",
            (checkout / "megatron/core/package_info.py").read_text(),
            re.MULTILINE,
        )
    )
    scripts = [*STEP_OPTIONS.scripts, *MODEL_OPTIONS.scripts]
    found = {
        name: " ".join(sorted(options_read_by(checkout / name)))
        for name in scripts
        if (checkout / name).is_file()
    }
    lists = json.loads(LISTS.read_text()) if LISTS.is_file() else {}
    lists[version] = found
    LISTS.write_text(json.dumps(lists, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
