# Start with `make demo` and `make test`. Every target sets up .venv first.
#
#   make demo PROMPT="two green squares on a white background" SEED=3 OUT=squares.png
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu    # no NVIDIA GPU: torch without gigabytes of CUDA
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cu130 TORCH=2.11.0    # to build for config.yaml's torch

PYTHON ?= python3.11
TORCH_INDEX ?=
TORCH ?= 2.13.0
PROMPT ?= a large red circle on a blue background
SEED ?= 7
OUT ?= demo.png
RELEASE ?= tiny-sdxl/1
PORT ?= 8080
TEST_PROCESSES ?= 2
# Spinning threads slow each other down on a machine with other work; see truss/configs/cpu-demo.yaml.
export OMP_WAIT_POLICY ?= PASSIVE

BIN := .venv/bin
SKIPPED := .preheat/skipped-tests.txt
PYTEST := $(BIN)/pytest --numprocesses $(TEST_PROCESSES) --dist loadfile
READY := .venv/.ready
PIP := $(BIN)/pip install --disable-pip-version-check --quiet

.PHONY: setup demo serve playground test test-skipped test-full full slow soak test-load load check docs
.DEFAULT_GOAL := demo

setup: $(READY)

# The requirements of the Truss server come from the truss package, so that the server runs with the same versions here
# and in the image. Its pin of numpy below 2 is left out, as in config.yaml. The configs pin the other versions, except
# torch's, which is the variable TORCH.
$(READY): pyproject.toml truss/configs/cpu-demo.yaml
	@echo "Installing into .venv, which takes minutes"
	$(PYTHON) -m venv .venv
	sed -n -e '/- torch==/d' -e 's/^  - \([a-z0-9-]*==[0-9.]*\)$$/\1/p' truss/configs/cpu-demo.yaml > .venv/pins.txt
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==$(TORCH)
	$(PIP) --constraint .venv/pins.txt --editable '.[dev,onnx,docs,gateway]'
	set -e; server=$$(echo .venv/lib/python3.*/site-packages/truss/templates/server); \
	sed -e '/^-i /d' -e '/^numpy/d' $$server/requirements.txt > .venv/server-requirements.txt; \
	$(PIP) --requirement .venv/server-requirements.txt --constraint $$server/constraints.txt
	touch $@

demo: export PROMPT := $(PROMPT)
demo: export SEED := $(SEED)
demo: export OUT := $(OUT)
demo: $(READY)
	$(BIN)/preheat demo

serve: $(READY)
	$(BIN)/preheat serve $(RELEASE) --port $(PORT)

# The demo model's server and the page of the gateway, at http://127.0.0.1:8090.
playground: $(READY)
	$(BIN)/preheat playground

# The tests of a file run in one process, so that they share its fixtures. The names of skipped tests are kept.
test: $(READY)
	$(PYTEST) --write-skipped=$(SKIPPED)

# The tests that the last `make test` skipped, after their tools were installed.
test-skipped: $(READY)
	test ! -s $(SKIPPED) || $(PYTEST) @$(SKIPPED)

# All tests.
test-full: test full slow soak test-load

# Tests marked `full`: a faster test holds the same promise in the common case. PART=2/8: the second of eight parts.
full: $(READY)
	$(PYTEST) -m full $(if $(PART),--part $(PART))

# Exports SDXL's ONNX graphs at full size, in about five minutes.
slow: export PREHEAT_SLOW := 1
slow: $(READY)
	$(BIN)/pytest tests/engine_builder/backends/onnx/test_onnx_full_size.py

# Kills processes that fetch from the object store: 50 times, each time at another moment.
soak: export PREHEAT_SOAK_KILLS ?= 50
soak: export PREHEAT_REQUIRE_OBJECT_STORE := 1
soak: $(READY)
	$(BIN)/pytest tests/model/store -k kill_9

# Some 25 minutes on two cores: the real server under closed and open loops, with 64 clients of which some disconnect,
# during 1,000 images while its memory is measured, with random requests, and with 5,000 malformed and well-formed
# bodies; two servers that are replaced behind a balancer; a gateway under attacks.
test-load: export PREHEAT_LOAD_SECONDS ?= 120
test-load: export PREHEAT_SOAK_IMAGES ?= 1000
test-load: export PREHEAT_SOAK_SECONDS ?= 120
test-load: export PREHEAT_GATEWAY_SECONDS ?= 60
test-load: export PREHEAT_ATTACK_SECONDS ?= 15
test-load: export PREHEAT_FUZZ_BODIES ?= 5000
test-load: export PREHEAT_FUZZ_IMAGES ?= 2000
test-load: export PREHEAT_FUZZ_CONFIGS ?= 200
test-load: $(READY)
	$(BIN)/pytest tests/load

# Measures the curve of docs/scaling.md again, then runs the load tests.
load: $(READY)
	rm -f docs/benchmarks/cpu-load.json
	$(BIN)/preheat load $(RELEASE) --out docs/benchmarks/cpu-load.json --plot docs/pictures/cpu-load.png
	$(MAKE) test-load

# The site, in site/. A broken link is an error.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# PREHEAT_TENSORRT_STUBS: a folder with type stubs of the whole TensorRT module. Default: typings/, the called part.
check: export MYPYPATH := $(PREHEAT_TENSORRT_STUBS)
check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
