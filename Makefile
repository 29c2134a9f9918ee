# Everything runs in .venv, which `make setup` fills from constraints.txt. Only Python >= 3.11, make and g++ are needed.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
TRACE ?=
PIP_FLAGS ?=
WORKERS ?= 2
CLUSTERS ?= 2000
HISTORIES ?= 400
# So many processes share the tests; only those that watch how long something takes run after all others, by themselves.
PROCESSES ?= 2
# Integration tests wait for processes more than they compute.
WAITING ?= 3
ALONE := $(addprefix tests/integration/test_,abandoned.py memory_pressure.py overload.py)
# Of the longest tests a commit runs a third, another one for each commit; `make check test ROTATE=` runs all.
ROTATE ?= --rotate
PYTEST := $(BIN)/pytest -q -m "not slow and not gpu" $(ROTATE)
# loadgroup hands tests out one by one, so that the long ones do not pile up in one process; in the order of collection.
SPREAD = -n $(PROCESSES) --dist loadgroup --no-loadscope-reorder
export PYTHONUNBUFFERED = 1

.PHONY: setup kernels demo up test test-again test-sanitized test-clusters test-exactness test-families test-gpu-versions model-types check check-static check-tests fmt bench reproduce proto compose-check kubernetes-check install-check lock audit fuzz gpu-check docs pages clean

setup: $(VENV)/.ready kernels  ## install everything into .venv, and compile the kernels

kernels:  ## compile the engine's kernels, unless they are newer than their sources
	$(PYTHON) services/worker/engine/native/build.py

$(VENV)/.ready: pyproject.toml cluster/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt torch
	$(BIN)/pip install --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[dev]' -e cluster
	touch $@

demo: setup  ## replay a bursty trace on a local cluster and re-compute answers with transformers
	$(PY) -m benchmarks.demo --workers $(WORKERS) $(if $(TRACE),--trace $(TRACE))

up: setup  ## a cluster on this machine: make up MODEL=DIR
	$(BIN)/ballast up --workers $(WORKERS) $(if $(MODEL),--model $(MODEL))

check: setup  ## lint, types, architecture, unit and property tests; the two halves at the same time
	$(MAKE) --no-print-directory --jobs=2 check-static check-tests

check-static: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(PY)
	$(BIN)/lint-imports

check-tests: setup
	$(PYTEST) $(SPREAD) tests/property tests/unit

test: PROCESSES := $(WAITING)
test: setup  ## all tests: integration and golden ones too
	shared=0; $(PYTEST) $(SPREAD) $(addprefix --ignore=,$(ALONE) $(TESTED)) tests || shared=$$?; \
		alone=0; $(PYTEST) $(ALONE) || alone=$$?; \
		if [ $$shared -gt 1 ] || [ $$alone -gt 1 ]; then rm -rf .pytest_cache; fi; \
		exit $$((shared + alone))

# After a run that did not come to its end no failures are known, and nothing is run again.
test-again: setup  ## the tests that have just failed, one by one: at most three
	$(PY) -m tests.support.again

SANITIZED := out/libballast_kernels_sanitized.so
test-sanitized: setup  ## the kernels' tests on a build that AddressSanitizer and UBSan watch
	mkdir -p out
	$(PYTHON) services/worker/engine/native/build.py --required --sanitize address,undefined --out $(SANITIZED)
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
		BALLAST_KERNELS_LIBRARY=$(SANITIZED) $(BIN)/pytest -q --timeout=3000 \
		$(addprefix tests/unit/worker/engine/test_,native.py attention.py sampler.py)

test-clusters: setup  ## thousands of simulated clusters whose processes crash and stop while layouts change
	BALLAST_CLUSTER_SEEDS=$(CLUSTERS) $(BIN)/pytest -q -m slow $(SPREAD) tests/property/test_cluster_faults.py

# Twice as many processes as cores: what one thread may do while another waits for a core is hardly seen otherwise.
test-exactness: setup  ## 20,000 requests through random drops, merges and restores: no token may change
	BALLAST_EXACTNESS_HISTORIES=$(HISTORIES) $(BIN)/pytest -q -n $$((2 * $$(nproc))) --dist loadgroup \
		tests/integration/test_group_exactness.py

test-families: setup  ## every family of decoders against transformers; of the tests it is a fifth, by the commit
	$(BIN)/pytest -q $(SPREAD) tests/golden/test_families.py tests/golden/test_family_ranks.py

MODEL_TYPES := out/model-types.jsonl
model-types: setup  ## every model type of transformers: equal to it, refused, or wrong; the list goes into docs/your-model.md
	mkdir -p out && $(PY) -m tests.support.model_types --out $(MODEL_TYPES)
	$(PY) -m tests.support.model_types --out $(MODEL_TYPES) --write

