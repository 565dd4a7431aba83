# Two commands do everything on a fresh machine: `make demo` (the main job) and `make test`.
# They set up what they need: a virtual environment in .venv, with TensorFlow's GPU build if there is an NVIDIA driver, else its CPU build.
SHELL := /bin/bash
PY := .venv/bin/python
# Modules are compiled once, whatever the environment says: the tests start hundreds of processes, and each would compile them anew.
export PYTHONDONTWRITEBYTECODE :=
EXTRA := $(shell if [ -e /proc/driver/nvidia/version ] || [ -e /usr/lib/wsl/lib/libcuda.so.1 ] || command -v nvidia-smi >/dev/null 2>&1; then echo gpu; else echo cpu; fi)

.PHONY: help setup demo test test-fast test-all lint clean
help:
	@echo "make demo       train on a synthesised corpus of five languages, start to finish (runs/demo)"
	@echo "make test       run the test suite"
	@echo "make test-fast  run the tests that need no TensorFlow, no other process and no whole run"
	@echo "make test-all   run all tests, the long chaos and timing tests too"
	@echo "make lint       check style with ruff"
	@echo "make setup      create the virtual environment only (TensorFlow build here: $(EXTRA))"
	@echo "make clean      remove the virtual environment"

setup: .venv/installed-$(EXTRA)

# The first Python from 3.10 to 3.13 that runs: TensorFlow has wheels for those.
.venv/bin/python:
	@for p in python3.12 python3.11 python3.13 python3.10 python3; do \
	  if $$p -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then \
	    echo "virtual environment with $$($$p --version)"; exec $$p -m venv .venv; \
	  fi; done; \
	echo "no Python 3.10, 3.11, 3.12 or 3.13 with venv found; on Debian and Ubuntu: sudo apt install python3-venv" >&2; exit 2

.venv/installed-%: pyproject.toml | .venv/bin/python
	@echo "installing (TensorFlow's $* build; a few minutes the first time)"
	@# The two builds of TensorFlow exclude each other: another one from an earlier set-up goes first.
	@$(PY) -m pip uninstall --quiet --yes --disable-pip-version-check $(if $(filter gpu,$*),tensorflow-cpu,tensorflow) 2>/dev/null; rm -f .venv/installed-*
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[$*,test]'
	@touch $@

demo: setup
	$(PY) launch.py --config configs/demo.yaml

# Two at a time, each file's tests in one process: they share what they set up, and most of them keep one core busy.
test: setup
	$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# For the edit loop: a test that loads TensorFlow, starts a process or prepares a run is skipped as soon as it does.
# Random messages are left out too, and four run at a time, as many of these wait.
RANDOM = $(addprefix --ignore=tests/common/test_,twin_chaos.py wire_fuzz.py forgers.py)
test-fast: setup
	$(PY) -m pytest -n 4 --dist worksteal -p tests.support.fast $(RANDOM) tests/trainer tests/producer tests/common

test-all: setup
	$(PY) -m pytest -m 'slow or not slow'

lint: setup
	@$(PY) -m ruff --version >/dev/null 2>&1 || $(PY) -m pip install --quiet --disable-pip-version-check 'ruff>=0.6,<1'
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

clean:
	rm -rf .venv build *.egg-info
