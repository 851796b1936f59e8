# Everything runs in virtual environments of this folder; nothing else is touched.
PYTHON ?= python3
VENV := .venv
VENV35 := .venv-spark35
BIN := $(VENV)/bin
PIP_FLAGS := --quiet --disable-pip-version-check

RUNS ?= 100

.PHONY: help demo demo-deepspeed docker-test docs pictures test test-cluster test-spark35 chaos lint types bench clean

help:
	@echo "make demo          train on the digits, here and on Spark"
	@echo "make demo-deepspeed  train a small GPT with DeepSpeed's ZeRO-3"
	@echo "make test          tests on this machine (PySpark 4)"
	@echo "make test-cluster  tests on a standalone cluster over three hosts: network namespaces, as root with iproute2"
	@echo "make test-spark35  the Spark tests on PySpark 3.5, in an environment of its own"
	@echo "make chaos         kills something random at a random time, RUNS=100 times [SEED=1]"
	@echo "make docker-test   builds the CPU image and runs its smoke test: Docker, Podman, or buildah and debootstrap as root"
	@echo "make docs          the documentation's site, into site/"
	@echo "make pictures      the two at the top of the README: a terminal, and launch times"
	@echo "make lint types    ruff, mypy"
	@echo "make bench         launch times beside torchrun and PySpark's distributor, live logs, DeepSpeed beside its launcher"

$(VENV)/ok: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(PIP_FLAGS) -c constraints.txt torch
	$(BIN)/pip install $(PIP_FLAGS) -c constraints.txt -e '.[connect,deepspeed,demo,docs,integrations,lint,notebook,test]'
	@touch $@

$(VENV35)/ok: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV35)
	$(VENV35)/bin/pip install $(PIP_FLAGS) -c constraints.txt torch
	$(VENV35)/bin/pip install $(PIP_FLAGS) 'pyspark>=3.5,<3.6'
	$(VENV35)/bin/pip install $(PIP_FLAGS) -c constraints-spark35.txt -e '.[spark]' hypothesis psutil pytest pytest-timeout
	@touch $@

demo: $(VENV)/ok
	$(BIN)/python examples/digits.py

demo-deepspeed: $(VENV)/ok
	$(BIN)/python examples/deepspeed_zero3.py

# A process has one kind of Spark session, classic or Connect: hence a call for each.
test: $(VENV)/ok
	$(BIN)/python -m pytest --doctest-modules distributor
	$(BIN)/python -m pytest -m "not connect and not cluster"
	$(BIN)/python -m pytest -m connect

test-cluster: $(VENV)/ok
	$(BIN)/python -m pytest -m cluster tests/cluster

# NOTEBOOKS: which notebooks run in the image, the first by default.
docker-test:
	docker/test.sh $(NOTEBOOKS)

docs: $(VENV)/ok
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

pictures: $(VENV)/ok
	$(BIN)/pip install $(PIP_FLAGS) -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/status.py docs/status.svg
	$(BIN)/python benchmarks/launch.py --plot docs/launch.png

test-spark35: $(VENV35)/ok
	$(VENV35)/bin/python -m pytest -m "spark and not connect and not slow" tests/test_spark.py tests/test_exchange.py

chaos: $(VENV)/ok
	$(BIN)/python tests/chaos/monkey.py --runs $(RUNS) $(if $(SEED),--seed $(SEED))

lint: $(VENV)/ok
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/ok
	$(BIN)/mypy

bench: $(VENV)/ok
	$(BIN)/pip install $(PIP_FLAGS) -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/launch.py --plot launch.png
	$(BIN)/python benchmarks/logs.py
	$(BIN)/python benchmarks/deepspeed.py

clean:
	rm -rf $(VENV) $(VENV35) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
