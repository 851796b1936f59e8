# Everything runs in virtual environments of this folder; nothing else is touched.
#
# PYTHON       makes them, 3.11 to 3.13: make demo PYTHON=python3.12
# TORCH_INDEX  an index that has torch for CPUs, where pip's own has torch for CUDA
PYTHON ?= python3
VENV := .venv
VENV35 := .venv-spark35
VENV_VISION := .venv-vision
VENV_STREAMING := .venv-streaming
VENV_COMPOSER := .venv-composer
VENV_LAUNCHERS := .venv-launchers
VENV_AXOLOTL := .venv-axolotl
BIN := $(VENV)/bin

RUNS ?= 100
JOBS ?= 4
export TORCH_INDEX

# What Python makes of modules is kept: making it of the tests takes seconds in each process that runs them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo demo-deepspeed test test-all test-long test-cluster test-spark35 test-pythons resolve chaos docker-test
.PHONY: test-frameworks chaos-launchers
.PHONY: docs pictures lint types bench clean

help:
	@echo "make demo          train on the digits, here and on Spark"
	@echo "make demo-deepspeed  train a small GPT with DeepSpeed's ZeRO-3"
	@echo "make test          what any change can break, on real ranks and real Spark: ten minutes on two cores"
	@echo "make test-all      all that CI runs: half an hour more; network namespaces where they can be made (root, iproute2)"
	@echo "make test-long     that, and what takes hours: 100 random kills, other Pythons (3 GB each), images"
	@echo "make test-frameworks  what people train with, FRAMEWORK=\"trl vision\"; writes the table of docs/frameworks.md"
	@echo "make test-cluster  of test-all, those on a standalone cluster over three hosts"
	@echo "make test-spark35  of test-all, the Spark tests on PySpark 3.5, in an environment of its own"
	@echo "make chaos         kills something random at a random time, RUNS=100 times [SEED=1]"
	@echo "make docker-test   builds the CPU image and runs its smoke test: Docker, Podman, or buildah and debootstrap as root"
	@echo "make docs          the documentation's site, into site/"
	@echo "make pictures      the two at the top of the README: a terminal, and launch times"
	@echo "make lint types    ruff, mypy"
	@echo "make test-pythons  the demo and a smoke test in fresh clones, each with another Python: VERSIONS=\"3.12 3.13\""
	@echo "make resolve       whether the pinned versions can be installed, without installing: VERSIONS=\"3.12 3.13\""
	@echo "make bench         launch times beside torchrun and PySpark's distributor, live logs, DeepSpeed beside its launcher"
	@echo
	@echo "Each installs what it needs, and no more, in $(VENV). PYTHON=python3.12 takes another Python than python3,"
	@echo "TORCH_INDEX=URL takes torch from an index that has it for CPUs, several gigabytes smaller than for CUDA:"
	@echo "https://pytorch.org/get-started/locally/ names one."

# One environment, which grows by what a command needs beyond what is there already.
$(VENV)/%.ok: setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) tools/preflight.py
	@$(PYTHON) tools/environment.py $(VENV) $*

$(VENV_VISION)/%.ok: setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) tools/preflight.py
	@$(PYTHON) tools/environment.py $(VENV_VISION) $*

$(VENV_LAUNCHERS)/%.ok: setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) tools/preflight.py
	@$(PYTHON) tools/environment.py $(VENV_LAUNCHERS) $*

$(VENV_STREAMING)/%.ok: setup.cfg pyproject.toml constraints-streaming.txt
	@$(PYTHON) tools/preflight.py
	@$(PYTHON) tools/environment.py $(VENV_STREAMING) $*

$(VENV_COMPOSER)/%.ok: setup.cfg pyproject.toml constraints-composer.txt
	@$(PYTHON) tools/preflight.py
	@$(PYTHON) tools/environment.py $(VENV_COMPOSER) $*

$(VENV_AXOLOTL)/%.ok: setup.cfg pyproject.toml constraints-axolotl.txt
	@$(PYTHON) tools/preflight.py
	@$(PYTHON) tools/environment.py $(VENV_AXOLOTL) $*

$(VENV35)/%.ok: setup.cfg pyproject.toml constraints-spark35.txt
	@$(PYTHON) tools/preflight.py
	@$(PYTHON) tools/environment.py $(VENV35) $*

demo: $(VENV)/demo.ok
	$(BIN)/python examples/digits.py

demo-deepspeed: $(VENV)/demo-deepspeed.ok
	$(BIN)/python examples/deepspeed_zero3.py

# JOBS: number of processes that run tests side by side; tests wait much, so more than there are cores.
# One process runs all tests of a Spark session.
SIDE_BY_SIDE = -n $(JOBS) --dist loadgroup

# A process has one kind of Spark session, classic or Connect: hence a call for each.
test: $(VENV)/test.ok
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not slow and not long and not connect" --ignore=tests/frameworks
	$(BIN)/python -m pytest -m "not slow and not long and connect" --ignore=tests/frameworks