# Interpreter=torch, oldest and newest; triton and numpy are what that torch wants. On Linux such a torch brings 4 GB of CUDA.
GPU_VERSIONS ?= python3.11=2.11.0 python3.13=2.14.1
GPU_TESTS = $(addprefix tests/unit/worker/,memory ranks test_put_back.py \
	$(addprefix links/test_,nccl.py devices.py cuda_copies.py) \
	$(addprefix engine/test_,attention_cuda.py attention_flashinfer.py decode_graphs.py fake_device.py fused_kernels.py kv_dtype.py \
		paged_kernel.py products.py quantised.py rehearsal.py runner.py sampler_gpu.py streams.py tensor_parallel.py upload.py))
test-gpu-versions: kernels  ## the GPU part of the tests, with the oldest and the newest Python and torch, in out/torch-*
	for pair in $(GPU_VERSIONS); do \
		at=out/torch-$${pair#*=} && $${pair%=*} -m venv $$at && grep -vE '^(torch|triton|numpy)==' constraints.txt > $$at/constraints.txt && \
		$$at/bin/pip install -q --disable-pip-version-check --no-cache-dir $(PIP_FLAGS) -c $$at/constraints.txt torch==$${pair#*=} -e '.[dev]' -e cluster && \
		$$at/bin/pytest -q -m "not slow and not gpu" $(SPREAD) $(GPU_TESTS) || exit 1; \
	done

fmt: setup
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

BENCHMARKS ?= transfers engine relay
bench: setup  ## measure links, engine and relay, one after the other: make bench BENCHMARKS=transfers
	failed=0; for name in $(BENCHMARKS); do $(PY) -m benchmarks.$$name || failed=1; done; exit $$failed

reproduce: setup  ## simulate the evaluation of the papers: figures and a table land in out/reproduce
	$(PY) -m benchmarks.reproduce $(if $(TRACE),--trace $(TRACE))

proto: setup  ## regenerate ballastpb/ from protos/
	$(PY) protos/generate.py

compose-check: setup  ## start what docker-compose.yml says, as local processes, and send requests through
	$(PY) -m deploy.compose_check

docs: pages  ## the site, in out/site; a link or a picture that leads nowhere fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

pages: setup  ## regenerate the pages that follow from the code
	$(PY) docs/generate.py

kubernetes-check: setup  ## start what deploy/kubernetes says, as local processes, and send requests through
	$(PY) -m deploy.kubernetes_check

PYTHONS ?= python3.11 python3.12 python3.13
install-check: setup  ## install the wheels into empty environments, on every Python: size, import, tests, ballast up
	$(PY) -m deploy.install_check --pythons $(PYTHONS)

# The commit before the one that raised the protocol's number last: it is within reach of today's services.
OLD ?= $(shell git log -1 --skip=1 --format=%h -- ballast/common/protocol.py)
upgrade-check: setup  ## each service of an older commit in today's cluster, and the other way round: make upgrade-check OLD=REF
	$(PY) -m benchmarks.upgrade $(OLD)
	for one in monitor planner dispatcher gateway; do \
		$(PY) -m benchmarks.upgrade $(OLD) --old $$one && $(PY) -m benchmarks.upgrade $(OLD) --old $$one --backward || exit 1; \
	done

TOOLS := out/tools
UV := $(TOOLS)/bin/uv pip compile -q --generate-hashes --no-header --no-annotate -c constraints.txt --python-version 3.11 \
	--python-platform x86_64-manylinux_2_28
lock:  ## what the images install, with hashes: after each change of constraints.txt or of what we depend on
	$(PYTHON) -m venv $(TOOLS) && $(TOOLS)/bin/pip install -q uv
	$(PYTHON) deploy/docker/requirements.py gateway,tls > $(TOOLS)/control.in && $(UV) $(TOOLS)/control.in -o deploy/docker/control.lock
	$(PYTHON) deploy/docker/requirements.py worker | grep -v ^torch > $(TOOLS)/worker.in && $(UV) $(TOOLS)/worker.in -o deploy/docker/worker.lock

audit:  ## known vulnerabilities of all versions that are pinned
	$(PYTHON) -m venv $(TOOLS) && $(TOOLS)/bin/pip install -q pip-audit
	$(TOOLS)/bin/pip-audit --strict --disable-pip --no-deps -r constraints.txt

MESSAGES ?= 1000000
fuzz: setup  ## messages and requests along their schemas, and garbage, to every service: make fuzz MESSAGES=100000
	$(PY) -m benchmarks.fuzz --messages $(MESSAGES)

gpu-check: setup  ## the first hour with a GPU: what works there and what it costs, on one page
	$(PY) -m benchmarks.gpu_check

clean:
	rm -rf $(VENV) out
