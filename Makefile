# Two commands matter: `make serve` and `make test`. Each does all of its own set-up.
PYTHON ?= python3
VENV   ?= .venv
PORT   ?= 8000
HOST   ?= 127.0.0.1
MODEL  ?= smollm2-135m-instruct
ARGS   ?=
WORKERS ?= 2
BIN    := $(VENV)/bin

.PHONY: serve test lint bench bench-desk golden lock clean
.DEFAULT_GOAL := help

.PHONY: help
help:
	@echo "make serve   install and serve a real model on http://$(HOST):$(PORT)  (MODEL= PORT= HOST= ARGS=)"
	@echo "make test    install and run lint, types, layers and every test  (WORKERS=0: in one process)"
	@echo "make lint    ruff, mypy --strict, import-linter"
	@echo "make bench   the speed tables of README (some forty minutes)"
	@echo "make chaos   a gateway under load while everything around it breaks (three minutes)"
	@echo "make fuzz-gateway    5,000 generated requests through a gateway (CASES=)"
	@echo "make bench-gateway   the gateway's cost beside a bare proxy's and LiteLLM's (minutes)"
	@echo "make bench-tools     our load tester beside aiperf, the planner beside real memory bills (minutes; ARGS=--quick)"
	@echo "make bench-sim       the simulator beside a live node, on the same traffic (half an hour)"
	@echo "make test-vllm       real vLLM and llama.cpp servers behind the gateway (gigabytes)"
	@echo "make bench-desk   the desk, simulated and on the real server (over an hour; ARGS=--help)"

$(VENV)/.run: requirements/run.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements/run.lock
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: requirements/dev.lock $(VENV)/.run
	$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements/dev.lock
	@touch $@

serve: $(VENV)/.run
	$(BIN)/kvota serve "$(MODEL)" --host $(HOST) --port $(PORT) $(ARGS)

# Tests wait for servers as often as they compute. Those of one file share what they have started.
# A process that ends (a test that hangs ends it) is not replaced: its test would run again and again.
test: $(VENV)/.dev lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --max-worker-restart 0

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.run .venv-bench/.done
	$(BIN)/python -m bench.speed $(ARGS)

bench-desk: $(VENV)/.run
	$(BIN)/python -m bench.desk $(ARGS)

.PHONY: bench-gateway bench-sim bench-tools chaos fuzz-gateway test-vllm

bench-gateway: $(VENV)/.dev .venv-litellm/.done
	$(BIN)/python -m bench.gateway $(ARGS)

bench-tools: $(VENV)/.dev .venv-aiperf/.done .venv-vllm/.done
	status=0; \
	  $(BIN)/python -m bench.tester_vs_aiperf $(ARGS) || status=1; \
	  $(BIN)/python -m bench.plan_vs_measured $(ARGS) || status=1; \
	  exit $$status

bench-sim: $(VENV)/.run
	$(BIN)/python -m bench.sim_vs_live $(ARGS)

chaos: $(VENV)/.dev
	$(BIN)/python -m bench.chaos --minutes 3 $(ARGS)

fuzz-gateway: $(VENV)/.dev
	KVOTA_FUZZ_CASES=$(or $(CASES),5000) $(BIN)/python -m pytest -n 0 tests/gateway/test_fuzz.py $(ARGS)

test-vllm: $(VENV)/.dev .venv-vllm/.done .venv-llamacpp/.done
	$(BIN)/python -m scripts.real_backends $(ARGS)

# LiteLLM is a yardstick: where it cannot be installed, its row says so.
.venv-litellm/.done: requirements/litellm.lock
	test -x .venv-litellm/bin/python || $(PYTHON) -m venv .venv-litellm
	.venv-litellm/bin/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements/litellm.lock \
	  || echo "LiteLLM cannot be installed here; its row will say so"
	@touch $@

.venv-aiperf/.done: requirements/aiperf.lock
	test -x .venv-aiperf/bin/python || $(PYTHON) -m venv .venv-aiperf
	.venv-aiperf/bin/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements/aiperf.lock
	@touch $@

.venv-llamacpp/.done: requirements/llamacpp.lock
	test -x .venv-llamacpp/bin/python || $(PYTHON) -m venv .venv-llamacpp
	.venv-llamacpp/bin/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements/llamacpp.lock
	@touch $@

# vLLM wants three packages that it cannot start with on a machine without a GPU, so they go again.
.venv-vllm/.done: requirements/vllm.in
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install -q --disable-pip-version-check -r requirements/vllm.in
	.venv-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

.venv-bench/.done: requirements/bench.lock
	test -x .venv-bench/bin/python || $(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements/bench.lock
	@touch $@

golden: .venv-golden/.done
	.venv-golden/bin/python -m scripts.golden

.venv-golden/.done: requirements/golden.in
	test -x .venv-golden/bin/python || $(PYTHON) -m venv .venv-golden
	.venv-golden/bin/python -m pip install -q --disable-pip-version-check -r requirements/golden.in
	@touch $@

lock:
	for name in run dev bench litellm llamacpp aiperf; do \
	  uv pip compile -q --universal --generate-hashes --python-version 3.11 \
	    --custom-compile-command 'make lock' requirements/$$name.in -o requirements/$$name.lock || exit 1; \
	done

clean:
	rm -rf $(VENV) .venv-aiperf .venv-bench .venv-golden .venv-litellm .venv-llamacpp .venv-vllm .mypy_cache .ruff_cache .pytest_cache .hypothesis
