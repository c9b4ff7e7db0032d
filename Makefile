# Every target sets up what it needs, from nothing; what has not changed is not done again.
#
#   make demo          the KV pages of real requests go from a prefill to a decode process
#   make test          everything that a change must pass but the engines (test-vllm)
#   make lint          ruff, mypy, pyright over a user's program, clang-format
#   make unit          the Python tests alone; ARGS="tests/unit -k layout" goes to pytest
#   make native-test   C++ tests under ASan+UBSan and, those that have threads, TSan (or one: native-test-asan,
#                      -tsan, -plain, -clang); GPU_TESTS=ON with the emulated GPU's own and the kernels' PTX; CTEST="-R wire"
#   make fuzz          FUZZ_RUNS altered frames into the decoders and sessions, under ASan and UBSan
#   make test-torch    conversions beside torch's, which is installed into an environment of its own
#   make nixl-plugin   libplugin_KVXFER.so, a backend of NIXL's own agent
#   make test-deploy   the chart, alert rules and units of deploy/; make image, image-cuda: the daemon's container
#   make docs          the documentation's site in build/docs, and the tests that hold it
#   make test-nixl     the facade of NIXL's interface beside NIXL itself
#   make test-rdma     tests that need RDMA, in a machine under qemu with two Soft-RoCE devices;
#                      RDMA_TESTS="slow or not slow" as at night
#   make test-page     the daemon's page for people in a real Chromium
#   make test-vllm     the connector under real vLLM engines, on the CPU, in an environment of their own;
#                      VLLM_TESTS="slow or not slow" as at night, with more pairs of engines
#   make demo-vllm     a prefill and a decode engine with a router between: the tokens of one engine?
#   make cluster       two nodes with a daemon and an engine each, router, etcd and Prometheus, as processes in
#                      networks of their own (root); ARGS=--once ends after some prompts
#   make test-sglang   SGLang's transfer backend under real servers, on the CPU, and prompts of vLLM's that go on in
#                      SGLang; SGLANG_TESTS as VLLM_TESTS above
#   make demo-sglang   a prefill and a decode server with SGLang's router between: the tokens of one server?
#   make test-vllm-next  test-vllm under the newest vLLM, over the kernels of the other
#   make unit-asan     the Python tests over bindings and core under ASan and UBSan
#   make unit-pythons  the Python tests under PYTHONS="python3.12 python3.13", as far as they are there
#   make test-versions  this version beside an older one, and one that it refuses: built of their commits
#   make test-slow, test-layouts  the slow Python tests; a million layouts (LAYOUTS=)
#   make nightly       all stages whole, then slow tests, clang, other Pythons, torch, layouts, all engines, a long fuzz run
#   make bench-serving-setup  vLLM and SGLang for the CPU, and NIXL beside them, for `kvxfer bench serving`
#   make baselines     other software for `kvxfer bench compare`, each in an environment of its own
#   make instructions  instructions for each page and each transfer, counted by callgrind
#   make gpu-check     on a machine with a GPU: the tests that need one, then figures; ARGS goes to the latter
#   make wheel         dist/*.whl
#   make release       dist/: sdist, manylinux wheel, bill of materials, provenance, digests; make test-release holds it
#   make interface     what others rely on of this version, written down: tests/release/interface.json
#   make constraints   what tests install, chosen anew: tests/constraints.txt
#   make clean         removes what the others made
#
# PYTHON=python3.12 VENV=.venv312 tries another interpreter.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= $(shell nproc)
# Python tests at a time: half of what they take is waiting, for processes that start and peers that fall silent.
WORKERS ?= $(shell expr $(JOBS) \* 2)
FUZZ_RUNS ?= 1000000
FUZZ_SEED ?= $(KVXFER_SEED)
ARGS ?=
# The emulated GPU and the translator of PTX: where they or native/gpu changed, and at night.
GPU_TESTS ?= OFF
# Others than PYTHON and CXX, at night.
PYTHONS ?= python3.12 python3.13
CLANG ?= clang++-14
CTEST ?=
VLLM_TESTS ?= not slow
SGLANG_TESTS ?= not slow
RDMA_TESTS ?= not slow

