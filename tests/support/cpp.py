"""C++ unit tests, compiled with the sanitizers and run.

Objects stay in the build folder, so that only what has changed is compiled again.
"""

import hashlib
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CSRC, OBJECTS = ROOT / "csrc", ROOT / "build" / "cpp-tests"
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-pthread"]
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror"]
OPTIONS = ["-std=c++17", "-Og", "-g0", "-I", str(CSRC), *WARNINGS, *SANITIZERS]


def run_cpp_tests(name: str, patterns: list[str], scratch: Path) -> None:
    """Compile what the patterns find in csrc to one program, which must end with 0.

    Args:
        name: of the program, and of the folder of its objects.
        patterns: of sources, one of which has a ``main``.
        scratch: an empty folder.
    """
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler: install g++ to run the C++ tests")
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    headers = [path.read_bytes() for path in sorted(CSRC.rglob("*.hpp"))]
    common = hashlib.sha256(b"\0".join([version, *map(str.encode, OPTIONS), *headers]))
    kept = OBJECTS / name
    kept.mkdir(parents=True, exist_ok=True)

    def compiled(source: Path) -> Path:
        digest = common.copy()
        digest.update(source.read_bytes())
        target = kept / f"{source.stem}-{digest.hexdigest()[:24]}.o"
        if not target.exists():
            new = scratch / target.name
            subprocess.run([compiler, *OPTIONS, "-c", str(source), "-o", str(new)], check=True)
            shutil.move(new, target)
        return target

    sources = sorted(path for pattern in patterns for path in CSRC.glob(pattern))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = set(pool.map(compiled, sources))
    for outdated in set(kept.glob("*.o")) - objects:
        outdated.unlink()
    binary = str(scratch / name)
    subprocess.run([compiler, *SANITIZERS, *map(str, objects), "-o", binary], check=True)
    result = subprocess.run([binary], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
