# make serve, make test: set up .venv (once) and go. PYTHON=python3.12 picks the interpreter,
# ARGS='...' is passed on: make serve ARGS='--port 8001', make test ARGS='tests/unit -k blocks'.

SUITABLE := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c '$(SUITABLE)' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
ARGS ?=

.PHONY: help setup setup-serve serve test test-all fuzz lint types check wheels site clean

help:
	@echo "make serve   serve the embedded model on http://127.0.0.1:8000"
	@echo "make test    run the tests"
	@echo "make test-all  the same, without samples: whole grids, all layouts, all wheels"
	@echo "make fuzz    property tests with new examples, for SECONDS=300, or the one round of SEED="
	@echo "make lint    ruff and its formatter"
	@echo "make types   mypy --strict on the core"
	@echo "make wheels  a wheel of every package in dist/, the kernels for all processors in one"
	@echo "make site    the pages of docs/ as a site, in site/"
	@echo "make check   lint, types, workspace and size rules: what CI runs before the tests"

setup:
	@test -n "$(PYTHON)" || { echo "setup: Python 3.11, 3.12 or 3.13 is needed"; exit 1; }
	@$(PYTHON) tools/bootstrap.py

setup-serve:
	@test -n "$(PYTHON)" || { echo "setup: Python 3.11, 3.12 or 3.13 is needed"; exit 1; }
	@$(PYTHON) tools/bootstrap.py --serve

serve: setup-serve
	@$(BIN)/modulm serve $(ARGS)

test: setup
	@$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder $(ARGS)

test-all: setup
	@$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --everything $(ARGS)

fuzz: setup
	@$(BIN)/python tools/fuzz.py $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED)) \
		-n auto --dist loadfile $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

check: lint types
	$(BIN)/python tools/workspace.py check
	$(BIN)/python tools/size.py
	$(BIN)/python tools/audit.py

wheels: setup
	@$(BIN)/python tools/wheels.py $(ARGS)

site: setup
	@test -x $(BIN)/mkdocs || $(BIN)/uv pip install --quiet --python $(BIN)/python \
		--constraints constraints.txt --group docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

clean:
	rm -rf .venv build dist site kernels/*/build .pytest_cache .mypy_cache .ruff_cache .hypothesis