# Of all that is random in the tests of one run: `make test KVXFER_SEED=N` is run N again (docs/testing.md).
ifndef KVXFER_SEED
KVXFER_SEED := $(shell od -An -N4 -tu4 /dev/urandom | tr -d ' ')
endif
export KVXFER_SEED

COMMA := ,
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
# native/core/engine and native/core/runtime are folders beside engine.cpp and runtime.cpp, and no programs to be made of them.
MAKEFLAGS += --no-builtin-rules

PY := $(VENV)/bin/python
export PATH := $(abspath $(VENV))/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Most modules are never imported; the others are compiled then, and kept, whatever a container's image says: each
# start of a command would else take three times as long.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(PY) -m pip install --quiet --no-compile
# What was compiled before, in whichever folder, is not compiled again where ccache is installed.
CMAKE_CXX_COMPILER_LAUNCHER ?= $(shell command -v ccache 2>/dev/null)
export CMAKE_CXX_COMPILER_LAUNCHER
export CCACHE_BASEDIR ?= $(CURDIR)
export CCACHE_NOHASHDIR ?= 1
# Its condition for precompiled headers.
export CCACHE_SLOPPINESS ?= pch_defines,time_macros
# Environments beside the first: their table is .ci/environments.toml.
ENVIRONMENT := PYTHON=$(PYTHON) VENV=$(VENV) .ci/environment
# Two makes in one tree take turns.
LOCK := mkdir -p build && exec 9>build/.lock && { flock 9 2>/dev/null || true; };

NATIVE_SOURCES := CMakeLists.txt $(shell find native bench/native -type d -o -name '*.cpp' -o -name '*.h' \
                    -o -name CMakeLists.txt)
CLANG_FORMATTED = $$(find native bench/native tests/native examples -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

# Prints what pyproject.toml requires, with the extras that are named, and `build` for the build itself.
define REQUIREMENTS
import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))
extras = project["project"]["optional-dependencies"] | {"build": project["build-system"]["requires"]}
print("\n".join(sum((extras[name] for name in sys.argv[1:]), project["project"]["dependencies"])))
endef
export REQUIREMENTS
# What is installed for tests, to the version; users have the ranges of pyproject.toml.
CONSTRAINTS := tests/constraints.txt

# `docs` is a folder, too.
.PHONY: docs
.PHONY: demo cluster demo-vllm demo-sglang bench-serving-setup test lint unit unit-asan unit-pythons native-test test-torch test-nixl nixl-plugin test-rdma test-page test-deploy test-release image image-cuda test-vllm test-vllm-next test-sglang test-versions test-slow test-layouts fuzz nightly instructions baselines gpu-check wheel release interface constraints clean setup
.PHONY: $(foreach build,plain asan tsan clang,native-build-$(build) native-test-$(build))

# -- Set-up ----------------------------------------------------------------------------------------

setup: $(VENV)/module.stamp

$(VENV)/venv.stamp:
	@$(LOCK) if [ -e $@ ]; then exit 0; fi; \
	PYTHON=$(PYTHON) .ci/system-packages; \
	echo "making a Python environment in $(VENV)"; \
	$(PYTHON) -m venv $(VENV); touch $@

# cmake and ninja come from the system where it has them.
$(VENV)/deps.stamp: pyproject.toml $(CONSTRAINTS) $(VENV)/venv.stamp
	@$(LOCK) if [ $@ -nt pyproject.toml ] && [ $@ -nt $(CONSTRAINTS) ]; then exit 0; fi; \
	echo "installing dependencies into $(VENV)"; \
	tools=""; for tool in cmake ninja; do command -v $$tool >/dev/null || tools="$$tools $$tool"; done; \
	$(PIP) -c $(CONSTRAINTS) $$tools -r <($(PY) -c "$$REQUIREMENTS" build cli); touch $@

$(VENV)/dev.stamp: $(VENV)/deps.stamp
	@$(LOCK) if [ $@ -nt $(VENV)/deps.stamp ]; then exit 0; fi; \
	PYTHON=$(PYTHON) .ci/system-packages tests; \
	echo "installing development dependencies into $(VENV)"; \
	$(PIP) -c $(CONSTRAINTS) -r <($(PY) -c "$$REQUIREMENTS" dev control bench); touch $@

