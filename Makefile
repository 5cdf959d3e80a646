# make example | test | test-gpu | sanitize | figures | lint | build | inplace | clean
#
# Without PYTHON=..., these make .venv and install what they need into it (first run: minutes).
# With PYTHON=/path/to/python they use that environment as it is and install nothing.
# CUDA=OFF leaves the CUDA part out, CUDA=ON fails without it; the default takes it where it can.

SHELL := /bin/bash
.DEFAULT_GOAL := test
.PHONY: example test test-gpu sanitize figures lint build inplace clean

# The oldest supported JAX: the compiled module runs on this one and on newer ones.
JAX_VERSION := 0.11.2
CUDA ?= AUTO
export SKBUILD_CMAKE_DEFINE := ENTWINE_WITH_CUDA=$(CUDA)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

NVCC := $(firstword $(shell command -v nvcc) $(wildcard $(CUDA_HOME)/bin/nvcc) \
          $(wildcard /usr/local/cuda/bin/nvcc))
with_cuda := $(if $(filter OFF,$(CUDA)),,$(NVCC))
tools := .venv/build-tools $(if $(with_cuda),.venv/cuda-tools)
cuda_key := build/cuda-$(CUDA)-$(if $(with_cuda),nvcc,none)
# Never into a file that a process has mapped.
copy_module = cp --remove-destination build/cp312-*/_ffi.abi3.so build/cp312-*/_ffi.pyi entwine_jax/
# Registers and shared memory of every kernel stand in the log; on screen only what was built.
logged = @echo 'Building entwine_jax (log: build/log.txt)'; \
  $(1) > build/log.txt 2>&1 || { cat build/log.txt; exit 1; }; grep 'entwine_jax: ' build/log.txt
HAS_GPU := $(shell nvidia-smi >/dev/null 2>&1 && echo yes)

ifdef PYTHON
python := $(PYTHON)
ready :=
else
python := .venv/bin/python
ready := build/installed
endif

example: $(ready)
	PYTHONPATH=. $(python) examples/sharded_transformer_layer.py

test: $(ready) lint
	$(python) -m pytest

test-gpu: $(ready)
	$(python) -m pytest -m gpu

sanitize: $(ready)
	$(python) tools/sanitize.py

# README's tables for RANKS GPUs, the times behind them beside it.
figures: $(ready)
	@test -n '$(RANKS)' || { echo 'make figures RANKS=2: how many GPUs?' >&2; exit 2; }
	@mkdir -p build/figures
	for op in ar rs ag; do PYTHONPATH=. $(python) -m entwine_jax bench --op $$op --ranks $(RANKS) \
	  --rounds 3 --markdown README.md --json build/figures/$$op-$(RANKS).json || exit; done
	PYTHONPATH=. $(python) examples/benchmark_layer.py --ranks $(RANKS) --rounds 3 \
	  --markdown README.md --json build/figures/layer-$(RANKS).json

lint: $(ready)
	@tools/lint $(python)

build: $(ready)

# Puts the compiled module into entwine_jax/, where a run from the source tree finds it.
inplace: $(cuda_key)
	$(call logged,$(python) -m pip wheel -v --no-build-isolation --no-deps -w build/wheels .)
	@$(copy_module)

clean:
	rm -rf .venv build entwine_jax/_ffi.*

# --- the project's own environment -------------------------------------------------------------

.venv/made:
	tools/make_venv .venv
	@touch $@

# Build tools come first, as the build runs without isolation: it then sees this JAX, and CMake's
# cache stays valid.
.venv/build-tools: .venv/made Makefile
	$(python) -m pip install --quiet cmake ninja nanobind==3.1.0 scikit-build-core==1.1.2 \
	  'jax$(if $(HAS_GPU),[cuda13])==$(JAX_VERSION)'
	@touch $@

# Of CUTLASS only the headers are used, so its own dependencies are left out. cuobjdump, with which
# a test looks at the device code, does not come with every toolkit.
.venv/cuda-tools: .venv/build-tools
	$(python) -m pip install --quiet --no-deps nvidia-cutlass==4.2.0.0 nvidia-cuda-cuobjdump
	@touch $@

build/installed: $(tools) $(cuda_key) pyproject.toml CMakeLists.txt cmake/cuda.cmake \
    entwine_jax/version.py $(shell find ffi -type f)
	$(call logged,$(python) -m pip install -v --no-build-isolation -e '.[test]')
	@$(copy_module)
	@touch $@

# Changes when the choice of CUDA does; CMake must then look again.
$(cuda_key):
	@mkdir -p build
	@rm -f build/cuda-* build/*/CMakeCache.txt
	@touch $@
