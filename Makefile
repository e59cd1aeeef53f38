# The commands for people and for CI. Each makes .venv first when it is missing or older than what it is made from.
PYTHON ?= $(shell for p in python3.11 python3; do $$p -c '' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test check bench docs clean
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

help: ## say what there is
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(READY) ## four emulated hosts at 1 Gbit/s: race against DDP, then train Fashion-MNIST
	@echo 'Racing Poseidon against DDP over four emulated hosts, then training three epochs.'
	@$(BIN)/poseidon bench fashion-mnist --hosts 4 --link 1Gbit/s --against ddp
	@$(BIN)/poseidon train fashion-mnist --hosts 4 --link 1Gbit/s --epochs 3 --check-replicas \
	  --out "runs/demo-$$(date +%Y%m%d-%H%M%S)"

test: $(READY) ## the tests that this machine can run; all with PYTEST_ARGS=--thorough
	@echo 'Testing, two at a time: plain tests, ranks on loopback; then one by one what watches time, hosts in namespaces.'
	@$(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder $(PYTEST_ARGS)

check: $(READY) ## format, lint, types, imports between rooms
	@echo 'Checking format, lint, types and imports.'
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports > .venv/lint-imports.log 2>&1 || { cat .venv/lint-imports.log; exit 1; }
	@echo 'All checks passed.'

bench: $(READY) ## the benchmarks, with their tables
	@echo 'Benchmarking: Poseidon against DDP over emulated hosts, about ten minutes; figures in runs/bench.'
	@mkdir -p runs/bench
	@$(BIN)/poseidon bench fc-heavy --hosts 4 --link 1Gbit/s --against ddp --json runs/bench/fc-heavy-1G.json
	@$(BIN)/poseidon bench fc-heavy --hosts 4 --link 200Mbit/s --against ddp --rounds 3 --steps 1 \
	  --json runs/bench/fc-heavy-200M.json
	@$(BIN)/poseidon bench fashion-mnist --hosts 4 --link 1Gbit/s --against ddp --json runs/bench/fashion-mnist-1G.json
	@$(BIN)/poseidon bench recsys --hosts 4 --link 1Gbit/s --against ddp --json runs/bench/recsys-1G.json
	@$(BIN)/poseidon bench resnet20 --hosts 4 --link 1Gbit/s --against ddp --json runs/bench/resnet20-1G.json
	@$(BIN)/poseidon bench fashion-mnist --alone --against ddp --json runs/bench/fashion-mnist-alone.json

docs: $(READY) ## the documentation, into site/
	@echo 'Building the documentation into site/.'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean: ## remove what the other commands made, .venv included
	@echo 'Removing .venv, caches, site/ and dist/; runs/ stays.'
	@rm -rf .venv site dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@test -n '$(PYTHON)' && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo 'Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11'; exit 1; }
	@echo 'Making .venv with the versions of constraints.txt (a minute or two).'
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt torch==2.13.0 -e '.[dev]'
	@touch $@
