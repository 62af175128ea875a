#!/usr/bin/env bash
# Tests and short benchmarks: in the image of stage `test`, or on any machine with Python, g++ and make. `make lint` needs
# git and a checkout, which the image has not.
#   docker run --rm horovod-compress:test docker/ci.sh
#   docker/ci.sh tests         # or one of its parts: tests, benchmarks
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

step() {
  echo "== $*"
  "$@" </dev/null || { echo "docker/ci.sh: $* failed" >&2; exit 1; }
}

tests() { step make test; }
# Short ones: they show that every kernel equals its reference and how fast this machine is, not more.
benchmarks() {
  step make environment
  step .venv/bin/hvd-compress bench kernels --count 1000000 --repeat 3
}

[ $# -gt 0 ] || set -- tests benchmarks
for part in "$@"; do
  case $part in
    tests | benchmarks) "$part" ;;
    *) echo "docker/ci.sh: unknown part $part; expected tests or benchmarks" >&2; exit 2 ;;
  esac
done
