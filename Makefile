# Everything starts here: `make demo` or `make test` on a machine with Python, a C++ compiler and make.

# Which Python creates .venv, and which torch goes into it (a version, a path or an address, as pip takes it).
PYTHON ?= python3
TORCH ?= torch==2.13.0
# Extras of pyproject.toml to install.
EXTRAS ?= test,demo,plot
# 1 adds what GPUs need, and .venv remembers it; 0 ends that.
CUDA :=
# Compilers at a time (default: one for each core).
JOBS ?=
# What `make lab` measures.
LAB := --ranks 4 --rates 1gbit,100mbit --sizes 10MB,100MB --repeat 4 --budget 150 \
  --methods "horovod fp32,horovod fp16,headroom,none auto,fp16 auto,global_qsgd,marsit ring,marsit fold,marsit auto"
# Further arguments, such as ARGS="-k marsit -x" for the tests.
ARGS ?=

VENV := .venv/bin
# With sudo nothing is set up in another user's .venv: the files would belong to root. Nor are Python's own written.
READY := $(shell [ "$$(id -u)" = 0 ] && [ -x $(VENV)/python ] && [ "$$(stat -Lc %u .venv)" != 0 ] || echo environment)
ifdef SUDO_UID
export PYTHONDONTWRITEBYTECODE := 1
endif

.DEFAULT_GOAL := help
.PHONY: help setup environment dependencies demo test test-all lint format coverage fuzz sanitize cuda-compile bench bench-check lab
.PHONY: wheel docs clean clean-all FORCE

help:
	@echo "make setup      create .venv with torch, Horovod, the compiled modules and all tools (a second run is quick)"
	@echo "make demo       train with and without compression, and draw what it saves; does the set-up first;"
	@echo "                with root (make setup, then sudo make demo) over a slow link made on this machine"
	@echo "make test       run the tests, without the slow ones; does the set-up first"
	@echo "make test-all   run all tests"
	@echo "make lint       check format, types, stubs, spelling and links; make format fixes what can be fixed automatically"
	@echo "make coverage   run the tests and show what of the package they do not reach"
	@echo "make fuzz       feed random bytes to the C++ that reads what ranks send, SECONDS=60 for each target"
	@echo "make sanitize   run the kernel tests with sanitizers for addresses, undefined behaviour and threads; long"
	@echo "make cuda-compile    compile the CUDA kernels for one architecture; needs nvcc and no GPU"
	@echo "make bench      time kernels, one tensor and training steps on this machine, a few minutes"
	@echo "make bench-check     compare the speed of kernels and of a step with that of the commit before; some minutes"
	@echo "make lab        the same tensor between four hosts with slow links, made on this machine, some minutes;"
	@echo "                needs root: make setup first, then sudo make lab"
	@echo "make wheel      build the source distribution and a wheel into dist/, and try the wheel in a new environment"
	@echo "make docs       build the documentation as a site into build/site"
	@echo "make clean      remove what was compiled;  make clean-all removes .venv too"
	@echo
	@echo "Variables, with what they are now:"
	@printf '  %-28s %s\n' \
	  'TORCH=$(TORCH)' 'torch requirement: a version, the path of a wheel or an address' \
	  'PYTHON=$(PYTHON)' 'Python that creates .venv' \
	  'EXTRAS=$(EXTRAS)' 'extras of pyproject.toml to install (also: cuda, tensorboard)' \
	  'ARGS=$(ARGS)' 'further arguments for demo and test; bench takes only --out FOLDER; for lab, instead of its own' \
	  'CUDA=$(CUDA)' '1: for GPUs, see below; 0: no longer (default: as it was given last)' \
	  'JOBS=$(JOBS)' 'compilers at a time (default: one for each core); with 1, nothing runs side by side' \
	  'HVC_CUDA=0|1' 'never build the CUDA module, or insist on it (default: where there are a GPU and nvcc)' \
	  'HVC_SANITIZE=address' 'build the compiled modules with sanitizers' \
	  'HOROVOD_...' 'build options of Horovod itself, such as HOROVOD_GPU_OPERATIONS=NCCL'
	@echo
	@echo "make setup CUDA=1 adds CuPy, NCCL and the CUDA module, compiled with the machine's nvcc or with NVIDIA's packages"
	@echo "of one, and builds Horovod with NCCL operations where torch has CUDA:"
	@echo "  make setup CUDA=1"
	@echo "  make setup CUDA=1 TORCH=/path/to/torch.whl    any torch for CUDA 13"
	@echo
	@echo "Horovod is built once and kept in $${XDG_CACHE_HOME:-~/.cache}/horovod-compress/wheels."

