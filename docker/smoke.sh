#!/usr/bin/env bash
# Runs inside the image, as its user, with spark-defaults.conf in place and the host names `master` and `jupyter` known.
# Checks what the image contains and what it must not contain, and ranks without Spark; then starts the services of
# compose.yaml as processes of one container, and runs notebooks on them.
set -euo pipefail
say() { printf '\n--- %s\n' "$*"; }
fail() { echo "smoke test: $*" >&2; exit 1; }

say "what the image has"
[[ $(id -u) -ne 0 ]] || fail "it runs as root"
python --version
java -version 2>&1 | head -n 1
printf 'jupyterlab %s\n' "$(jupyter lab --version)"
for tool in gcc g++ cc c++ clang make nvcc; do
  if command -v "$tool" >/dev/null; then fail "$tool is in the image"; fi
done
[[ ! -w /opt/venv && ! -w "$(python -c 'import distributor; print(distributor.__file__)')" ]] ||
  fail "the image's user can change installed packages"
python - <<'PYTHON'
import sys
from importlib import metadata

import torch
from packaging.requirements import Requirement

if torch.version.cuda is not None:
    sys.exit("torch is not the CPU build")
wrong = []
for line in open("/src/constraints/main.txt"):
    if line.startswith("#"):
        continue
    pin = Requirement(line.strip())
    try:
        installed = metadata.version(pin.name)
    except metadata.PackageNotFoundError:
        continue
    if (pin.marker is None or pin.marker.evaluate()) and not pin.specifier.contains(installed):
        wrong.append(f"{pin.name} {installed}, not {pin.specifier}")
if wrong:
    sys.exit(f"packages have other versions than in constraints/main.txt: {wrong}")
PYTHON

say "two ranks without Spark"
SPARK_CONF_DIR=/nowhere python - <<'PYTHON'
from distributor import TorchDistributor


def total():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ranks = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(ranks)
    return ranks.item()


found = TorchDistributor(num_processes=2, local_mode=True, use_gpu=False).submit(total).results()
print(found)
assert found == [3.0, 3.0], found
PYTHON

say "DeepSpeed's ZeRO-3 with two ranks, without a compiler"
python examples/deepspeed_zero3.py --steps 10

say "the services of compose.yaml"
mkdir -p /tmp/logs
finish() {
  local status=$?
  jobs -p | xargs --no-run-if-empty kill || true
  wait
  if [[ $status -ne 0 ]]; then tail -n 30 /tmp/logs/*; fi
  exit "$status"
}
trap finish EXIT
wait_for() {
  for _ in {1..60}; do
    if entrypoint.sh health "$2" 2>/dev/null; then echo "$1 is up"; return; fi
    sleep 1
  done
  fail "$1 does not answer at $2"
}
SPARK_MASTER_HOST=master entrypoint.sh master >/tmp/logs/master 2>&1 &
wait_for master http://127.0.0.1:8080/json/
for port in 8081 8082; do
  SPARK_WORKER_CORES=2 SPARK_WORKER_MEMORY=1g SPARK_WORKER_WEBUI_PORT=$port entrypoint.sh worker \
    >"/tmp/logs/worker-$port" 2>&1 &
done
export JUPYTER_TOKEN=distributor
entrypoint.sh jupyter >/tmp/logs/jupyter 2>&1 &
wait_for "worker 1" http://127.0.0.1:8081/json/
wait_for "worker 2" http://127.0.0.1:8082/json/
wait_for JupyterLab http://127.0.0.1:8888/api
if entrypoint.sh health http://127.0.0.1:8888/api/contents 2>/dev/null; then fail "JupyterLab asks for no token"; fi
entrypoint.sh health "http://127.0.0.1:8888/api/contents/notebooks?token=$JUPYTER_TOKEN"
if JUPYTER_TOKEN='' entrypoint.sh jupyter 2>/dev/null; then fail "JupyterLab accepts an empty token"; fi

say "four ranks on the cluster"
python - <<'PYTHON'
from pyspark.sql import SparkSession

from distributor import TorchDistributor


def total():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ranks = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(ranks)
    return ranks.item()


spark = SparkSession.builder.getOrCreate()
print("master", spark.sparkContext.master)
run = TorchDistributor(num_processes=4, use_gpu=False).submit(total)
found = run.results()
print(run.placement)
print(found)
assert found == [10.0] * 4, found
spark.stop()
PYTHON

applications() {
  python - <<'PYTHON'
import json
import urllib.request

state = json.load(urllib.request.urlopen("http://127.0.0.1:8080/json/"))
assert len(state["workers"]) == 2, state["workers"]
print(len(state["completedapps"]))
PYTHON
}
for notebook in "${@:-notebooks/01_quickstart.ipynb}"; do
  say "$notebook"
  before=$(applications)
  jupyter nbconvert --to notebook --execute --output-dir /tmp/executed "$notebook"
  for _ in {1..20}; do
    after=$(applications)
    [[ $after -eq $before ]] || break
    sleep 0.5
  done
  [[ $after -gt $before ]] || fail "$notebook has not used the cluster"
done
say "all is well"
