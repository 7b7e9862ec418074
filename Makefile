# One verb per chore. `make demo` and `make test` set up what they need on first use.
PYTHON ?= python3
VENV := .venv
BENCH_VENV := .venv-bench
FLOORS_VENV := .venv-floors
VERL_VENV := .venv-verl
BIN := $(VENV)/bin
PIP_ARGS ?=
FAST := not integration and not slow and not ray and not browser and not gpu
# Most tests wait rather than compute, so there are more processes than cores.
PYTEST_ARGS ?= -n 4
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start hundreds of processes: where Python writes no byte code, each of them compiles the product again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: async-client demo demo-async demo-verl test test-fast test-slow test-floors test-python coverage soak faults fuzz bench bench-gpu dist docs lint format proto clean setup
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

demo-verl: $(VERL_VENV)/.ready ## the trainer of verl itself on CPUs, with the package TransferQueue and with this project, and whether both train alike
	@$(VERL_VENV)/bin/python tests/frameworks/verl/train.py $(ARGS)

$(VERL_VENV)/.ready: tests/frameworks/verl/requirements.txt
	@echo "setting up $(VERL_VENV) (first time: a few minutes)"
	@rm -rf $(VERL_VENV)
	@python3.11 -m venv $(VERL_VENV)
	@$(VERL_VENV)/bin/pip install -q $(PIP_ARGS) torch==2.13.0
	@$(VERL_VENV)/bin/pip install -q $(PIP_ARGS) --no-deps -r tests/frameworks/verl/requirements.txt
	@$(VERL_VENV)/bin/pip install -q $(PIP_ARGS) --no-deps -e .
	@touch $@

test coverage: export TQ_EXAMPLES ?= 0.2
test: setup ## the test suite
	@$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

test-fast: setup ## its tests without sockets, processes and Ray: the ones to run after each edit
	@TQ_EXAMPLES=0.1 $(BIN)/python -m pytest -m "$(FAST)" -n 2

test-floors: $(FLOORS_VENV)/.ready ## contract, columns, compat, mixin and their like on the oldest versions that pyproject.toml allows, and Python 3.11
	@$(FLOORS_VENV)/bin/python -m pytest -m "not slow" $(PYTEST_ARGS) $(FLOORS_TESTS)

FLOORS_TESTS ?= tests/contract tests/compat tests/cli tests/workers/test_exports.py $(wildcard $(addprefix tests/, \
	data/test_columns*.py client/test_columns.py client/test_checkpoint*.py client/test_events.py core/test_values.py \
	controller/test_metrics.py controller/test_recorder.py protocol/test_http2.py workers/training/test_mixin*.py))

$(FLOORS_VENV)/.ready: pyproject.toml constraints.txt tests/floors.py
	@echo "setting up $(FLOORS_VENV) (some gigabytes: this torch has CUDA)"
	@rm -rf $(FLOORS_VENV)
	@python3.11 -m venv $(FLOORS_VENV)
	@$(FLOORS_VENV)/bin/python tests/floors.py > $(FLOORS_VENV)/constraints.txt
	@$(FLOORS_VENV)/bin/python -m pip install -q $(PIP_ARGS) -c $(FLOORS_VENV)/constraints.txt torch
	@$(FLOORS_VENV)/bin/python -m pip install -q $(PIP_ARGS) -c $(FLOORS_VENV)/constraints.txt -e . \
		coverage hypothesis omegaconf psutil pytest pytest-timeout pytest-xdist
	@$(FLOORS_VENV)/bin/python -m pip install -q $(PIP_ARGS) -c $(FLOORS_VENV)/constraints.txt --no-deps TransferQueue
	@touch $@