setup: environment
	@echo "Ready. Use it with:  . .venv/bin/activate"

# What horovod-compress needs, without itself: in images, a layer that outlives changes of the sources.
dependencies: override UP_TO := .venv/horovod
dependencies: environment

# Quiet where nothing is to be done, so that every other target can ask for it. One make at a time: the lock ends with
# all that it has started. Stages that do not need each other run side by side.
environment:
	@mkdir -p build/setup; exec 9>build/setup/lock; \
	  flock -n 9 || { echo "waiting for another make that is working in this folder ..."; flock 9; }; \
	  rm -f build/setup/failed; $(MAKE) --no-print-directory -j$(if $(filter 1,$(JOBS)),1,2) SETTING_UP=1 \
	  TORCH='$(TORCH)' EXTRAS='$(EXTRAS)' CUDA='$(WITH_CUDA)' $(or $(UP_TO),.venv/package); status=$$?; \
	  [ $$status != 0 -a ! -e build/setup/failed ] || [ ! -d .venv ] || $(if $(filter 1,$(WITH_CUDA)),touch,rm -f) .venv/cuda-wanted; exit $$status

# As chosen now, or as chosen last.
WITH_CUDA = $(or $(CUDA),$(if $(wildcard .venv/cuda-wanted),1,0))

# ---- the stages of the set-up, for the make that `environment` starts ----------------------------
ifdef SETTING_UP

ifeq ($(filter 0 1,$(CUDA)),)
$(error CUDA is '$(CUDA)': expected 1, 0 or nothing, as in  make setup CUDA=)
else ifeq ($(CUDA)$(HVC_CUDA),10)
$(error CUDA=1 asks for the CUDA kernels and HVC_CUDA=0 forbids them: leave one of them out, or make setup CUDA=0)
else ifneq ($(shell echo '$(JOBS)' | grep -vxE '[1-9][0-9]*|'),)
$(error JOBS is '$(JOBS)': expected a number of compilers, as in  make setup JOBS=1)
endif

# Packages in the caller's PYTHONPATH are not in .venv, whatever pip would find.
IN_VENV := env -u PYTHONPATH HVC_JOBS=$(JOBS) $(if $(filter 1,$(CUDA)),HVC_CUDA=1) $(VENV)/python
SETUP := $(IN_VENV) tools/setup_env.py
# Bytecode of all of torch and SciPy is most of a minute's work on one core: Python makes what it imports.
# pip 24.1 and later say how far a download is without a terminal.
INSTALL := $(VENV)/python -m pip --disable-pip-version-check --no-input install --no-compile $$($(VENV)/python -c \
  'import pip; print("--progress-bar=raw" * (pip.__version__ >= "24.1"))')
# What a stage is made from, as a digest, which is written only where it differs. Times of files say nothing after a
# checkout or a copy.
DIGEST = sha256sum >$@.new; cmp -s $@.new $@ && rm $@.new || mv $@.new $@
PACKAGES := .venv/packages-$(subst $() ,-,$(EXTRAS))
# Whether .venv works, and is where it was made: its programs name their Python by its path.
WORKS := $(shell $(VENV)/python -c 'import pip' 2>/dev/null && \
  { [ ! -e .venv/location ] || [ "$$(cat .venv/location)" = "$(realpath .venv)" ]; } && echo yes)

.venv/location: $(if $(WORKS),,FORCE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "make setup cannot go on: $(PYTHON) was not found, or is older than 3.10." >&2; \
	  echo "  Debian, Ubuntu:  sudo apt-get install python3 python3-venv python3-dev" >&2; \
	  echo "  Fedora:          sudo dnf install python3 python3-devel" >&2; \
	  echo "A newer Python beside it is used with, for example:  make setup PYTHON=python3.12" >&2; exit 1; }
	@$(if $(WORKS),,$(PYTHON) tools/setup_env.py stage "creating .venv" $(PYTHON) -m venv --clear .venv)
	@$(SETUP) requirements '' >build/setup/requirements
	@$(SETUP) stage "installing build tools" $(INSTALL) -r build/setup/requirements
	@realpath .venv | tr -d '\n' >$@

.venv/choices: FORCE | .venv/location
	@{ echo '$(TORCH) $(CUDA)'; cat pyproject.toml; } | $(DIGEST)

