#!/usr/bin/env bash
# Builds the CPU image, runs smoke.sh in it, and removes all that it made, except caches: test.sh [notebook ...]
#
# BUILDER      docker, buildah or podman; by default, the first that works on this machine
# BASE         the base image; by default, the Dockerfile's or, if buildah cannot pull it, a Debian of the same release,
#              made with debootstrap
# TORCH_INDEX  as in .env.example
#
# The build uses this machine's pip settings; with buildah and podman, it can also read the certificate and the folders
# that they name.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${XDG_CACHE_HOME:-$HOME/.cache}/distributor-docker-test
scratch=$(mktemp -d)
began=$SECONDS
quietly() { # shows the command's output only if the command fails
  "$@" >"$scratch/log" 2>&1 || {
    tail -n 100 "$scratch/log" >&2
    fail "this failed: ${*:1:3} ..."
  }
}
phase() { printf '\n=== %s (after %d s)\n' "$*" $((SECONDS - began)); }
fail() {
  echo "docker-test: $*" >&2
  exit 1
}

# Separate storage: the user's images and containers are not touched.
buildah=(buildah --root "$scratch/storage" --runroot "$scratch/run" --storage-driver overlay)
builder=
image=localhost/distributor-test:$$
finish() {
  local status=$?
  set +e
  case $builder in
    docker | podman) "$builder" rmi --force "$image" ;;
    buildah) "${buildah[@]}" rm --all && "${buildah[@]}" rmi --all --force ;;
  esac >/dev/null 2>&1
  rm -rf "$scratch"
  exit "$status"
}
find_builder() {
  if docker info >/dev/null 2>&1; then
    echo docker
  elif [[ $(id -u) -eq 0 ]] && command -v buildah >/dev/null; then
    echo buildah
  elif podman info >/dev/null 2>&1; then
    echo podman
  else
    fail "no docker daemon, no podman, and no buildah as root here (Debian: apt-get install buildah debootstrap)"
  fi
}

# The pip settings go into a file, which the build gets as a secret. With buildah and podman, the certificate and the
# folders that they name are mounted.
pip_settings() {
  python3 - "$scratch/pip.conf" "$scratch/volumes" <<'PYTHON'
import ast
import re
import subprocess
import sys
from pathlib import Path

listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True).stdout
settings, volumes = {}, {}
for line in listed.splitlines():
    name, _, value = line.partition("=")
    name, value = name.removeprefix("global.").removeprefix(":env:.").lstrip("."), ast.literal_eval(value)
    if "." in name:
        continue  # a setting of one pip command
    if name == "cert":
        volumes["/run/pip-cert.pem"], value = value, "/run/pip-cert.pem"
    for path in re.findall(r"(?:file://|^|\s)(/[^\s]+)", value if name != "cert" else ""):
        folder = Path(path).parent if Path(path).name == "simple" else Path(path)  # an index refers to files beside it
        if folder.is_dir():
            volumes[str(folder)] = str(folder)
    settings[name] = value
Path(sys.argv[1]).write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()))
Path(sys.argv[2]).write_text("".join(f"{source}:{target}:ro\n" for target, source in volumes.items()))
PYTHON
}

trap finish EXIT
trap 'exit 1' INT TERM
builder=${BUILDER:-$(find_builder)}

pip_settings
flags=(--file docker/Dockerfile --build-arg DEVICE=cpu --build-arg "TORCH_INDEX=${TORCH_INDEX:-}" --tag "$image")
flags+=(--secret "id=pip.conf,src=$scratch/pip.conf")
if [[ $builder != docker ]]; then
  while read -r volume; do flags+=(--volume "$volume"); done <"$scratch/volumes"
fi
if [[ -n ${BASE:-} ]]; then flags+=(--build-arg "BASE=$BASE"); fi

# What the container gets besides the image; `master` and `jupyter` are names of the container itself.
cp docker/spark-defaults.conf "$scratch/spark-defaults.conf"
chmod 755 "$scratch" && chmod 644 "$scratch/spark-defaults.conf"
hosts=(--add-host master:127.0.0.1 --add-host jupyter:127.0.0.1)
volumes=(--volume "$PWD:/src:ro" --volume "$scratch/spark-defaults.conf:/etc/spark/spark-defaults.conf:ro")

case $builder in
  docker | podman)
    phase "$builder builds the CPU image"
    quietly env DOCKER_BUILDKIT=1 "$builder" build "${flags[@]}" .
    phase "smoke test"
    "$builder" run --rm --shm-size 1g "${hosts[@]}" "${volumes[@]}" \
      "$image" bash /src/docker/smoke.sh "$@"
    ;;
  buildah)
    [[ $(id -u) -eq 0 ]] || fail "buildah needs root here: its containers are plain changes of the root folder"
    command -v ip >/dev/null || fail "there is no ip here (Debian: apt-get install iproute2)"
    base=$(sed -n 's/^ARG BASE=//p' docker/Dockerfile)
    if [[ -z ${BASE:-} ]] && ! timeout 60 "${buildah[@]}" pull --quiet "$base" >/dev/null 2>"$scratch/pull"; then
      phase "no registry ($(tail -n 1 "$scratch/pull")): debootstrap makes Debian bookworm"
      if [[ ! -f $cache/base.tar ]]; then
        command -v debootstrap >/dev/null || fail "$base cannot be pulled, and there is no debootstrap here"
        quietly debootstrap --variant=minbase bookworm "$scratch/base"
        mkdir -p "$cache"
        tar -C "$scratch/base" --exclude='./var/cache/apt/archives/*.deb' -cf "$cache/base.tar.$$" .
        mv "$cache/base.tar.$$" "$cache/base.tar"
        rm -rf "$scratch/base"
      fi
      container=$("${buildah[@]}" from scratch)
      "${buildah[@]}" add --quiet "$container" "$cache/base.tar" / >/dev/null
      "${buildah[@]}" commit --quiet --rm "$container" localhost/base >/dev/null
      flags+=(--build-arg BASE=localhost/base)
    fi
    phase "buildah builds the CPU image"
    quietly "${buildah[@]}" build --isolation chroot --layers=false --ignorefile docker/Dockerfile.dockerignore "${flags[@]}" .
    phase "smoke test"
    container=$("${buildah[@]}" from --pull-never "${hosts[@]}" "$image")
    # The image's processes get a loopback interface of their own, so that their ports are free.
    unshare --net bash -c 'ip link set lo up && exec "$@"' - \
      "${buildah[@]}" run --isolation chroot --hostname jupyter --env HOME=/home/spark "${volumes[@]}" "$container" -- \
      tini -s -- entrypoint.sh bash /src/docker/smoke.sh "$@"
    ;;
  *)
    fail "BUILDER must be docker, buildah or podman, not $builder"
    ;;
esac
phase "done"
