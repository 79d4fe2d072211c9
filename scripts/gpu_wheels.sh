#!/usr/bin/env bash
# Collects the wheels that scripts/gpu_check.sh may lack on a machine without internet:
#
#   ./scripts/gpu_wheels.sh FOLDER [PYTHON_VERSION]      3.12 unless given
#
# torch and numpy are not among them: the machine has its own. See docs/gpu.md.
set -euo pipefail
[[ $# -ge 1 && $1 != -* ]] || { sed -n 2,6p "$0" >&2; exit 2; }
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
mkdir -p "$1"
platforms=()
for minor in 17 24 27 28 31 34 35 39; do
    platforms+=(--platform "manylinux_2_${minor}_x86_64")
done
mapfile -t wheels < <("$python" "$root/scripts/gpu/needs.py" --carry)
"$python" -m pip download --quiet --no-deps --only-binary=:all: --implementation cp \
    --python-version "${2:-3.12}" "${platforms[@]}" --platform manylinux2014_x86_64 \
    --dest "$1" "${wheels[@]}"
ls -l "$1"
du -sh "$1"