# A package without the record of its files, which pip writes last, is one whose installation was interrupted.
$(PACKAGES): .venv/choices
	@for package in .venv/lib/python3*/site-packages/*.dist-info; do \
	  [ -e $$package/RECORD ] || rm -rf $$package; done
	@$(SETUP) requirements '$(EXTRAS)' >build/setup/requirements
	@$(SETUP) stage "installing packages" $(INSTALL) '$(TORCH)' -r build/setup/requirements
ifeq ($(CUDA),1)
	@$(SETUP) cuda >build/setup/requirements
	@$(SETUP) stage "installing packages for CUDA" $(INSTALL) -r build/setup/requirements
endif
	@touch $@

.venv/horovod: FORCE | $(PACKAGES)
	@$(SETUP) horovod $(CUDA)

.venv/sources: FORCE | .venv/location
	@{ env | grep -E '^(HVC_CUDA|HVC_CUDA_ARCH|HVC_SANITIZE|CXX|CXXFLAGS|LDFLAGS|CUDACXX|CUDA_HOME)=' | sort; \
	  echo $(CUDA) /dev/nvidia[0-9]*; nvcc --version; $${CXX:-c++} --version; \
	  find csrc -type f | sort | xargs sha256sum setup.py pyproject.toml; } 2>/dev/null | $(DIGEST)

# With low priority, because Horovod's build beside it takes longer; after the packages where they bring nvcc.
.venv/kernels: .venv/sources $(if $(wildcard horovod_compress/_cpu.*.so),,FORCE) | $(if $(filter 1,$(CUDA)),$(PACKAGES))
	@$(SETUP) stage "compiling kernels" nice -n 10 $(VENV)/python setup.py build_ext \
	  --parallel=$(or $(JOBS),$$(nproc))
	@touch $@

.venv/package: .venv/kernels | $(PACKAGES) .venv/horovod
	@$(SETUP) stage "installing horovod-compress" $(INSTALL) -v --no-build-isolation --no-deps --no-index -e .
	@touch $@

endif

demo: $(READY)
	@$(VENV)/python examples/demo.py $(ARGS)

test: environment
	@$(VENV)/python tools/run_tests.py -m "not slow" $(ARGS)

test-all: environment
	@$(VENV)/python tools/run_tests.py $(ARGS)

# Only these three need the tools of the extra `lint`.
lint format coverage: override EXTRAS := $(EXTRAS),lint

lint: environment
	@git rev-parse --git-dir >/dev/null || { \
	  echo "make lint asks git for the files: it needs git, and a checkout of this repository" >&2; exit 1; }
	@$(VENV)/pre-commit run --all-files

format: environment
	@$(VENV)/ruff check --fix-only --quiet
	@$(VENV)/ruff format --quiet
	@find csrc tests -name '*.[ch]' -o -name '*.cpp' -o -name '*.cu' | xargs $(VENV)/clang-format -i

# Of the tests' workers and the jobs' ranks too. What there is to see is the end of the list, not a limit to keep.
coverage: environment
	@mkdir -p build/coverage
	@$(VENV)/python -m coverage erase
	@$(VENV)/python -m coverage run tools/run_tests.py -m "not slow" $(ARGS) || echo "Not all is counted: see above."
	@$(VENV)/python -m coverage combine --quiet
	@echo "The least covered files, and all together:"
	@$(VENV)/python -m coverage report --sort=cover --skip-covered | sed -n '1,22p;/^TOTAL/p'

# With CXX=clang++, by clang's libFuzzer.
SECONDS ?= 60
fuzz: environment
	@$(VENV)/python tools/fuzz.py --seconds $(SECONDS) $(ARGS)

sanitize: environment
	@$(VENV)/python tools/sanitize.py $(ARGS)

# Keeps the CUDA kernels compiling where there is no GPU. HVC_CUDA=1 makes a missing nvcc an error, not a skip.
cuda-compile: environment
	@$(VENV)/python tools/cuda_compile.py $(ARGS)

bench: environment
	@$(VENV)/python -m benchmarks.short $(ARGS)

bench-check: environment
	@$(VENV)/python -m benchmarks.check $(ARGS)

# Hosts with slow links on this machine; only the lab itself needs root, not the set-up.
lab: $(READY)
	@rm -f build/lab/lab.json
	@$(VENV)/python -m benchmarks.allreduce --where lab --json build/lab/lab.json --plot build/lab $(or $(ARGS),$(LAB))

wheel: override EXTRAS := $(EXTRAS),release
wheel: environment
	@$(VENV)/python tools/build_wheel.py --torch '$(TORCH)' $(ARGS)

docs: override EXTRAS := $(EXTRAS),docs
docs: environment
	@$(VENV)/python tools/build_docs.py $(ARGS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	rm -f horovod_compress/*.so
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

clean-all: clean
	rm -rf .venv
