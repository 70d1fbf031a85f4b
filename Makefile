# Two commands for a newcomer: `make demo` and `make test`. Each sets up everything that it needs.

PYTHON ?= python3
VENV   ?= .venv
# Test files at the same time; most start two processes.
WORKERS ?= 2
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test test-slow lint types bench clean

# The constraints file pins what CI runs; a GPU machine gets the CUDA build of the same torch.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip setuptools wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,test]'
	touch $@

demo: $(STAMP)
	$(BIN)/megaresume demo --overwrite

test: $(STAMP) lint types
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist loadfile --durations 25

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
