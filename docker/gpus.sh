#!/usr/bin/env bash
# Spark's discovery script: which GPUs this worker has.
set -euo pipefail
numbers=$(nvidia-smi --query-gpu=index --format=csv,noheader)
# shellcheck disable=SC2086  # one word for each GPU
addresses=$(printf '"%s", ' $numbers)
printf '{"name": "gpu", "addresses": [%s]}\n' "${addresses%, }"
