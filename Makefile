# The commands of this repository. `make help` names them.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# The interpreter that .venv is made with, for example `make PYTHON=python3.12 setup`; empty: .ci/setup chooses.
PYTHON ?=
# GPU=1: Horovod with NCCL; GPU=0: for cores; empty: as .venv is.
GPU ?=
# HOROVOD=0: without it, for cores over MPI, which is set up sooner; HOROVOD=1: with it; empty: as .venv is.
HOROVOD ?=
# An older TensorFlow, for example `make TENSORFLOW=2.18 setup`; 2.21: the newest; empty: that of .venv.
TENSORFLOW ?=
# Further arguments for pytest in `make test` and `make test-all`.
PYTEST_FLAGS ?=
BIN := .venv/bin
SOURCES = $(wildcard ringtrain launch tests benchmarks .ci)
CXX_SOURCES = $(wildcard ringtrain/collectives/native/*.cc ringtrain/collectives/native/*.h tests/native/*.cc)

# What TensorFlow says in horovodrun's own process: that it registers its CUDA plugins twice (before 2.21), and where it
# found no GPU, before it has read TF_CPP_MIN_LOG_LEVEL (since).
NOISE := before absl::InitializeLog|Unable to register cu(FFT|DNN|BLAS) factory|^[IW]0000 00:00:

.PHONY: help setup setup-tests train test test-all test-next test-gpu test-faults lint docs dist format lock outdated clean

help: ## Show these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: ## Install what is missing and make .venv (options: PYTHON=python3.12, TENSORFLOW=2.18, GPU=1, HOROVOD=0)
	@PYTHON='$(PYTHON)' GPU='$(GPU)' TENSORFLOW='$(TENSORFLOW)' HOROVOD='$(HOROVOD)' .ci/setup

setup-tests: setup ## Install what the tests need besides: Slurm, which they start themselves, shellcheck and Chromium
	@.ci/setup-tests

train: setup ## Train the built-in workload with 2 processes, into a fresh directory under runs/
	@out=runs/digits-$$(date -u +%Y%m%dT%H%M%SZ); export PATH="$(CURDIR)/$(BIN):$$PATH" TF_CPP_MIN_LOG_LEVEL=2; \
	start="$$([ -x $(BIN)/horovodrun ] && echo horovodrun || echo mpirun --allow-run-as-root --oversubscribe --bind-to none) -np 2"; \
	echo "$$start python -m ringtrain --out $$out"; \
	{ $$start python -m ringtrain --out "$$out" 2>&1 >&3 | (trap '' INT; sed -uE '/$(NOISE)/d' >&2); } 3>&1

test: setup-tests ## Run the tests, without those marked slow
	@$(BIN)/python -m pytest -n auto --durations-file .tools/durations.json $(PYTEST_FLAGS)

test-all: setup-tests ## Run all tests
	@$(BIN)/python -m pytest -n auto -m '' --durations-file .tools/durations-all.json $(PYTEST_FLAGS)

test-next: setup-tests ## Run the tests with the newest pre-releases of TensorFlow and Keras, in .tools/next
	@.ci/test-next

test-gpu: setup ## Run the tests that need NVIDIA's GPUs, after `make setup GPU=1`
	@$(BIN)/python -m pytest -v -m gpu tests/gpu

test-faults: setup-tests ## Run all injected faults (an hour or two) and write results/faults.json
	@tests=$$($(BIN)/python -m tests.faults.summary); RINGTRAIN_TEST_EXAMPLES=500 $(BIN)/python -m pytest -m '' $$tests \
		--faults-table results/faults.json

lint: setup ## Check style and types: ruff, clang-format and mypy
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check $(SOURCES)
	@$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)
	@$(BIN)/mypy $(SOURCES)

docs: ## Build the site of all documents into site/; a link that leads nowhere fails
	@.ci/docs

dist: setup ## Build the wheel and the source archive into dist/; the same commit and compiler give the same bytes
	@.ci/dist

format: setup ## Rewrite the source files in the style of ruff and clang-format
	@$(BIN)/ruff check --fix-only $(SOURCES)
	@$(BIN)/ruff format $(SOURCES)
	@$(BIN)/clang-format -i $(CXX_SOURCES)

lock: ## Write all locks anew from pyproject.toml
	@.ci/lock

outdated: setup ## Name newer releases of what ringtrain depends on, and whether the tests were seen with them
	@.ci/outdated

clean: ## Remove .venv, .tools and caches; runs/ stays
	@rm -rf .venv .tools site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find $(SOURCES) -type d -name __pycache__ -prune -exec rm -rf {} +
