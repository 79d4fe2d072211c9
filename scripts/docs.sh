#!/usr/bin/env bash
# Builds the docs site into build/docs, every warning an error: ./scripts/docs.sh [Sphinx arguments]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

extra_docs() { # the requirements of the extra, one a line
    "$PYTHON" - <<'PY'
import tomllib

with open("pyproject.toml", "rb") as file:
    print("\n".join(tomllib.load(file)["project"]["optional-dependencies"]["docs"]))
PY
}

if ! "$PYTHON" -c 'import furo, myst_parser, sphinx' 2>/dev/null; then
    extra_docs >build/docs-requirements.txt
    logged "what the docs need" "$PYTHON" -m pip --disable-pip-version-check install \
        -r build/docs-requirements.txt
fi

export PYTHONWARNINGS=ignore OMP_NUM_THREADS=1 # megatron-core warns of GPU libraries on import
"$PYTHON" -m sphinx --builder html --doctree-dir build/doctrees --fresh-env --quiet --jobs auto \
    --fail-on-warning --keep-going "$@" docs build/docs
echo "docs: the start page is build/docs/index.html"
