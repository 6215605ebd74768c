# Two commands on a fresh machine: make demo, make test. Both make .venv first.
PYTHON ?= python3
SEEDS  ?=
WORKERS ?= 2
BIN    := .venv/bin
READY  := .venv/.ready
HOROVOD := .venv/.horovod
PYTEST = $(BIN)/python -m pytest -q -rs -n $(WORKERS) --dist worksteal
# Only these files are imported for the tests that are marked alone.
ALONE  = $$(grep -rl --include='test_*.py' 'mark\.alone' tests)

# Hundreds of processes import the same files, and each would compile them.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help docs setup install-horovod data demo tune tune-cpu bench bench-gpu test test-all test-light test-versions slurm-test browser faults soak mutants support lint format clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1|/' | column -t -s'|'

setup: $(READY)  ## .venv with pinned versions (about 7 GB: torch's CUDA build), some minutes

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "kfac_bench needs Python 3.11 or newer: make setup PYTHON=python3.12"; exit 2; }
	@echo "installing into .venv: about 7 GB, 2 to 5 minutes"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@DS_BUILD_OPS=0 $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	@touch $@

install-horovod: $(HOROVOD)  ## for backend=horovod: built once on a machine, some minutes (HVD_CUDA=1: for GPUs)

$(HOROVOD): $(READY) scripts/install_horovod.sh
	@scripts/install_horovod.sh $(BIN)/python
	@touch $@

data:  ## Fashion-MNIST for data=fashion_mnist, if it is missing: Debian's package, as root (30 MB)
	@test -d /usr/share/datasets/fashion-mnist || { apt-get update -qq && \
	  apt-get install -y -qq --no-install-recommends dataset-fashion-mnist; }

demo: setup  ## the main job: SGD, Adam and K-FAC on real data, table and report (SEEDS=0: one seed)
	$(BIN)/kfac-bench run demo $(if $(SEEDS),--seeds $(SEEDS))

tune: setup  ## find the demo's settings again, one equal budget per optimizer (10 minutes)
	$(BIN)/kfac-bench tune demo --out conf/experiment

tune-cpu: setup data  ## find the settings of profile=cpu, one equal budget per optimizer (105 minutes)
	$(BIN)/kfac-bench tune claim1_epochs --out conf/experiment
	$(BIN)/kfac-bench tune classic_autoencoder --out conf/experiment

bench: setup  ## step time, stages and memory of K-FAC over SGD, beside their floors (30 minutes)
	$(BIN)/python benchmarks/speed.py --models resnet32,encoder --real
	$(BIN)/python benchmarks/background.py
	$(BIN)/python benchmarks/ideas.py

bench-gpu: setup  ## the same on one GPU in 8 minutes, with checks; writes docs/lab/gpu.md
	$(BIN)/python benchmarks/gpu.py

test: setup install-horovod lint  ## linters and the quick tests; 8 minutes on two cores (WORKERS=4: on more)
	$(PYTEST) -m "not slow and not alone"

test-all: setup install-horovod lint  ## linters and every test, also the slow ones, as CI runs them; 20 to 30 minutes
	$(PYTEST) -m "not alone" --support=build/support.json
	$(PYTEST) -m alone --support=build/support_alone.json $(ALONE)
	$(BIN)/python scripts/support_table.py --check build/support.json build/support_alone.json

test-light: setup  ## some quick tests of the core on the wheel, with torch alone; 1 minute
	$(BIN)/python scripts/version_tests.py light --workers $(WORKERS)

test-versions: setup  ## quick tests with other versions, also the oldest; downloads torch (ARGS=oldest: one row)
	$(BIN)/python scripts/version_tests.py --workers $(WORKERS) $(ARGS)

slurm-test: setup install-horovod  ## the batch scripts on a real Slurm of two nodes, here (as root: installs it)
	$(PYTEST) tests/slurm

browser: setup  ## install Debian's Chromium for the tests of the HTML page, unless there is a Chromium; as root
	@$(BIN)/python -m tests.support.browser || { apt-get update -qq && \
	  apt-get install -y -qq --no-install-recommends chromium && $(BIN)/python -m tests.support.browser; }

faults: setup  ## inject faults into real runs; 40 minutes (ARGS="--short", ARGS=--help)
	$(BIN)/python -m tests.reliability.faults $(ARGS)

soak: setup  ## train for long; memory, files, disk and step time must not grow (ARGS="--minutes 120")
	$(BIN)/python -m tests.reliability.soak $(ARGS)

mutants: setup  ## make small changes in a copy; tests must notice each (ARGS="--part 1/4", ARGS=--help)
	$(BIN)/python -m tests.mutants $(ARGS)

support: setup install-horovod  ## what each backend can do, shown by its tests: the table of docs/reference/backends.md
	$(PYTEST) -m supports --support=build/support.json
	$(BIN)/python scripts/support_table.py build/support.json

docs: setup  ## the documentation site in build/site; each warning, such as a dead link, is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

lint: setup  ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup  ## let ruff format the code and fix what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove the environment, caches and build leftovers; runs/ stays
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
