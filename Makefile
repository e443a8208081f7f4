# make quickstart   the main job on real input: two context-parallel ranks fine-tune a real model
# make test         the default test suite
# make test-fast    the tests of one process each
# make test-all     the default suite, then the slow part
# make lint         ruff and mypy
# make docs         the documentation site, in build/site
# make wheel        the wheel and the source distribution, in dist
# All of them make .venv first, with the versions that constraints.txt pins, and again only when
# pyproject.toml or constraints.txt has changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: install quickstart test test-fast test-all lint docs wheel

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "error: Python 3.10 or later is needed, $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
	    "name another with make PYTHON=python3.12 ..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(INSTALLED)

quickstart: $(INSTALLED)
	$(BIN)/python -m torchtune_cp.quickstart

# One worker a core, one thread a process: ranks share the cores. Each worker begins at another place (the
# tests of several processes come first), so that few of them run at the same time.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

test: $(INSTALLED)
	$(PYTEST)

test-fast: $(INSTALLED)
	$(PYTEST) -m "not distributed and not slow and not gpu and not multi_gpu"

test-all: $(INSTALLED)
	$(PYTEST) -m "not gpu and not multi_gpu"

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(INSTALLED)
	$(BIN)/mkdocs build --strict --site-dir build/site

wheel: $(INSTALLED)
	$(BIN)/python -m build --outdir dist