PYENV := $(or $(PYENV_ROOT),$(HOME)/.pyenv)
PYTHONS ?= 3.12.1 3.13.0
test-python: export TQ_EXAMPLES ?= 0.1
test-python: ## the tests of `make test-fast` on other versions of Python, each as far as pyenv has it
	@failed=; for version in $(PYTHONS); do \
		if [ ! -x "$(PYENV)/versions/$$version/bin/python" ]; then \
			echo "Python $$version is skipped: it is not in $(PYENV)/versions (pyenv install $$version)"; continue; fi; \
		echo "Python $$version"; \
		{ $(MAKE) --no-print-directory .venv-$$version/.ready && \
			.venv-$$version/bin/python -m pytest -m "$(FAST)" -n 2; } || failed="$$failed $$version"; \
	done; [ -z "$$failed" ] || { echo "failed on Python$$failed"; exit 1; }

.venv-3.%/.ready: pyproject.toml constraints.txt
	@echo "setting up .venv-3.$* (where there is no CPU build of torch for it, some gigabytes with CUDA)"
	@rm -rf .venv-3.$*
	@"$(PYENV)/versions/3.$*/bin/python" -m venv .venv-3.$*
	@.venv-3.$*/bin/python -m pip install -q $(PIP_ARGS) -c constraints.txt torch==2.13.0
	@.venv-3.$*/bin/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@.venv-3.$*/bin/python -m pip install -q $(PIP_ARGS) -c constraints.txt --no-deps TransferQueue
	@touch $@

coverage: export PYTHONPATH := $(CURDIR)
coverage: setup ## the test suite, and the share of each module's lines that it reaches
	@$(BIN)/coverage erase
	@status=0; $(BIN)/coverage run -m pytest -m "not slow" $(PYTEST_ARGS) || status=$$?; \
		$(BIN)/coverage combine -q && $(BIN)/coverage report --sort=cover && exit $$status

test-slow: setup ## its tests that take long each: clusters whose nodes come and go, whole training jobs, deployments
	@$(BIN)/python -m pytest -m "slow and not soak" $(PYTEST_ARGS)

soak: setup $(VERL_VENV)/.ready ## half an hour of faults under rising load, ten minutes of faults of workers, the ledger's model test and simulator with twenty times the examples, the tests that CI leaves out, the test suite with all examples and random delays, test-floors
	@$(BIN)/python -m tests.faults.storm --minutes $(or $(MINUTES),30) $(ARGS)
	@$(BIN)/python -m tests.faults.workers_storm --minutes $(or $(WORKERS_MINUTES),10) $(ARGS)
	@TQ_EXAMPLES=20 $(BIN)/python -m pytest -o timeout=0 -o faulthandler_timeout=0 -m "not soak" -n 2 \
		tests/simulation tests/ledger/test_model.py tests/ledger/test_space.py
	@$(BIN)/python -m pytest -o faulthandler_timeout=0 -m soak -n 2
	@TQ_EXAMPLES=1 PYTHONPATH=tests/delays:$(CURDIR) $(BIN)/python -m pytest \
		-m "not slow or (integration and not ray and not browser and not soak)" $(PYTEST_ARGS)
	@$(MAKE) --no-print-directory test-floors

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

bench-gpu: ## reads to and puts from a CUDA GPU, beside copies of pinned memory; with the Python and torch that are there
	@$(PYTHON) -m benchmarks.gpu $(ARGS)

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

async-client: setup ## generate dataplane/client/async_calls.py, the calls of the async client, from client.py
	@$(BIN)/python -m tests.client.async_calls

proto: setup ## generate proto/control.proto, and dataplane/protocol/pb from proto/ (tools in an environment of their own: they pin an old protobuf)
	@$(BIN)/python proto/generate.py
	@test -x .venv-proto/bin/python || { $(PYTHON) -m venv .venv-proto && .venv-proto/bin/pip install -q $(PIP_ARGS) grpcio-tools==1.71.2; }
	@.venv-proto/bin/python -m grpc_tools.protoc -I dataplane/protocol/pb=proto --python_out=. --grpc_python_out=. --pyi_out=. dataplane/protocol/pb/control.proto dataplane/protocol/pb/bulk.proto
	@sha256sum proto/*.proto dataplane/protocol/pb/*_pb2*.py* > proto/SHA256SUMS

clean: ## remove environments and caches
	@rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis out
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
