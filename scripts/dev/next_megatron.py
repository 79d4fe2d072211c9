"""Says what of a Megatron-LM to come fits HDP: one table, and an exit code.

What HDP imports of Megatron, the seams that it joins, the functions that its plugin replaces and
where the patches of scripts belong is looked for in the source, of which nothing is imported.
"""

import argparse
import ast
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_hdp.megatron.doctor.doctor import SEAMS, Seam
from scripts.dev.megatron_source import Missing, Source

_MAIN = "if __name__ =="
_HUNK = re.compile(r"^@@ -(\d+),0 ", re.MULTILINE)
_HYBRID = "megatron.core.models.hybrid"
_OF_HYBRIDS = (
    Seam(
        f"{_HYBRID}.hybrid_model:HybridModel.forward",
        "a subclass of a hybrid lets it stop at the hidden states",
        parameter="packed_seq_params",
    ),
    Seam(f"{_HYBRID}.hybrid_block:HybridStack.forward", "hands each block its micro-batch"),
    Seam("megatron.core.ssm.mlp_layer:MLPLayer", "a block that is an MLP"),
)
"""Seams in releases that have hybrids of HDP's, from 0.18 on."""
ROOT = Path(__file__).resolve().parents[2]
PATCH_FILES = ROOT / "patches" / "megatron-lm"


@dataclass(frozen=True)
class Row:
    """One thing that HDP relies on, and what is wrong with it (None: it is as expected)."""

    kind: str
    what: str
    problem: str | None = None
    is_needed: bool = True
    """Whether HDP cannot do without it."""


def rows_of(path: Path) -> list[Row]:
    """Everything that is looked for in a checkout or a wheel."""
    source = Source(path)
    release = _known_release(source.version)
    seams = SEAMS if release in ("0.16", "0.17") else (*SEAMS, *_OF_HYBRIDS)
    return [
        *(_row_of_seam(source, one) for one in seams),
        *_rows_of_patches(source, release),
        *_rows_of_imports(source),
        *_rows_of_patch_files(path),
    ]


def _known_release(version: str) -> str:
    """The release whose parameters are expected: the version's own, else the newest we know."""
    from megatron_hdp.megatron.lm.releases import RELEASES, release_of

    return release_of(version) if release_of(version) in RELEASES else RELEASES[-1]


def _row_of_seam(source: Source, seam: Seam) -> Row:
    problem = None
    module, _, name = seam.target.partition(":")
    if module.startswith("megatron."):
        try:
            found = source.find(module, name).parameters
            if seam.parameter is not None and found is not None and seam.parameter not in found:
                problem = f"found ({', '.join(found)}), expected {seam.parameter} among them"
        except Missing as missing:
            problem = f"{missing}, expected it: {seam.why}"
    return Row("seam", seam.target, problem)


def _rows_of_patches(source: Source, release: str) -> Iterator[Row]:
    from megatron_hdp.megatron.lm.patches import PATCHES

    for patch in PATCHES.patches:
        if release not in patch.parameters:
            continue
        problem, expected = None, patch.parameters[release]
        try:
            found = source.find(*patch.target.split(":")).parameters
            if expected is not None and found is not None and found != expected:
                problem = _difference(found, expected)
        except Missing as missing:
            problem = f"{missing}, expected it: {patch.why}"
        yield Row("patch", patch.target, problem)


def _difference(found: Sequence[str], expected: Sequence[str]) -> str:
    more = [one for one in found if one not in expected]
    fewer = [one for one in expected if one not in found]
    if not more and not fewer:
        return f"found ({', '.join(found)}), expected ({', '.join(expected)})"
    both = (("found besides", more), ("expected besides", fewer))
    return "; ".join(f"{words} {', '.join(names)}" for words, names in both if names)


def _rows_of_imports(source: Source) -> Iterator[Row]:
    """What modules of ours import of Megatron; what stands in a ``try`` they can do without."""
    for module, name, file, is_needed in sorted(set(_imports())):
        problem = None
        try:
            source.find(module, name) if name else source.tree(module)
        except Missing as missing:
            problem = f"{missing}, expected it: {file} imports it"
        yield Row("import", f"{module}:{name}".rstrip(":"), problem, is_needed)


def _imports() -> Iterator[tuple[str, str, str, bool]]:
    """Module, name ('' of a whole module), importing file, whether it must be there."""
    package = ROOT / "megatron_hdp"
    for file in package.rglob("*.py"):
        where = str(file.relative_to(ROOT))
        if where.startswith(("megatron_hdp/bridge", "megatron_hdp/verl")):
            continue
        tree = ast.parse(file.read_text())
        tried = {
            id(inner)
            for one in ast.walk(tree)
            if isinstance(one, ast.Try)
            for statement in one.body
            for inner in ast.walk(statement)
        }
        for one in ast.walk(tree):
            is_needed = id(one) not in tried
            if isinstance(one, ast.Import):
                for alias in one.names:
                    if alias.name.split(".")[0] == "megatron":
                        yield alias.name, "", where, is_needed
            elif isinstance(one, ast.ImportFrom) and not one.level:
                for alias in one.names if (one.module or "").split(".")[0] == "megatron" else ():
                    yield str(one.module), alias.name, where, is_needed


def _rows_of_patch_files(path: Path) -> Iterator[Row]:
    """Which patches of scripts fit a checkout: those whose lines come first in its main block."""
    script = path / "pretrain_gpt.py"
    if not script.is_file():
        return
    lines = script.read_text().split("\n")
    main = next((n for n, line in enumerate(lines, 1) if line.startswith(_MAIN)), None)
    for patch in sorted(PATCH_FILES.glob("*.patch")):
        wanted = int(_HUNK.search(patch.read_text())[1])
        problem = None
        if wanted != main:
            problem = f"found the main block of {script.name} at line {main}, expected {wanted}"
        yield Row("patch file", patch.name, problem, is_needed=False)


def table_of(rows: Sequence[Row], every: bool = False) -> str:
    """One line for each thing that does not fit, or for everything; counts at the end."""
    lines = []
    for row in rows:
        if every or row.problem or row.kind == "patch file":
            fits = "ok" if row.problem is None else "MISFIT" if row.is_needed else "no"
            lines.append(f"{fits:8}{row.kind:12}{row.what}")
            lines += [f"{'':20}{row.problem}"] if row.problem else []
    for kind in dict.fromkeys(row.kind for row in rows):
        of_kind = [row for row in rows if row.kind == kind]
        fit = sum(row.problem is None for row in of_kind)
        lines.append(f"{kind}: {fit} of {len(of_kind)} fit")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; 0 if everything that HDP needs is there, else 1; 2 for no Megatron."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("path", type=Path, help="folder of a checkout, or a wheel of megatron-core")
    parser.add_argument("--all", action="store_true", help="a line for what fits as well")
    args = parser.parse_args(arguments)
    try:
        version = Source(args.path).version
    except (Missing, OSError) as error:
        print(
            f"{args.path}: {error}, expected the folder of a Megatron-LM checkout or a wheel of "
            "megatron-core: git clone one, or pip download --no-deps one",
            file=sys.stderr,
        )
        return 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the installed Megatron's, when our records are imported
        release, rows = _known_release(version), rows_of(args.path)
    print(f"megatron-core {version} in {args.path}, compared with what HDP expects of {release}")
    print(table_of(rows, args.all))
    return int(any(row.problem and row.is_needed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
