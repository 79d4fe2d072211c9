"""Brings TransformerEngine up from a carried bundle, on a machine without internet.

``python scripts/gpu/bring_up_te.py BUNDLE FOLDER`` unpacks and builds into FOLDER and writes
FOLDER/environment.json: what a process needs in its environment to import it. The last line says
which version came up, or why none did. A bundle holds

- ``te_py.tar.gz``: the Python files of transformer_engine and the packages it imports,
- ``libtransformer_engine*.so.xz``: its library, of the wheel, with the code of one architecture,
- ``te_torch_ext.so.xz``: its PyTorch extension for this Python and torch, if it was built before,
- ``transformer_engine_torch-*.tar.gz``: the sources of that extension, else built here.

What is built here is left in $OUT, compressed, to be carried next time.
"""

import argparse
import ctypes
import importlib.util
import json
import lzma
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
from pathlib import Path

_EXTENSION = f"transformer_engine_torch{sysconfig.get_config_var('EXT_SUFFIX')}"
_SYMBOL = "cublasLtGroupedMatrixLayoutInit_internal"  # bound at load time; CUDA 13.0 lacks it
_IMPORT = "import torch, transformer_engine as t, transformer_engine.pytorch; print(t.__version__)"


def unpack(bundle: Path, site: Path) -> None:
    """Put the Python files and the library in place, unless they are."""
    library = site / "transformer_engine/wheel_lib/libtransformer_engine.so"
    if library.exists():
        return
    site.mkdir(parents=True, exist_ok=True)
    with tarfile.open(bundle / "te_py.tar.gz") as archive:
        _extract(archive, site)
    _decompress(_only(bundle, "libtransformer_engine*.so.xz"), library)


def environment_of(site: Path) -> dict[str, str]:
    """Return the variables that a process needs to import it from `site`."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.origin is not None, "no torch"
    nvidia = Path(torch.origin).parents[1] / "nvidia"
    folders = [nvidia / name for name in ("cu13/lib", "cudnn/lib", "nccl/lib")]
    before = os.environ.get("LD_LIBRARY_PATH")
    found = {
        "PYTHONPATH": str(site),
        "CUDNN_HOME": str(nvidia / "cudnn"),  # else the system's, if there is one, is loaded
        "LD_LIBRARY_PATH": os.pathsep.join([*map(str, folders), *filter(None, [before])]),
    }
    stub = site / "libcublaslt_stub.so"
    if stub.exists() and not _has_symbol(folders[0] / "libcublasLt.so.13"):
        found["LD_PRELOAD"] = str(stub)
    return found


def put_extension(bundle: Path, folder: Path, site: Path, environment: dict[str, str]) -> None:
    """Take the carried extension if it loads here, else build it."""
    extension = site / "transformer_engine/wheel_lib" / _EXTENSION
    carried = bundle / "te_torch_ext.so.xz"
    if not extension.exists() and carried.exists():
        _decompress(carried, extension)
    if extension.exists():
        if version(environment) is not None:
            return
        print("the extension that was there does not load: building it", flush=True)
        extension.unlink()
    shutil.copy(_build(bundle, folder, environment), extension)
    if shutil.which("strip"):
        subprocess.run(["strip", "--strip-unneeded", str(extension)], check=False)
    out = Path(os.environ.get("OUT", folder))
    with lzma.open(out / carried.name, "wb", preset=3) as compressed:
        compressed.write(extension.read_bytes())


def version(environment: dict[str, str]) -> str | None:
    """Return the version that imports under `environment`; what fails is printed."""
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT],
        env=_process_environment(environment),
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode == 0:
        return done.stdout.split()[-1]
    print("\n".join((done.stderr or done.stdout).splitlines()[-4:]), flush=True)
    return None


def _extract(archive: tarfile.TarFile, folder: Path) -> None:
    """Files alone, none outside the folder; Python has no such check before 3.11.4."""
    if hasattr(tarfile, "data_filter"):
        archive.extractall(folder, filter="data")
    else:
        archive.extractall(folder)


def _build(bundle: Path, folder: Path, environment: dict[str, str]) -> Path:
    """Compile the extension, which is C++ only; returns the file."""
    sources = folder / "build"
    shutil.rmtree(sources, ignore_errors=True)
    with tarfile.open(_only(bundle, "transformer_engine_torch-*.tar.gz")) as archive:
        _extract(archive, sources)
    (tree,) = sources.iterdir()
    nvidia = Path(environment["LD_LIBRARY_PATH"].split(os.pathsep)[0]).parents[1]
    headers = [nvidia / name for name in ("cu13/include", "cudnn/include", "nccl/include")]
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
    if (toolkit / "crt").is_dir():
        headers.insert(0, toolkit)  # those of the pip packages lack crt/
    building = _process_environment(environment) | {
        "CPLUS_INCLUDE_PATH": os.pathsep.join(map(str, headers)),
        "NVTE_PYTORCH_FORCE_BUILD": "TRUE",
        "NVTE_WITH_NCCL_EP": "0",
        "NVTE_CUDA_ARCHS": "90",
        "MAX_JOBS": str(os.cpu_count()),
        "CFLAGS": "-O1 -g0",
    }
    building.pop("LD_PRELOAD", None)
    started = time.monotonic()
    with (folder / "build.log").open("w") as log:
        done = subprocess.run(
            [sys.executable, "setup.py", "build_ext", "--inplace"],
            cwd=tree,
            env=building,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    print(f"built in {time.monotonic() - started:.0f} s", flush=True)
    built = list(tree.glob("transformer_engine_torch*.so"))
    if done.returncode or not built:
        lines = (folder / "build.log").read_text(errors="replace").splitlines()
        errors = [line for line in lines if "rror" in line] or lines[-3:]
        raise RuntimeError("the extension does not compile: " + " / ".join(errors[:3]))
    return built[0]


def _process_environment(environment: dict[str, str]) -> dict[str, str]:
    paths = [environment["PYTHONPATH"], *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | environment | {"PYTHONPATH": os.pathsep.join(paths)}


def _has_symbol(library: Path) -> bool:
    try:
        return hasattr(ctypes.CDLL(str(library)), _SYMBOL)
    except OSError:
        return False  # it needs others that only a process with torch has


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise RuntimeError(f"{folder} has {len(found)} files {pattern}, expected one")
    return found[0]


def _decompress(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(target.name + ".tmp")
    with lzma.open(source) as compressed, temporary.open("wb") as plain:
        shutil.copyfileobj(compressed, plain, 1 << 22)
    temporary.replace(target)


def main() -> int:
    """Bring it up; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    site = folder / "site"
    try:
        unpack(arguments.bundle.resolve(), site)
        environment = environment_of(site)
        put_extension(arguments.bundle.resolve(), folder, site, environment)
    except (RuntimeError, OSError, tarfile.TarError, lzma.LZMAError) as error:
        print(f"TransformerEngine does not come up: {error}")
        return 1
    found = version(environment)
    if found is None:
        print("TransformerEngine does not import, see above")
        return 1
    (folder / "environment.json").write_text(json.dumps(environment))
    print(f"TransformerEngine {found}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
