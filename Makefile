# One verb per chore. `make demo` and `make test` set up what they need on first use.
PYTHON ?= python3
VENV := .venv
BENCH_VENV := .venv-bench
BIN := $(VENV)/bin
PIP_ARGS ?=
# Most tests wait rather than compute, so there are more processes than cores.
PYTEST_ARGS ?= -n 4
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start hundreds of processes: where Python writes no byte code, each of them compiles the product again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo demo-async test test-fast test-slow coverage soak faults fuzz bench dist docs lint format proto clean setup
.DEFAULT_GOAL := help

help: ## list the verbs
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(VENV)/.ready ## make the virtual environment

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version)'
	@echo "setting up $(VENV) (first time: a few minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -q $(PIP_ARGS) -c constraints.txt torch==2.13.0
	@$(BIN)/pip install -q $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@$(BIN)/pip install -q $(PIP_ARGS) -c constraints.txt --no-deps TransferQueue
	@touch $@

demo: setup ## GRPO of a small transformer, every tensor through the data plane
	@$(BIN)/python examples/grpo_arithmetic.py $(ARGS)

demo-async: setup ## the same, asynchronously: rollouts go on while the policy trains
	@$(BIN)/python examples/grpo_async.py $(ARGS)

test coverage: export TQ_EXAMPLES ?= 0.2
test: setup ## the test suite
	@$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

test-fast: setup ## its tests without sockets, processes and Ray: the ones to run after each edit
	@TQ_EXAMPLES=0.1 $(BIN)/python -m pytest -m "not integration and not slow and not ray and not browser and not gpu" -n 2

coverage: export PYTHONPATH := $(CURDIR)
coverage: setup ## the test suite, and the share of each module's lines that it reaches
	@$(BIN)/coverage erase
	@$(BIN)/coverage run -m pytest -m "not slow" $(PYTEST_ARGS)
	@$(BIN)/coverage combine -q
	@$(BIN)/coverage report --sort=cover

test-slow: setup ## its tests that take long each: clusters whose nodes come and go, whole training jobs, deployments
	@$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

soak: setup ## half an hour of faults under rising load, ten minutes of faults of workers, the ledger's model test and simulator with twenty times the examples, the test suite with random delays
	@$(BIN)/python -m tests.faults.storm --minutes $(or $(MINUTES),30) $(ARGS)
	@$(BIN)/python -m tests.faults.workers_storm --minutes $(or $(WORKERS_MINUTES),10) $(ARGS)
	@TQ_EXAMPLES=20 $(BIN)/python -m pytest -o timeout=0 -o faulthandler_timeout=0 tests/simulation tests/test_ledger_model.py tests/test_ledger_space.py
	@PYTHONPATH=tests/delays:$(CURDIR) $(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

faults: setup ## every process of a working service, and of a job of workers, dies and stops, links break; ARGS="--seed N" again
	@$(BIN)/python -m tests.faults.storm $(ARGS)
	@$(BIN)/python -m tests.faults.workers_storm $(ARGS)

fuzz: $(VENV)/.fuzz ## feed every decoder with hostile bytes for ten minutes; ARGS="--seconds N --target NAME" for less
	@$(BIN)/python -m tests.fuzz $(ARGS)

$(VENV)/.fuzz: $(VENV)/.ready
	@$(BIN)/pip install -q $(PIP_ARGS) -c constraints.txt -e '.[fuzz]'
	@touch $@

bench: $(BENCH_VENV)/.ready ## what it costs, beside its peers; ARGS=--quick takes two minutes
	@$(BENCH_VENV)/bin/python -m benchmarks $(ARGS)

$(BENCH_VENV)/.ready: pyproject.toml constraints.txt benchmarks/constraints.txt
	@echo "setting up $(BENCH_VENV) (first time: a few minutes)"
	@$(PYTHON) -m venv $(BENCH_VENV)
	@$(BENCH_VENV)/bin/pip install -q $(PIP_ARGS) -c benchmarks/constraints.txt torch==2.13.0
	@$(BENCH_VENV)/bin/pip install -q $(PIP_ARGS) -c benchmarks/constraints.txt -e '.[demo]' TransferQueue
	@touch $@

dist: setup ## wheel and source archive in dist/, the wheel tried in an empty environment
	@rm -rf dist out/empty
	@mkdir -p out
	@$(BIN)/python -m build -o dist > out/dist.log 2>&1 || { cat out/dist.log; exit 1; }
	@$(PYTHON) -m venv out/empty
	@out/empty/bin/pip install -q $(PIP_ARGS) -c constraints.txt torch==2.13.0
	@out/empty/bin/pip install -q $(PIP_ARGS) -c constraints.txt dist/*.whl
	@out/empty/bin/python -P tests/wheel_trial.py
	@rm -rf out/empty

docs: setup ## the documentation's site, in out/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "out/site/index.html"

lint: setup ## ruff, mypy strict, import floors
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: setup ## let ruff rewrite
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

proto: ## generate dataplane/pb from proto/ (tools in an environment of their own: they pin an old protobuf)
	@test -x .venv-proto/bin/python || { $(PYTHON) -m venv .venv-proto && .venv-proto/bin/pip install -q $(PIP_ARGS) grpcio-tools==1.71.2; }
	@.venv-proto/bin/python -m grpc_tools.protoc -I dataplane/pb=proto --python_out=. --grpc_python_out=. --pyi_out=. dataplane/pb/control.proto dataplane/pb/bulk.proto
	@sha256sum proto/*.proto dataplane/pb/*_pb2*.py* > proto/SHA256SUMS

clean: ## remove environments and caches
	@rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis out
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
