# Shortcuts for CMake, set-up, tests and gates; `make help` lists them. CMakeLists.txt has the build.

PYTHON := .venv/bin/python
JOBS ?= $(shell nproc)
# The CUDA backend: AUTO (where nvcc and an NVIDIA driver are found), ON or OFF.
CUDA ?= AUTO
# Compute capabilities to build CUDA code for, such as 80;90; empty: those of the GPUs here; all.
ARCHITECTURES ?=
# Where `make install` puts the library, beneath DESTDIR if that is given.
PREFIX ?= /usr/local
# Warnings as errors, as in .ci/run: the gates then do not compile again what is in build.
WERROR ?= OFF
# Where set-up has fetched the header of ONNX Runtime, the operators for it are built, too.
ORT_HEADER := build/onnxruntime/include/onnxruntime_c_api.h
EXAMPLE := examples/data/minilm.safetensors
LM_MODEL := examples/lm/model.safetensors
LM_TEXT := examples/data/text.txt
# What Python tests need to find what was built.
TEST_VARIABLES := FDMA_LIBRARY=$(CURDIR)/build/libfdma.so FDMA_TOOL=$(CURDIR)/build/fdma PYTHONPATH=python \
	FDMA_ORT_LIBRARY=$(CURDIR)/build/libfdma_ort.so FDMA_JAX_LIBRARY=$(CURDIR)/build/libfdma_jax.so \
	OMP_WAIT_POLICY=passive
# The part that `make full` runs; see tools/gates/check_full.py.
PART ?= all

.PHONY: build install setup setup-format setup-tests setup-site setup-gates demo test site gates run-gates full format bench clean help
.NOTPARALLEL: # apt-get and pip must not run twice at a time

build: setup ## build build/libfdma.so, build/libfdma.a and the command build/fdma (CUDA=OFF: without CUDA kernels)
	@cmake --preset release -DFDMA_CUDA=$(CUDA) "-DFDMA_CUDA_ARCHITECTURES=$(ARCHITECTURES)" \
		-DFDMA_WERROR=$(WERROR) -DFDMA_ORT=$$(test -e $(ORT_HEADER) && echo ON || echo OFF) >/dev/null
	@cmake --build --preset release -j $(JOBS)

install: $(if $(wildcard build/build.ninja),,build) ## install what was built: PREFIX=DIR, DESTDIR=DIR
	@cmake --build --preset release -j $(JOBS) --target fdma_installed
	@DESTDIR="$(DESTDIR)" cmake --install build --prefix "$(PREFIX)"

setup: ## install what the build needs and this machine does not have
	@tools/setup.sh

setup-format:
	@tools/setup.sh format

setup-tests:
	@tools/setup.sh tests

setup-site:
	@tools/setup.sh site

setup-gates:
	@tools/setup.sh gates

demo: ## build, then attend over the keys of a real model, and let a language model write
	@echo "== set-up: compiler, cmake, ninja, cJSON"
	@$(MAKE) --no-print-directory setup
	@echo "== build: library and command"
	@cmake --preset release $(if $(wildcard build/build.ninja),,-DFDMA_CUDA=OFF) >/dev/null
	@cmake --build --preset release -j $(JOBS) --target fdma_installed
	@echo "== bidirectional, as the model does: build/fdma attend $(EXAMPLE) --window 64"
	@build/fdma attend $(EXAMPLE) --window 64
	@echo "== causal: build/fdma attend $(EXAMPLE) --window 64 --causal"
	@build/fdma attend $(EXAMPLE) --window 64 --causal
ifneq ($(wildcard $(LM_MODEL)),)
	@cmake --build --preset release -j $(JOBS) --target lm
	@echo "== a language model of 10 MB with a cache of bounded size: build/examples/lm $(LM_MODEL)"
	@build/examples/lm $(LM_MODEL)
	@echo "== what it remembers: build/examples/lm $(LM_MODEL) --remember 7000 --prompt-file $(LM_TEXT)"
	@build/examples/lm $(LM_MODEL) --remember 7000 --prompt-file $(LM_TEXT)
endif

# Most tests keep one core busy: as many processes of Python tests, and of C tests, as there are cores.
test: setup-tests build ## run the tests, those in C and those in Python
	@status=0; \
	ctest --test-dir build --output-on-failure --no-tests=error -j $(JOBS) >build/ctest.log 2>&1 & c_tests=$$!; \
	trap 'kill $$c_tests' INT TERM; \
	echo "== Python tests, while those in C run"; \
	$(TEST_VARIABLES) $(PYTHON) -m pytest tests/python research/tests/test_smoke.py -q \
		-n $(JOBS) --maxprocesses 8 --dist loadfile || status=1; \
	echo "== C tests"; \
	wait $$c_tests || status=1; \
	cat build/ctest.log; \
	exit $$status

site: setup-site build ## build the documents as a site with search, build/site/html
	@tools/site/build.sh

gates: setup-gates build run-gates ## check form: words, includes, sizes, symbols, warnings, sanitizers, valgrind, NEON, CUDA, fuzzers

run-gates:
	@tools/gates/run.sh

full: setup-gates build ## run whole what `test` and `gates` take a sample of; PART=NAME: that part alone (tools/gates/check_full.py)
	@FDMA_FULL=1 $(TEST_VARIABLES) $(PYTHON) tools/gates/check_full.py --run $(PART)

format: setup-format ## format all C and Python
	@tools/gates/format.sh --fix

bench: build ## run the benchmarks; BENCH holds options, such as BENCH="forward/dense --threads 1"
	@build/fdma bench $(BENCH)

clean: ## remove everything that was built
	@rm -rf build

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.* ## /\1\t/p' Makefile | expand -t 10