# Editable: Python files are used where they are; the build folder is kept, so this is incremental.
$(VENV)/module.stamp: $(NATIVE_SOURCES) $(VENV)/deps.stamp
	@$(LOCK) touch build/.before; \
	echo "building the native modules: about $$((200 / $(JOBS))) s the first time, on $(JOBS) processors"; \
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PY) -m pip install --verbose --no-deps --no-build-isolation --editable . 2>&1 \
	  | $(PY) .ci/build_progress.py build/module.log || { cat build/module.log; exit 1; }; \
	touch -r build/.before $@

# -- What one runs ---------------------------------------------------------------------------------

demo: $(VENV)/module.stamp
	@echo "A prefill process pushes the KV pages of 24 real requests to a decode process, over shared memory and over TCP."
	@echo "The same with --details has the table of all stages, beside this machine's limit."
	$(VENV)/bin/kvxfer bench handover --transport shm
	$(VENV)/bin/kvxfer bench handover --transport tcp

# One after the other: what pytest says stands at the end.
test:
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory native-test
	@$(MAKE) --no-print-directory unit

lint: $(VENV)/dev.stamp $(VENV)/module.stamp
	@# A variable that a rule names before it is set is empty there.
	@! $(MAKE) --no-print-directory --warn-undefined-variables --dry-run clean 2>&1 | grep "undefined variable"
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/clang-format --dry-run -Werror $(CLANG_FORMATTED)
	$(VENV)/bin/mypy
	$(VENV)/bin/basedpyright --pythonpath $(PY) --project tests/typing

unit: $(VENV)/dev.stamp $(VENV)/module.stamp
	$(PY) -m pytest -m "not slow and not gpu and not rdma and not browser" -n $(WORKERS) --dist worksteal $(ARGS)

# The Python tests over modules that are built under ASan and UBSan, in an environment that has no more of its own.
# The interpreter is not built so: the run-time libraries come before it.
ASAN_VENV := .venv-asan
ASAN_PRELOAD = $(foreach library,libasan.so libstdc++.so.6,$(shell $(or $(CXX),c++) -print-file-name=$(library)))

