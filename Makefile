# One virtual environment in .venv for everything; a second call installs nothing.
#
#   make demo          train on real text, kill, reshard and compare; picture and report in demo/
#   make test          the suite that every change must pass
#   make test-nightly  the long suite
#   make bench         ratios against stock Energon and others
#   make docs          HTML documentation in docs/_build/html
#   make lint          style, layers, types and plain English

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --constraint constraints.txt
INSTALLED := $(VENV)/.installed
DOCS_INSTALLED := $(VENV)/.docs-installed

# A third process for two cores: many tests wait for processes of their own. Bytecode is kept even if
# the environment forbids it: every test process would compile the package and its tests again.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 \
  $(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder

# On Linux the plain wheel of torch is a CUDA build of gigabytes: ask for the CPU build by name.
TORCH := $(shell grep '^torch==' constraints.txt)$(if $(filter Linux,$(shell uname)),+cpu)
# Set it where pip's own index has no CPU build: make demo TORCH_INDEX=URL
TORCH_INDEX ?=

.PHONY: demo test suite test-nightly bench docs lint clean
.DELETE_ON_ERROR:

demo: $(INSTALLED)
	$(BIN)/python examples/demo.py

test: $(INSTALLED)
	@$(MAKE) --no-print-directory --jobs 2 lint suite

suite: $(INSTALLED)
	$(PYTEST)

test-nightly: lint
	$(PYTEST) -m "not gpu" -o faulthandler_timeout=3600

bench: $(INSTALLED)
	$(BIN)/python benchmarks/run.py

docs: $(DOCS_INSTALLED)
	$(BIN)/python -m sphinx -W -b html docs docs/_build/html

lint: $(INSTALLED)
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy
	$(BIN)/python .ci/plain_english.py

clean:
	rm -rf $(VENV) build *.egg-info docs/_build

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) "$(TORCH)" || { \
	  echo 'pip finds no "$(TORCH)". Take the URL of the CPU builds from' \
	    'https://pytorch.org/get-started/locally and call: make $(MAKECMDGOALS) TORCH_INDEX=URL' >&2; \
	  exit 1; }
	$(PIP) --editable ".[hf,datasets,report,tensorboard,megatron,openai,test]"
	touch $@

$(DOCS_INSTALLED): $(INSTALLED)
	$(PIP) --editable ".[docs]"
	touch $@