test-all: $(VENV)/test.ok
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not connect and not long"
	$(BIN)/python -m pytest -m "connect and not long"
	$(MAKE) test-spark35
	$(MAKE) test-frameworks-launchers
	$(MAKE) chaos RUNS=3 SEED=100
	$(MAKE) chaos-launchers RUNS=4 SEED=100

test-long: test-all
	$(BIN)/python -m pytest -m long
	$(MAKE) chaos chaos-launchers test-pythons test-frameworks docker-test

# FRAMEWORK: which of tests/frameworks, all by default. What was run goes into the table of docs/frameworks.md.
FRAMEWORK ?= pytorch trl trainer_deepspeed accelerate lightning vision streaming composer axolotl unsloth $(LAUNCHERS)
LAUNCHERS = jax mpi ray tensorflow compat_launchers
NOTED = FRAMEWORKS_OUT=docs/frameworks.json

test-frameworks: $(addprefix test-framework-,$(FRAMEWORK))
	$(PYTHON) tools/frameworks.py

test-framework-vision: $(VENV_VISION)/vision.ok
	$(NOTED) $(VENV_VISION)/bin/python -m pytest tests/frameworks/test_vision.py
	$(VENV_VISION)/bin/python -m pytest tests/test_notebooks.py -k retinanet

test-framework-streaming: $(VENV_STREAMING)/streaming.ok
	$(NOTED) $(VENV_STREAMING)/bin/python -m pytest tests/frameworks/test_streaming.py

test-framework-composer: $(VENV_COMPOSER)/composer.ok
	$(NOTED) $(VENV_COMPOSER)/bin/python -m pytest tests/frameworks/test_composer.py
	$(VENV_COMPOSER)/bin/python -m pytest tests/test_notebooks.py -k composer

# Each with its notebook.
test-framework-axolotl test-framework-unsloth: test-framework-%: $(VENV_AXOLOTL)/axolotl.ok
	$(NOTED) $(VENV_AXOLOTL)/bin/python -m pytest tests/frameworks/test_$*.py tests/test_notebooks.py -k $*

$(addprefix test-framework-,$(LAUNCHERS)): test-framework-%: $(VENV_LAUNCHERS)/launchers.ok
	$(NOTED) $(VENV_LAUNCHERS)/bin/python -m pytest tests/frameworks/test_$*.py

# What CI runs of these: two at a time, and nothing is noted.
test-frameworks-launchers: $(VENV_LAUNCHERS)/launchers.ok
	$(VENV_LAUNCHERS)/bin/python -m pytest -n 2 --dist loadfile $(LAUNCHERS:%=tests/frameworks/test_%.py) tests/cluster/test_cluster_launchers.py

test-framework-%: $(VENV)/test.ok
	$(NOTED) $(BIN)/python -m pytest tests/frameworks/test_$*.py

test-cluster: $(VENV)/test.ok
	$(BIN)/python -m pytest -m cluster tests/cluster

# NOTEBOOKS: which notebooks run in the image, the first by default.
docker-test:
	docker/test.sh $(NOTEBOOKS)

docs: $(VENV)/docs.ok
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

pictures: $(VENV)/bench.ok
	$(BIN)/python benchmarks/status.py docs/status.svg
	$(BIN)/python benchmarks/launch.py local executors plot table --points docs/launch.json --plot docs/launch.png

test-spark35: $(VENV35)/spark35.ok
	$(VENV35)/bin/python -m pytest -n 2 -m "spark and not slow" tests/test_spark.py tests/test_exchange.py

# The same with the launch paths of LAUNCHERS.
chaos-launchers: $(VENV_LAUNCHERS)/launchers.ok
	$(VENV_LAUNCHERS)/bin/python tests/chaos/monkey.py --runs $(RUNS) $(if $(SEED),--seed $(SEED))

chaos: $(VENV)/test.ok
	$(BIN)/python tests/chaos/monkey.py --runs $(RUNS) $(if $(SEED),--seed $(SEED))

lint: $(VENV)/lint.ok
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/types.ok
	$(BIN)/mypy

bench: $(VENV)/bench.ok
	$(BIN)/python benchmarks/launch.py --plot launch.png
	$(BIN)/python benchmarks/logs.py
	$(BIN)/python benchmarks/deepspeed.py

# Of VERSIONS, those whose interpreters are here.
test-pythons:
	@$(PYTHON) tools/pythons.py run $(or $(VERSIONS),3.12 3.13)

resolve:
	@$(PYTHON) tools/pythons.py resolve $(or $(VERSIONS),3.12 3.13)

clean:
	rm -rf $(VENV) $(VENV35) $(VENV_VISION) $(VENV_STREAMING) $(VENV_COMPOSER) $(VENV_AXOLOTL) $(VENV_LAUNCHERS) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
