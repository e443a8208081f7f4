# make quickstart   the main job on real input: two context-parallel ranks fine-tune a real model
# make test         the default test suite
# make lint         ruff and mypy
# All of them make .venv first, with the versions that constraints.txt pins, and again only when
# pyproject.toml or constraints.txt has changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: install quickstart test lint

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

test: $(INSTALLED)
	$(BIN)/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
