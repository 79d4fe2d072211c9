# Finds or makes the Python environment and exports PYTHON; sourced by the other scripts.
#
#   PYTHON=/path/to/python   use this interpreter (it must have torch)
#   an active environment    (venv or conda) is used when its python has torch
#   otherwise                .venv is made with Python 3.11 or newer
#   TORCH_INDEX_URL=...      where .venv gets torch, such as https://download.pytorch.org/whl/cpu
#   EXTRAS=test,plot,...     extras of pyproject.toml to install
#
# What pip and the compiler say is in build/install.log.

INSTALL_LOG=build/install.log
TORCH_REQUIREMENT="torch==2.13.0"
EXTRAS=${EXTRAS:-test,plot,tensorboard}

die() {
    echo "error: $*" >&2
    exit 1
}

logged() { # what, command...: its output goes to the log, and the log's end is shown if it fails
    local what=$1
    shift
    echo "  $what"
    echo "== $*" >>"$INSTALL_LOG"
    "$@" >>"$INSTALL_LOG" 2>&1 || {
        tail -n 20 "$INSTALL_LOG" >&2
        die "$what: the installation failed, see the lines above; all of them are in" \
            "$PWD/$INSTALL_LOG"
    }
}

is_python() { # interpreter: is it Python 3.11 or newer?
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

has_torch() {
    "$1" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' 2>/dev/null
}

find_base_python() {
    local candidate
    for candidate in python3.11 python3 python3.12 python3.13; do
        if is_python "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python 3.11 or newer found: install one (apt install python3.11 python3.11-venv" \
        "python3.11-dev) or set PYTHON=/path/to/python"
}

check_build_tools() { # interpreter
    local compiler=${CXX:-} header
    if [[ -z $compiler ]]; then
        compiler=$(command -v c++ || command -v g++ || command -v clang++ || true)
    fi
    if [[ -z $compiler ]] || ! command -v "${compiler%% *}" >/dev/null; then
        die "no C++ compiler found: install one (apt install g++, dnf install gcc-c++," \
            "xcode-select --install) or set CXX"
    fi
    header=$("$1" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
    [[ -f $header ]] ||
        die "Python's headers are missing, there is no $header: install them" \
            "(apt install python3-dev or python3.11-dev, dnf install python3-devel)"
}

make_venv() { # folder
    local base
    base=$(find_base_python)
    check_build_tools "$base"
    echo "making $1 with $base"
    "$base" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$base cannot make environments: install its venv module (apt install python3-venv)"
    "$base" -m venv "$1"
}

choose_python() {
    local venv=$ROOT/.venv
    if [[ -n ${PYTHON:-} ]]; then
        PYTHON=$(command -v "$PYTHON") || die "PYTHON names no program: give a path to python"
        is_python "$PYTHON" || die "PYTHON=$PYTHON is not Python 3.11 or newer"
        has_torch "$PYTHON" || die "PYTHON=$PYTHON has no torch: install it, or unset PYTHON"
    elif [[ -n ${VIRTUAL_ENV:-}${CONDA_PREFIX:-} ]] && is_python python && has_torch python; then
        PYTHON=$(command -v python)
    else
        [[ -x $venv/bin/python ]] || make_venv "$venv"
        PYTHON=$venv/bin/python
        MAY_INSTALL_TORCH=1
    fi
    export PYTHON
}

source_digest() { # changes when the package has to be installed again
    "$PYTHON" - "$EXTRAS" <<'PY'
import hashlib, pathlib, sys
digest = hashlib.sha256("\0".join([sys.executable, *sys.argv[1:]]).encode())
for path in [pathlib.Path("pyproject.toml"), pathlib.Path("setup.py"), *sorted(pathlib.Path("csrc").rglob("*.[ch]pp"))]:
    digest.update(str(path).encode() + path.read_bytes())
print(digest.hexdigest())
PY
}

is_built() {
    "$PYTHON" -c 'import megatron_hdp.planner, megatron_hdp.data, megatron_hdp.media'
}

install_package() {
    local stamp=$1 digest=$2 pip
    pip=("$PYTHON" -m pip --disable-pip-version-check)
    mkdir -p "$(dirname "$INSTALL_LOG")"
    : >"$INSTALL_LOG"
    "${pip[@]}" --version >/dev/null 2>&1 || die "$PYTHON has no pip: add it (uv pip install pip)"
    check_build_tools "$PYTHON"
    if [[ -n ${MAY_INSTALL_TORCH:-} ]] && ! has_torch "$PYTHON"; then
        logged "$TORCH_REQUIREMENT" \
            "${pip[@]}" install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} \
            "$TORCH_REQUIREMENT"
    fi
    # Without build isolation the compiler's work is not done in a second environment, and nothing
    # is downloaded when everything is there.
    logged "tools that build it" "${pip[@]}" install 'setuptools>=77' 'pybind11>=2.13'
    logged "megatron_hdp: its dependencies, its C++ parts" \
        "${pip[@]}" install --no-build-isolation -e ".[$EXTRAS]"
    mkdir -p "$(dirname "$stamp")"
    echo "$digest" >"$stamp"
}

ensure_environment() {
    local stamp digest
    choose_python
    stamp=$("$PYTHON" -c 'import sys; print(sys.prefix)')/.megatron-hdp
    [[ -w $(dirname "$stamp") ]] || stamp=$ROOT/build/.megatron-hdp
    digest=$(source_digest)
    if [[ $(cat "$stamp" 2>/dev/null) != "$digest" ]] || ! is_built; then
        echo "installing into $("$PYTHON" -c 'import sys; print(sys.prefix)')," \
            "minutes the first time; what pip says is in $INSTALL_LOG"
        install_package "$stamp" "$digest"
        is_built || die "the C++ parts do not load after their installation: see the lines above" \
            "and $PWD/$INSTALL_LOG"
    fi
}

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT" || exit 1
ensure_environment