$(ASAN_VENV)/module.stamp: $(NATIVE_SOURCES) $(VENV)/dev.stamp
	@$(LOCK) touch build/.before; [ -e $(ASAN_VENV) ] || $(PYTHON) -m venv $(ASAN_VENV); \
	sites=$$(for venv in $(VENV) $(ASAN_VENV); do $$venv/bin/python -c "import site; print(site.getsitepackages()[0])"; done); \
	set -- $$sites; echo $$1 > $$2/first.pth; \
	echo "building the native modules under ASan and UBSan"; \
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(ASAN_VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation \
	  -C build-dir=build/asan-module -C cmake.build-type=None -C cmake.define.CMAKE_CXX_FLAGS=-O1 \
	  -C cmake.define.KVXFER_SANITIZE=address$(COMMA)undefined --editable .; \
	touch -r build/.before $@

# Commands, documents, types, packages and the kernels' compiler say nothing of the bindings. Processes die of a
# signal as they do elsewhere, and what is freed is kept back in less memory than tests of memory allow.
unit-asan: $(ASAN_VENV)/module.stamp
	LD_PRELOAD="$(ASAN_PRELOAD)" ASAN_OPTIONS=detect_leaks=0:handle_segv=0:quarantine_size_mb=8 \
	  $(ASAN_VENV)/bin/python -m pytest \
	  -m "not slow and not gpu and not rdma" -n $(WORKERS) tests/unit tests/fault tests/property --ignore tests/unit/bench \
	  $(addprefix --ignore tests/unit/test_,documents.py packaging.py typing.py) \
	  $(addprefix --ignore tests/unit/gpu/test_,availability.py cubins.py) $(ARGS)

# Under other interpreters, of those that there are.
unit-pythons:
	@for python in $(PYTHONS); do \
	  if $$python -c "" 2>/dev/null; then \
	    $(MAKE) --no-print-directory unit PYTHON=$$python VENV=.venv-$$(basename $$python); \
	  else echo "no $$python: not run under it"; fi; done

# g++ 12's TSan knows fewer address layouts than newer kernels draw; where it can be had, a fixed one.
FIXED_LAYOUT = $(shell setarch -R true 2>/dev/null && echo setarch -R)

native-test: native-test-asan native-test-tsan

# $(1) name, $(2) sanitizers, $(3) optimization, $(4) with the GPU's tests, $(5) compiler
define NATIVE_TEST
native-build-$(1): $(VENV)/dev.stamp
	@$$(LOCK) cmake -S . -B build/$(1) -G Ninja -DCMAKE_BUILD_TYPE=None "-DCMAKE_CXX_FLAGS=$(3)" \
	  -DKVXFER_NATIVE_TESTS=ON -DKVXFER_SANITIZE=$(2) -DKVXFER_GPU_TESTS=$(4) \
	  $(if $(5),-DCMAKE_CXX_COMPILER=$(5)) >/dev/null; \
	cmake --build build/$(1) --parallel $(JOBS)

native-test-$(1): native-build-$(1)
	@echo "native tests, $(1): KVXFER_SEED=$(KVXFER_SEED)"
	cd build/$(1) && $$(FIXED_LAYOUT) ctest -j $(JOBS) --output-on-failure $(CTEST)
endef
$(eval $(call NATIVE_TEST,plain,,-O2 -g1,ON,))
$(eval $(call NATIVE_TEST,asan,address$(COMMA)undefined,-O1,$(GPU_TESTS),))
$(eval $(call NATIVE_TEST,tsan,thread,-O1,$(GPU_TESTS),))
$(eval $(call NATIVE_TEST,clang,,-O1,OFF,$(CLANG)))
native-build-clang: clang
.PHONY: clang
clang:
	@command -v $(CLANG) >/dev/null || { [ $$(id -u) = 0 ] && command -v apt-get >/dev/null && \
	  apt-get install -qq -y $(subst ++,,$(CLANG)) >/dev/null; } || { echo 'install clang 14 or later, please: CLANG=clang++-16'; exit 1; }

# In one boot of a machine that has RDMA devices (tests/rdma/machine.py): suites with tests marked rdma.
# build/rdma is the one folder of the host that is written to.
RDMA_SUITES := tests/rdma
# A backend of NIXL's own agent by itself; wheels have it, too.
nixl-plugin: $(VENV)/deps.stamp
	@$(LOCK) cmake -S . -B build/nixl-plugin -G Ninja -DCMAKE_BUILD_TYPE=Release > /dev/null
	cmake --build build/nixl-plugin --target plugin_KVXFER --parallel $(JOBS)
	@echo "NIXL_PLUGIN_DIR=$(CURDIR)/build/nixl-plugin/native has libplugin_KVXFER.so"

# NIXL itself is what the facade is held to; without it the tests that compare are left out, as in `make unit`.
test-nixl: $(VENV)/dev.stamp $(VENV)/module.stamp
	@$(ENVIRONMENT) nixl
	$(PY) -m pytest tests/nixl $(ARGS)

test-rdma: $(VENV)/dev.stamp $(VENV)/module.stamp
	@.ci/rdma-packages
	$(PY) -m tests.rdma.machine --files build/rdma --limit-s 1800 -- $(PY) -m pytest -m "rdma and ($(RDMA_TESTS))" \
	  -o cache_dir=build/rdma/pytest $(RDMA_SUITES) $(ARGS)

# The daemon's page in a real Chromium, without a screen; KVXFER_SCREENSHOTS=folder keeps pictures of it.
test-page: $(VENV)/dev.stamp $(VENV)/module.stamp
	@.ci/browser-packages
	$(PY) -m pytest -m browser tests/control tests/bench $(ARGS)

test-deploy: $(VENV)/dev.stamp $(VENV)/module.stamp
	@$(ENVIRONMENT) deploy
	.deploy/bin/python -m pytest tests/deploy $(ARGS)

# The documentation's site, whose warnings are errors.
docs: $(VENV)/dev.stamp $(VENV)/module.stamp
	@$(ENVIRONMENT) docs
	NO_MKDOCS_2_WARNING=1 .docs/bin/python -m mkdocs build --quiet --strict
	.docs/bin/python -m pytest tests/docs $(ARGS)

# Of the node's daemon, by podman or buildah.
BUILD_IMAGE := $$(command -v podman || command -v buildah || echo docker) build -f deploy/container/Containerfile
image:
	$(BUILD_IMAGE) -t kvxfer .
image-cuda:
	$(BUILD_IMAGE) --build-arg EXTRAS=cli,control,etcd,otel,gpu -t kvxfer:cuda .

# Each fuzz_NAME with its corpus; `--seed S --runs 1` is one run again.
fuzz: native-build-asan
	build/asan/tests/native/sessions --file fuzz_wire tests/native/corpus/wire --seed $(FUZZ_SEED) --runs $(FUZZ_RUNS)

instructions: native-build-plain $(VENV)/module.stamp
	@command -v valgrind >/dev/null || { [ $$(id -u) = 0 ] && command -v apt-get >/dev/null && \
	  apt-get install -qq -y valgrind >/dev/null; } || { echo 'install valgrind, please'; exit 1; }
	$(VENV)/bin/kvxfer bench instructions --format json

test-torch: $(VENV)/dev.stamp $(VENV)/module.stamp
	@$(ENVIRONMENT) torch
	.torch/bin/python -m pytest tests/property/test_conversion.py tests/unit/layout/test_tensor.py $(ARGS)
	.torch/bin/python -m pytest tests/examples -k "torch or unequal" $(ARGS)

# Importing vLLM, and starting an engine that cannot be forked, takes a minute: pytest's own bounds are wider there.
# One test at a time: engines of two workers are more than 24 GB.
test-vllm: $(VENV)/dev.stamp $(VENV)/module.stamp
	@$(ENVIRONMENT) vllm vllm-proxies lmcache
	@.vllm/bin/python -c "import kvxfer, vllm" 2>/dev/null || .vllm/bin/python -c "import kvxfer, vllm"
	.vllm/bin/python -m pytest tests/vllm -m "$(VLLM_TESTS)" -o faulthandler_timeout=590 $(ARGS)

test-vllm-next: $(VENV)/dev.stamp $(VENV)/module.stamp
	@$(ENVIRONMENT) vllm-next vllm-next-proxies
	VLLM_TARGET_DEVICE=cpu .vllm-next/bin/python -m pytest tests/vllm -m "$(VLLM_TESTS)" \
	  -o faulthandler_timeout=590 $(ARGS)

# One test at a time, as above.
test-sglang: $(VENV)/dev.stamp $(VENV)/module.stamp
	@$(ENVIRONMENT) sglang
	@.sglang/bin/python -W ignore -c "import kvxfer, sglang" 2>/dev/null || .sglang/bin/python -c "import kvxfer, sglang"
	.sglang/bin/python -m pytest tests/sglang tests/between -m "$(SGLANG_TESTS)" -o faulthandler_timeout=590 $(ARGS)

demo-sglang: $(VENV)/dev.stamp $(VENV)/module.stamp
	@$(ENVIRONMENT) sglang
	.sglang/bin/python -m kvxfer.bench demo --engine sglang $(ARGS)

# With the programs of the distribution's packages, which are not installed for it.
cluster: $(VENV)/dev.stamp $(VENV)/module.stamp
	@$(ENVIRONMENT) vllm
	.vllm/bin/python -m kvxfer.bench cluster --etcd "$$(.ci/program etcd-server etcd)" \
	  --prometheus "$$(.ci/program prometheus prometheus)" $(ARGS)

demo-vllm: $(VENV)/dev.stamp $(VENV)/module.stamp
	@$(ENVIRONMENT) vllm
	.vllm/bin/python -m kvxfer.bench demo $(ARGS)

# The oldest commit whose frames are this version's, and the newest of those that it cannot talk to (protocol 5).
# When the protocol changes OLDER stays, as long as its protocol is spoken.
OLDER := d453aaf68023b64e7ccf7994a2082878f6f67c64
APART := 8c5d936cf64818d7e38579f3f4560de26b9ad37b
VERSIONS := build/versions/older-$(OLDER).stamp build/versions/apart-$(APART).stamp

# In an environment of its own, beside the tests of the same commit.
build/versions/%.stamp: | $(VENV)/deps.stamp
	@$(LOCK) if [ -e $@ ]; then exit 0; fi; \
	name=$*; commit=$${name#*-}; folder=build/versions/$${name%%-*}; \
	git cat-file -e $$commit || { echo "no commit $$commit: it takes the whole history (git fetch --unshallow)"; exit 1; }; \
	echo "building kvxfer of $$commit"; rm -rf $$folder; mkdir -p $$folder/source; \
	git archive $$commit | tar -x -C $$folder/source; \
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PY) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir $$folder $$folder/source; \
	$(PYTHON) -m venv $$folder/venv; \
	$$folder/venv/bin/python -m pip install --quiet -c $(CONSTRAINTS) $$folder/*.whl; \
	mv $$folder/source/tests $$folder; rm -r $$folder/source; touch $@

test-versions: $(VERSIONS) $(VENV)/dev.stamp $(VENV)/module.stamp
	$(PY) -m pytest tests/fault/test_versions.py -m slow $(ARGS)

# Python tests that are slow; those of two versions are among them.
test-slow: $(VERSIONS) $(VENV)/dev.stamp $(VENV)/module.stamp
	$(PY) -m pytest -m "slow and not gpu and not rdma" $(ARGS)

LAYOUTS ?= 1000000
test-layouts: $(VENV)/dev.stamp $(VENV)/module.stamp
	KVXFER_PROPERTY_EXAMPLES=$(LAYOUTS) $(PY) -m pytest tests/property -n $(WORKERS) -o timeout=0 \
	  -o faulthandler_timeout=0 $(ARGS)

# Stage by stage, to the end whatever fails, with a summary; what passed at this commit is not run again.
nightly:
	@PYTHON=$(PYTHON) .ci/run --night $(ARGS)

# Other software, for `kvxfer bench compare` and `kvxfer bench serving`.
baselines:
	@$(ENVIRONMENT) nixl mooncake

bench-serving-setup: $(VENV)/module.stamp
	@$(ENVIRONMENT) vllm-nixl sglang-mooncake

# In an environment of its own, over what the machine has: where the GPUs are there may be no index.
gpu-check:
	@PYTHON=$(PYTHON) JOBS=$(JOBS) .ci/gpu-check $(ARGS)

# With the kernels' cubins in it, which need no GPU to be made.
wheel: $(VENV)/dev.stamp
	$(PY) -m kvxfer.gpu.prebuilt
	$(PY) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	ls -l dist

# What is handed out, of this interpreter's wheels; for others cibuildwheel builds of the same sdist (docs/versions.md).
# Times in the files are the commit's.
release: $(VENV)/dev.stamp $(VENV)/module.stamp
	@$(ENVIRONMENT) release
	@$(LOCK) rm -rf dist build/release; mkdir -p dist; export SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct); \
	$(PY) -m kvxfer.gpu.prebuilt; \
	$(PY) -c "import scikit_build_core.build as backend; backend.build_sdist('dist')" >build/sdist.log; \
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PY) -m pip wheel --quiet --no-deps --no-build-isolation \
	  --wheel-dir build/release .; \
	PATH=$(abspath .release/bin):$$PATH auditwheel repair --wheel-dir dist build/release/*.whl; \
	.release/bin/python -m tests.release.bill dist/*.whl; \
	.release/bin/python -m tests.release.provenance dist "make release"; \
	cd dist && sha256sum -- * >SHA256SUMS && ls -l

test-release: release
	.release/bin/python -m pytest tests/release $(ARGS)

interface: $(VENV)/dev.stamp $(VENV)/module.stamp
	$(PY) -m tests.release.interface

# One file for every Python that is served: uv chooses for all of them at once, and knows other indexes than
# PyPI by UV_DEFAULT_INDEX. What stands there goes up to the newest; it says nothing of who passes with it.
constraints: $(VENV)/venv.stamp
	$(PIP) --upgrade --target build/uv uv
	{ $(PY) -c "$$REQUIREMENTS" build cli dev control bench; printf 'cmake\nninja\n'; } | UV_CUSTOM_COMPILE_COMMAND="make constraints" \
	  build/uv/bin/uv pip compile --quiet --universal --python-version 3.11 --no-annotate --upgrade \
	  --output-file $(CONSTRAINTS) - >/dev/null

clean:
	rm -rf $(VENV) .venv-* kvxfer/gpu/cubins .baselines .deploy .release .docs .torch .vllm .vllm-next .sglang build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
