# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The package. It names no torch build: Energon brings one, and users choose theirs."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "energon_ext" / "__init__.py").read_text())[1]
EXTRAS = {
    "hf": ["tokenizers", "transformers"],
    "datasets": ["datasets"],
    "report": ["matplotlib"],
    "tensorboard": ["tensorboard"],
    "openai": ["httpx"],
    "megatron": ["megatron-core>=0.15,<0.20"],  # the oldest and the newest that were tried
    "test": ["pytest", "pytest-xdist", "hypothesis", "ruff"],
    "docs": ["sphinx", "myst-parser", "furo"],
}

setup(
    name="energon_ext",
    version=VERSION,
    description="Scheduled blends, exact resume and packed batches for NVIDIA Megatron-Energon.",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="BSD-3-Clause",
    packages=find_packages(include=["energon_ext", "energon_ext.*"]),
    python_requires=">=3.10,<3.14",
    install_requires=["megatron-energon>=7.3.2,<8", "numpy", "click", "tqdm", "pyyaml"],
    extras_require={**EXTRAS, "all": sorted({name for names in EXTRAS.values() for name in names})},
    entry_points={"console_scripts": ["energon-ext = energon_ext.cli.main:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
