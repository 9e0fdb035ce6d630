# Every target sets up what it needs in .venv, so it works in a fresh clone: `make quickstart`, `make test`.

PYTHON ?= python3
# What pip installs as torch. Plain PyPI torch also runs on CPU, but brings several GB of CUDA libraries with it;
# any other build can be named here: make setup TORCH="torch==2.11.0"
TORCH ?= torch
SEED ?= 0
# The commit that prove-unchanged compares the working tree with
BASE ?= HEAD
# Handed to pytest: make test PYTEST_ARGS="-k losses"
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Images of containers set it; the hundreds of processes that the tests start would each compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup quickstart quickstart-grounding quickstart-game quickstart-tools quickstart-reasoning-gym test test-slow test-nightly test-all test-vllm lint format docs bench bench-cuda bench-curves cuda prove-dapo prove-learning prove-same-learning prove-grounding prove-reasoning-gym prove-game prove-tools prove-resume prove-ranks prove-unchanged prove-vllm prove-wheel clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-25s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(READY) ## Install the package and its tools in .venv

$(READY): pyproject.toml
	@$(PYTHON) -m venv $(VENV)
	@echo "Installing torch and grpo-lightning[dev] in $(VENV) (minutes, the first time) ..."
	@$(BIN)/python -m pip install --quiet $(TORCH)
	@$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $@

quickstart: $(READY) ## Train a tiny model with GRPO on a CPU (SEED=0)
	$(BIN)/grpo-lightning fit --config recipes/quickstart.yaml --seed_everything=$(SEED)

quickstart-grounding: $(READY) ## Teach a tiny vision-language model to point, on a CPU (SEED=0)
	$(BIN)/grpo-lightning fit --config recipes/quickstart_grounding.yaml --seed_everything=$(SEED)

quickstart-game: $(READY) ## Teach a tiny model to guess a number, turn by turn, on a CPU (SEED=0)
	$(BIN)/grpo-lightning fit --config recipes/quickstart_game.yaml --seed_everything=$(SEED)

quickstart-tools: $(READY) ## Teach a tiny model to use a calculator, on a CPU (SEED=0)
	$(BIN)/grpo-lightning fit --config recipes/quickstart_tools.yaml --seed_everything=$(SEED)

quickstart-reasoning-gym: $(READY) ## Train a tiny model on three tasks of reasoning-gym, on a CPU (SEED=0)
	$(BIN)/grpo-lightning fit --config recipes/quickstart_reasoning_gym.yaml --seed_everything=$(SEED)

# One process more than there are cores, because some tests wait for other processes or for time limits. At most 4,
# because each of them may start several more, and needs up to 3 GB.
TEST_PROCESSES := $(shell expr $$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN) + 1)
PYTEST := $(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test: $(READY) ## What protects users, in minutes, on a CPU
	$(PYTEST) $(PYTEST_ARGS)

test-slow: $(READY) ## The full matrices: every strategy, family, recipe and way of saving
	$(PYTEST) -m "slow and not nightly" $(PYTEST_ARGS)

test-nightly: $(READY) ## Further combinations of what the matrices of test-slow have
	$(PYTEST) -m nightly $(PYTEST_ARGS)

test-all: $(READY) ## The tests of `make test` and of `make test-slow`, in one run: those of continuous integration
	$(PYTEST) -m "not nightly" $(PYTEST_ARGS)

test-vllm: ## Test VLLMEngine against the real vLLM on a CPU, in an environment of its own and at most 10 minutes
	$(PYTHON) tests/vllm/run.py $(PYTEST_ARGS)

lint: $(READY) ## Style, types and spelling
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/codespell

format: $(READY) ## Format the code and fix what can be fixed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(READY) ## Build the documentation site in site/; broken links and missing documentation fail
	@NO_MKDOCS_2_WARNING=1 DS_ACCELERATOR=cpu $(BIN)/python -m mkdocs build --strict
	@echo "Built site/index.html"

bench: $(READY) ## Time and memory of a training step against TRL's, on four workloads
	$(BIN)/python benchmarks/versus_trl.py

bench-cuda: $(READY) ## Time and memory of a training step against TRL's on a GPU
	$(BIN)/python benchmarks/versus_trl.py --workloads w5

bench-curves: $(READY) ## Cost per token against TRL's, by group size, prompt, completion and model size
	$(BIN)/python benchmarks/versus_trl.py --curves

cuda: $(READY) ## Check and measure everything on a CUDA device, and write a report
	$(BIN)/python benchmarks/gpu_report.py

prove-dapo: $(READY) ## Show that dynamic sampling saves a third of the trained tokens where 70 % of the prompts teach nothing
	$(BIN)/python benchmarks/prove_dapo.py --record

prove-learning: $(READY) ## Show that the quickstart learns: eight seeds, and the controls on three
	$(BIN)/python benchmarks/prove_learning.py

prove-same-learning: $(READY) ## Show that the quickstart learns as it does with TRL, on six seeds
	$(BIN)/python benchmarks/prove_same_learning.py

prove-grounding: $(READY) ## Show that the grounding quickstart learns, from the images: eight seeds and two controls
	$(BIN)/python benchmarks/prove_grounding.py

prove-reasoning-gym: $(READY) ## Show that three tasks of reasoning-gym are learned: eight seeds and three controls
	$(BIN)/python benchmarks/prove_reasoning_gym.py

prove-game: $(READY) ## Show that a tiny model learns to use what it is told, turn by turn: three seeds and four controls
	$(BIN)/python benchmarks/prove_game.py --seeds 0 1 2

prove-tools: $(READY) ## Show that a tiny model learns to use a calculator: three seeds and four controls
	$(BIN)/python benchmarks/prove_tools.py --seeds 0 1 2

prove-resume: $(READY) ## Show that a killed run resumes to the same weights, bit for bit
	$(BIN)/python benchmarks/prove_resume.py

prove-ranks: $(READY) ## Show on two CPU ranks that training resumes, learns, and equals that of one device
	$(BIN)/python benchmarks/prove_ranks.py

prove-unchanged: $(READY) ## Show that the working tree trains to the metrics and weights of a commit (BASE=HEAD)
	$(BIN)/python benchmarks/prove_unchanged.py --base $(BASE)

prove-vllm: ## Show on a CPU that the quickstart learns with vLLM: in the process, on a server, and asynchronously
	$(PYTHON) tests/vllm/run.py -m "vllm and slow"
	.venv-vllm/bin/python benchmarks/prove_vllm.py

prove-wheel: $(READY) ## Show that the built wheel works in a fresh environment and an empty folder
	$(BIN)/python benchmarks/prove_wheel.py

clean: ## Remove .venv and .venv-vllm, caches and build outputs (runs are kept)
	rm -rf $(VENV) .venv-vllm build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
