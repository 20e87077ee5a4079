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

test: lint
	$(BIN)/pytest

clean:
	rm -rf $(VENV) build *.egg-info demo-out
