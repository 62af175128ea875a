#!/usr/bin/env bash
# Lint, tests and short benchmarks: in the image of stage `test`, or on any machine with Python, g++ and make.
#   docker run --rm horovod-compress:test docker/ci.sh
#   docker/ci.sh lint          # or one of its parts: lint, tests, benchmarks
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

step() {
  echo "== $*"
  "$@" </dev/null || { echo "docker/ci.sh: $* failed" >&2; exit 1; }
}

lint() { step make lint; }
tests() { step make test; }
# Short ones: they show that every kernel equals its reference and how fast this machine is, not more.
benchmarks() {
  step make environment
  step .venv/bin/hvd-compress bench kernels --count 1000000 --repeat 3
}

[ $# -gt 0 ] || set -- lint tests benchmarks
for part in "$@"; do
  case $part in
    lint | tests | benchmarks) "$part" ;;
    *) echo "docker/ci.sh: unknown part $part; expected lint, tests or benchmarks" >&2; exit 2 ;;
  esac
done
