# Two commands do everything: `make demo` and `make test`. Both start with `make setup`.
# Needs Python >= 3.10 with pip and venv, and this make; no root. All paths are relative, so the
# checkout may lie in a directory with a space in its name.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: help setup demo test test-long lint clean

help:
	@echo 'make demo       a real model served with prefix reuse on the software Ascend device'
	@echo 'make test       lint, types and all tests that take less than ten minutes together'
	@echo 'make test-long  the tests that take longer'
	@echo 'make setup      only the virtual environment .venv with the tools in .venv/bin'
	@echo 'make clean      remove .venv, .models and caches'

setup: .venv/.installed

.venv/.installed: pyproject.toml
	@echo 'setting up .venv (once) ...'
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed; set PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install -qq --editable '.[sim,convert,bench,test]'
	touch $@

demo: setup
	$(BIN)/python -m tools.demo

lint: setup
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

test: lint
	$(BIN)/python -m pytest -m 'not long and not npu' -n auto --maxprocesses 4 --dist loadfile

test-long: setup
	$(BIN)/python -m pytest -m 'long and not npu' --timeout 3600

clean:
	rm -rf .venv .models .mypy_cache .ruff_cache build *.egg-info
