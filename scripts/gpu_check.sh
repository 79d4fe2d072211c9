#!/usr/bin/env bash
# Tests and benchmarks on one NVIDIA GPU, under nine minutes, no internet needed:
#
#   ./scripts/gpu_check.sh [--wheels FOLDER] [--te-bundle FOLDER] [--only PART ...] [--cpu] [--help]
#
# PYTHON=/path/to/python names an interpreter that has torch (python3 unless given).
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/gpu/check.py" "$@"
