"""C++ unit tests, compiled and run, with the sanitizers where they are asked for.

Objects stay in the user's cache for all checkouts: only what has changed is compiled again.
"""

import hashlib
import os
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
OBJECTS = CACHE / "megatron-hdp" / "cpp-tests"
KEPT_S = 30 * 86_400  # what no checkout has used for so long goes
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror"]
OPTIONS = ["-std=c++17", "-g0", "-pthread", "-I", ".", *WARNINGS]  # in CSRC
SANITIZED = pytest.mark.parametrize(
    "extra", [("-O0",), pytest.param(("-Og", *SANITIZERS), marks=pytest.mark.slow)], ids=["", "san"]
)
"""Sanitizers take two and a half times the compiler's time."""


def run_cpp_tests(name: str, patterns: list[str], scratch: Path, extra: tuple[str, ...]) -> None:
    """Compile what the patterns find in csrc to one program, which must end with 0.

    Args:
        name: of the program, and of the folder of its objects.
        patterns: of sources, one of which has a ``main``.
        scratch: an empty folder.
        extra: options of the compiler.
    """
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler: install g++ to run the C++ tests")
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    room = CSRC / patterns[0].split("/")[0]
    found = [*room.rglob("*.hpp"), *(CSRC / "tests").rglob("*.hpp")]
    headers = [path.read_bytes() for path in sorted(found)]
    options = [*OPTIONS, *extra]
    common = hashlib.sha256(b"\0".join([version, *map(str.encode, options), *headers]))
    kept = OBJECTS / f"{name}{'-sanitized' * ('-Og' in extra)}"
    kept.mkdir(parents=True, exist_ok=True)

    def compiled(source: Path) -> Path:
        digest = common.copy()
        digest.update(source.read_bytes())
        target = kept / f"{source.stem}-{digest.hexdigest()[:24]}.o"
        if target.exists():
            target.touch()
        else:
            new = target.with_suffix(f".{os.getpid()}")  # another run may compile it, too
            command = [compiler, *options, "-c", str(source.relative_to(CSRC)), "-o", str(new)]
            subprocess.run(command, cwd=CSRC, check=True)
            new.replace(target)
        return target

    sources = sorted(path for pattern in patterns for path in CSRC.glob(pattern))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = set(pool.map(compiled, sources))
    for outdated in set(kept.iterdir()) - objects:
        if outdated.stat().st_mtime < time.time() - KEPT_S:
            outdated.unlink(missing_ok=True)
    binary = str(scratch / name)
    subprocess.run([compiler, *options, *map(str, objects), "-o", binary], check=True)
    result = subprocess.run([binary], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
