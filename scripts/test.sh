#!/usr/bin/env bash
# Checks style and types, then runs tests: ./scripts/test.sh [smoke|all] [arguments of pytest]
#
#   (nothing)    the default suite; CI runs it: its budget is 12 minutes of CPU, it takes about 13
#   smoke        after a change of a line: planner, rings, one gradient-equivalence test, one run;
#                no types, at most 90 s
#   all          the long tests too: hours
#   WORKERS=2    tests that run at a time; each worker collects for itself, 15 seconds of CPU (0: one
#                after the other, which -x and --pdb want)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

selection=()
suite=${1:-}
case $suite in
    smoke)
        shift
        selection=(tests/planner/test_plan.py tests/planner/test_strategies.py
            tests/planner/test_properties.py tests/runtime/ring/test_attention.py
            tests/gradient_equivalence tests/training/test_curves.py -m "smoke and not slow")
        ;;
    all)
        shift
        selection=(-m "slow or not slow")
        ;;
esac

export OMP_NUM_THREADS=1
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
[[ $suite == smoke ]] || "$PYTHON" -m mypy
"$PYTHON" -m pytest --numprocesses "${WORKERS:-2}" --dist loadfile \
    --no-loadscope-reorder \
    ${selection[@]+"${selection[@]}"} "$@"
