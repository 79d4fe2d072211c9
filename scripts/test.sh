#!/usr/bin/env bash
# Checks style and types, then runs the tests: ./scripts/test.sh [--slow] [arguments of pytest]
#
#   WORKERS=3    tests that run at a time, many of which wait (0: one after the other, which -x and
#                --pdb want)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

selection=()
if [[ ${1:-} == --slow ]]; then
    selection=(-m "slow or not slow")
    shift
fi

export OMP_NUM_THREADS=1
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
"$PYTHON" -m pytest --numprocesses "${WORKERS:-3}" --dist loadfile \
    --no-loadscope-reorder \
    ${selection[@]+"${selection[@]}"} "$@"
