#!/usr/bin/env bash
# What a container runs: entrypoint.sh master | worker | jupyter | health URL | any other command.
# Master and worker obey Spark's own variables (SPARK_MASTER_HOST, SPARK_WORKER_CORES, SPARK_WORKER_MEMORY, ...).
set -euo pipefail
case "${1:-}" in
  master)
    exec spark-class org.apache.spark.deploy.master.Master
    ;;
  worker)
    exec spark-class org.apache.spark.deploy.worker.Worker "${SPARK_MASTER:-spark://master:7077}"
    ;;
  jupyter)
    # For Jupyter, an empty token means "no password"; without the variable, it makes a token and prints it.
    if [[ -v JUPYTER_TOKEN && -z "$JUPYTER_TOKEN" ]]; then
      echo "JUPYTER_TOKEN is empty, so anybody could log in: give it a value, or do not set it" >&2
      exit 1
    fi
    exec jupyter lab --no-browser --ip=0.0.0.0 --port="${JUPYTER_PORT:-8888}" \
      --ServerApp.root_dir="$PWD" --LabApp.default_url=/lab/tree/notebooks/01_quickstart.ipynb
    ;;
  health)
    exec python -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=3)' "$2"
    ;;
  *)
    exec "$@"
    ;;
esac
