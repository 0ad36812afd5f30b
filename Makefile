# make demo        a real model, compiled, against eager; then the same from the cache in a second process
# make test        everything a change must pass          make test-all   the same and the long sweeps
# make lint        ruff and mypy                          make bench      speed, as ratios (ARGS="--quick --only calls")
# make compare     compiled against eager on three small models, gradients included; JUnit reports in out/
# make setup       the .venv that all of these use; does nothing when it is up to date
#
# PYTHON=python3.12     another interpreter        VENV=/elsewhere/venv    another place
# PIP_ARGS="..."        further arguments for every `pip install`, such as the index that holds the CPU-only build of torch
# ARGS="..."            further arguments for the program that runs

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
ARGS ?=
JOBS ?= 2

# Named after what decides its contents: file times, which a clone or a checkout changes, do not.
STAMP := $(VENV)/.set-up-$(shell cat pyproject.toml constraints.txt | sha256sum | cut -c1-16)
PY := $(VENV)/bin/python
PIP := PIP_NO_INPUT=1 $(PY) -m pip --disable-pip-version-check
TESTS = $(PY) -m pytest -n $(JOBS) --dist worksteal --durations 15 --durations-min 5
TYPED := .mypy_cache/tree

.PHONY: help setup demo test test-all compare lint format bench clean

help:
	@awk '!/^#/ { exit } { sub(/^# ?/, ""); print }' Makefile

setup: $(STAMP)

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "make setup needs Python 3.11 or later; '$(PYTHON)' is not. Name one: make setup PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "'$(PYTHON)' cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip
	@echo "Installing PyTorch (some hundred MB, once) ..."
	$(PIP) install --quiet $(PIP_ARGS) -c constraints.txt torch==2.13.0
	@echo "Installing the rest (XLA, libtpu, transformers and a small model, once) ..."
	$(PIP) install --quiet $(PIP_ARGS) -c constraints.txt -e '.[test]'
	@rm -f $(VENV)/.set-up-*
	@touch $@

demo: setup
	@$(PY) demo/demo.py $(ARGS)

test: setup
	$(TESTS) -m "not full" $(ARGS)

test-all: setup
	$(TESTS) $(ARGS)

compare: setup
	@for model in convnet encoder llama; do \
	  $(VENV)/bin/tpu-compile compare --grad --calls 2 --junit out/compare-$$model.xml tools/compare_models.py:$$model $(ARGS) || exit 1; \
	done

# mypy cannot follow an editable install that maps ./lowering to tpu_compile.lowering, so it is shown the tree that an install makes.
lint: setup
	$(PY) -m ruff check .
	@rm -rf $(TYPED) && mkdir -p $(TYPED)/tpu_compile
	@for each in tpu_compile/* lowering runtime cache; do ln -s "$$PWD/$$each" $(TYPED)/tpu_compile/; done
	@rm -rf $(TYPED)/tpu_compile/__pycache__
	cd $(TYPED) && "$(abspath $(PY))" -m mypy --config-file "$(CURDIR)/pyproject.toml" --cache-dir "$(CURDIR)/.mypy_cache" -p tpu_compile

format: setup
	$(PY) -m ruff format . && $(PY) -m ruff check --fix .

bench: setup
	$(PY) tools/bench.py $(ARGS)

clean:
	rm -rf $(VENV) build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache
