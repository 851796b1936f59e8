# Everything runs in virtual environments below .venvs; nothing else is touched, an environment in .venv neither.
#
# PYTHON       the Python that makes them, 3.11 to 3.13: make demo PYTHON=python3.12
# TORCH_INDEX  an index that has torch for CPUs, if pip's default index has torch for CUDA
PYTHON ?= python3
VENVS := .venvs
# Commands run as if nothing of Spark, torchrun or a proxy were set. pip keeps the proxies.
UNSET := $(PYTHON) tools/unset.py
BIN := $(UNSET) $(VENVS)/main/bin

RUNS ?= 100
JOBS ?= 4
export TORCH_INDEX

# Python keeps the modules that it has compiled: compiling the tests takes seconds in each process that runs them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo demo-deepspeed test test-all test-main test-others test-long test-cluster test-spark test-torch test-pythons resolve chaos docker-test
.PHONY: test-frameworks test-mlflow chaos-launchers
.PHONY: docs pictures lint types bench clean

help:
	@echo "make demo          trains on handwritten digits, here and on Spark"
	@echo "make demo-deepspeed  trains a small GPT with DeepSpeed's ZeRO-3"
	@echo "make test          runs the tests that any change may break, on real ranks and real Spark: 5 minutes on two cores"
	@echo "make test-all      runs all tests of CI: 20 minutes; those of several hosts run only as root, with iproute2"
	@echo "make test-long     runs test-all, and what takes hours: 100 random kills, other Pythons (3 GB each), images"
	@echo "make test-frameworks  tests frameworks, all or FRAMEWORK=\"trl vision\"; writes the table of docs/frameworks.md"
	@echo "make test-cluster  runs those of test-all that need a standalone cluster over three hosts"
	@echo "make test-mlflow   runs the tests with MLflow's own server"
	@echo "make test-spark    runs quick Spark tests with other versions of PySpark, all or SPARK=\"3.5 4.0\", each in an environment of its own"
	@echo "make test-torch    runs quick tests with other versions of torch, all or TORCH=2.9, each in an environment of its own"
	@echo "make chaos         kills something random at a random time, RUNS=100 times [SEED=1]"
	@echo "make docker-test   builds the CPU image and tests it, with Docker, Podman, or buildah and debootstrap as root"
	@echo "make docs          builds the documentation's site, into site/"
	@echo "make pictures      draws the pictures of the documentation: a terminal during a run, and launch times"
	@echo "make lint types    runs ruff and mypy"
	@echo "make test-pythons  runs the demo and a smoke test in a fresh clone for each Python: VERSIONS=\"3.12 3.13\""
	@echo "make resolve       asks whether the pinned versions can be installed, and installs nothing: VERSIONS=\"3.12 3.13\""
	@echo "make bench         measures launch times, live logs and DeepSpeed, here and with torchrun, PySpark's distributor, DeepSpeed's launcher"
	@echo
	@echo "Each command installs only what it needs, mostly in $(VENVS)/main. PYTHON=python3.12 takes another Python than python3."
	@echo "TORCH_INDEX=URL takes torch from an index that has it for CPUs, which is several gigabytes smaller than for CUDA."
	@echo "https://pytorch.org/get-started/locally/ names such an index."

