# Every target sets up what it needs on a fresh machine: `make demo`, `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test lint clean

setup: $(STAMP)

$(STAMP): requirements/cpu.lock requirements/install.sh pyproject.toml setup.py $(wildcard kernels/csrc/*)
	PYTHON=$(PYTHON) bash requirements/install.sh $(VENV)
	touch $@

demo: setup
	$(BIN)/dps-ray demo

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Clusters need the whole machine and a port of their own; all else runs two files at a time, in the
# order of their names, in which the longest ones do not come last.
test: lint
	$(BIN)/pytest -m "not cluster" -n 2 --dist loadfile --no-loadscope-reorder
	$(BIN)/pytest -m cluster

clean:
	rm -rf $(VENV) build *.egg-info demo-out