# What a command needs is installed into the environment of the first name: .venvs/main/demo.ok, .venvs/spark-4.0/versions.ok.
$(VENVS)/%.ok: setup.cfg pyproject.toml $(wildcard constraints/*)
	@$(PYTHON) tools/preflight.py
	@$(PYTHON) tools/environment.py $@

demo: $(VENVS)/main/demo.ok
	$(BIN)/python examples/digits.py

demo-deepspeed: $(VENVS)/main/demo-deepspeed.ok
	$(BIN)/python examples/deepspeed_zero3.py

# JOBS: number of processes that run tests side by side. Tests mostly wait, so there are more processes than cores.
# One process runs all tests that share a Spark session.
SIDE_BY_SIDE = -n $(JOBS) --dist loadgroup

# A process can have only one kind of Spark session, classic or Connect. So there is a call for each.
test: $(VENVS)/main/test.ok
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not slow and not long and not connect" --ignore=tests/frameworks
	$(BIN)/python -m pytest -m "not slow and not long" tests/test_connect.py

test-all: test-main test-others

test-main: $(VENVS)/main/test.ok
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not connect and not long" --ignore=tests/cluster/test_cluster_launchers.py

# What runs one or two processes at a time.
test-others: $(VENVS)/main/test.ok
	$(BIN)/python -m pytest -m "not long" tests/test_connect.py
	$(MAKE) test-spark-4.0 ONLY="not cluster"
	$(MAKE) test-frameworks-launchers test-mlflow RING="not long"
	$(MAKE) chaos RUNS=3 SEED=100

test-long: test-all
	$(BIN)/python -m pytest -m "long and not connect"
	$(BIN)/python -m pytest -m long tests/test_connect.py
	$(MAKE) test-spark
	$(MAKE) resolve chaos chaos-launchers test-torch test-frameworks docker-test
	$(MAKE) test-pythons VERSIONS="3.11 3.12 3.13"
	$(UNSET) $(VENVS)/launchers/bin/python -m pytest -m long tests/cluster/test_cluster_launchers.py
	$(MAKE) test-mlflow RING=long

# FRAMEWORK: which tests of tests/frameworks to run, all by default. Their results go into the table of docs/frameworks.md.
FRAMEWORK ?= pytorch trl trainer_deepspeed accelerate lightning gpus vision streaming composer axolotl unsloth $(LAUNCHERS)
LAUNCHERS = jax mpi ray tensorflow compat_launchers launcher_restarts
NOTED = FRAMEWORKS_OUT=benchmarks/frameworks.json

test-frameworks: $(addprefix test-framework-,$(FRAMEWORK))
	$(PYTHON) tools/frameworks.py

test-framework-vision: $(VENVS)/vision/vision.ok
	$(NOTED) $(UNSET) $(VENVS)/vision/bin/python -m pytest tests/frameworks/test_vision.py
	$(UNSET) $(VENVS)/vision/bin/python -m pytest tests/test_notebooks.py -k retinanet

test-framework-streaming: $(VENVS)/streaming/streaming.ok
	$(NOTED) $(UNSET) $(VENVS)/streaming/bin/python -m pytest tests/frameworks/test_streaming.py

test-framework-composer: $(VENVS)/composer/composer.ok
	$(NOTED) $(UNSET) $(VENVS)/composer/bin/python -m pytest tests/frameworks/test_composer.py
	$(UNSET) $(VENVS)/composer/bin/python -m pytest tests/test_notebooks.py -k "composer or foundry"

# These run the framework's tests and its notebook.
test-framework-axolotl test-framework-unsloth: test-framework-%: $(VENVS)/axolotl/axolotl.ok
	$(NOTED) $(UNSET) $(VENVS)/axolotl/bin/python -m pytest tests/frameworks/test_$*.py tests/test_notebooks.py -k $*

$(addprefix test-framework-,$(LAUNCHERS)): test-framework-%: $(VENVS)/launchers/launchers.ok
	$(NOTED) $(UNSET) $(VENVS)/launchers/bin/python -m pytest tests/frameworks/test_$*.py

# CI runs these tests of LAUNCHERS, two files at a time. The results do not go into the table.
test-frameworks-launchers: $(VENVS)/launchers/launchers.ok
	$(UNSET) $(VENVS)/launchers/bin/python -m pytest -n 2 --dist loadfile -m "not long" $(LAUNCHERS:%=tests/frameworks/test_%.py) tests/cluster/test_cluster_launchers.py

# MLflow's own server. RING: pytest's -m, all by default.
test-mlflow: $(VENVS)/mlflow/mlflow.ok
	$(UNSET) $(VENVS)/mlflow/bin/python -m pytest -m "$(RING)" tests/test_mlflow.py

test-framework-%: $(VENVS)/main/test.ok
	$(NOTED) $(BIN)/python -m pytest tests/frameworks/test_$*.py

test-cluster: $(VENVS)/main/test.ok
	$(BIN)/python -m pytest -m cluster tests/cluster

# NOTEBOOKS: which notebooks to run in the image, the first by default.
docker-test:
	docker/test.sh $(NOTEBOOKS)

docs: $(VENVS)/main/docs.ok
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

pictures: $(VENVS)/main/bench.ok
	$(BIN)/python benchmarks/status.py docs/status.svg
	$(BIN)/python benchmarks/launch.py local executors plot table --points benchmarks/launch.json --plot docs/launch.png

# SPARK, TORCH: which of the versions in constraints/versions.cfg to test, all by default. ONLY: pytest's -k.
SPARK ?= 3.5 4.0 4.1 4.2
TORCH ?= 2.9 2.14

test-spark: $(addprefix test-spark-,$(SPARK)) $(addprefix test-connect-,$(SPARK))
test-torch: $(addprefix test-torch-,$(TORCH))

$(addprefix test-spark-,$(SPARK)): test-%: $(VENVS)/%/versions.ok
	$(UNSET) $(VENVS)/$*/bin/python -m pytest -n 2 --dist loadgroup -m "spark and not slow and not long" -k "$(ONLY)" tests/test_spark.py tests/test_spark_job.py tests/test_exchange.py

$(addprefix test-connect-,$(SPARK)): test-connect-%: $(VENVS)/spark-%/versions.ok
	$(UNSET) $(VENVS)/spark-$*/bin/python -m pytest -m "not slow and not long" tests/test_connect.py

# PySpark 3.5's package has no Connect server: its client talks to one of 4.0.
test-connect-3.5: export CONNECT_SERVER = $(VENVS)/spark-4.0/bin/python
test-connect-3.5: $(VENVS)/spark-4.0/versions.ok

# This machine and executors, second attempts, warm processes and checkpoints: where torch's own code is called.
$(addprefix test-torch-,$(TORCH)): test-%: $(VENVS)/%/versions.ok
	$(UNSET) $(VENVS)/$*/bin/python -m pytest $(SIDE_BY_SIDE) -m "not slow and not long" tests/unit --ignore=tests/unit/launch/deepspeed --ignore=tests/unit/api/test_autotune.py $(patsubst %,tests/test_%.py,local runs second_attempt warm company checkpoints)

# Like `chaos`, with the launch paths of LAUNCHERS.
chaos-launchers: $(VENVS)/launchers/launchers.ok
	$(UNSET) $(VENVS)/launchers/bin/python tests/chaos/monkey.py --runs $(RUNS) $(if $(SEED),--seed $(SEED))

chaos: $(VENVS)/main/test.ok
	$(BIN)/python tests/chaos/monkey.py --runs $(RUNS) $(if $(SEED),--seed $(SEED))

lint: $(VENVS)/main/lint.ok
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENVS)/main/types.ok
	$(BIN)/mypy

bench: $(VENVS)/main/bench.ok
	$(BIN)/python benchmarks/launch.py --plot launch.png
	$(BIN)/python benchmarks/logs.py
	$(BIN)/python benchmarks/deepspeed.py

# This tests those Pythons of VERSIONS that this machine has.
test-pythons:
	@$(PYTHON) tools/pythons.py run $(or $(VERSIONS),3.12 3.13)

resolve:
	@$(PYTHON) tools/pythons.py resolve $(or $(VERSIONS),3.12 3.13)

clean:
	rm -rf $(VENVS) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
