"""Sets the virtual stages of ``configs/`` and writes the tables of two pages of docs/.

``python scripts/dev/configurations.py`` checks each configuration on the GPUs that its head names.
One with pipeline stages gets the virtual stages that ``megatron-hdp check`` proposes for it if it
has none. The rows of the tables of configurations.md and models.md, and what stands between marks,
are written anew; other text is left alone.
"""

import argparse
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from megatron_hdp.cli.checking import Finding, as_text, check

ROOT = Path(__file__).parents[2]
CONTEXTS = ("256k", "512k", "1m", "2m")
"""Of the paper's models, configs/bytescale/MODEL-CONTEXT.yaml, on docs/configurations.md."""
MODELS_CONTEXTS = ("32k", "128k", "1m")
"""Of published ones, configs/MODEL/CONTEXT.yaml, on docs/models.md."""
SHOWN = "llama-70b-256k"
"""The configuration whose stages and choices the page shows."""

_KEY = "num-virtual-stages-per-pipeline-rank"
_GPUS = re.compile(r"^#   megatron-hdp check configs/\S+ --gpus (\d+)$", re.MULTILINE)


def checked(path: Path) -> Finding:
    """What ``check`` finds of a configuration on its GPUs, its virtual stages set.

    Raises:
        ValueError: it names no GPUs, or is not sound.
    """
    plain = with_virtual_stages(path.read_text(), 1)
    path.write_text(plain)
    found = _checked(path)
    best = found.best_virtual_stages or 1
    if best == 1:
        return found
    path.write_text(with_virtual_stages(plain, best))
    return _checked(path)


def _checked(path: Path) -> Finding:
    gpus = _GPUS.search(path.read_text())
    if gpus is None:
        raise ValueError(f"{path}: found no line '#   megatron-hdp check configs/... --gpus N'")
    found = check([str(path)], num_gpus=int(gpus[1]), gpu_memory_bytes=80e9, preset="github")
    if not found.is_sound:
        raise ValueError(f"{path}: {found.refusals[0]}")
    return found


def with_virtual_stages(text: str, number: int) -> str:
    """A configuration's text with so many virtual stages on a rank."""
    without = re.sub(rf"^{_KEY}:.*\n", "", text, flags=re.MULTILINE)
    if number == 1:
        return without
    stages = r"^(pipeline-model-parallel-size:.*\n)"
    return re.sub(stages, rf"\g<1>{_KEY}: {number}\n", without, count=1, flags=re.MULTILINE)


def row(model: str, found: Sequence[Finding]) -> str:
    """A model's line of the table, a cell for each context."""
    first = found[0].job
    assert first is not None
    most_gb = max(one.memory.total for one in found if one.memory) / 1e9
    cells = [
        model,
        f"{first.num_gpus:,}",
        f"{first.tensor_ranks} x {first.stages} x {first.expert_ranks}",
        f"{first.tokens_per_rank:,}",
        f"{math.ceil(10 * most_gb) / 10:.1f}",
        *map(step_cell, found),
    ]
    return f"| {' | '.join(cells)} |"


def step_cell(found: Finding) -> str:
    """Efficiency, time of a step and virtual stages where there are some."""
    assert found.step is not None and found.job is not None
    chunks = found.job.model_chunks
    planned = f"{found.step.efficiency:.3f}, {found.step.step_s:.1f} s"
    return planned + (f", V {chunks}" if chunks > 1 else "")


def stages_and_choices(found: Finding) -> tuple[list[str], list[str]]:
    """The lines of ``check`` on each stage, and on each number of virtual stages."""
    lines = as_text(found).splitlines()
    starts = ("  stage ", "  GB on a GPU", "  virtual stages", "  best: ")
    begin, end, first, last = (
        next(number for number, line in enumerate(lines) if line.startswith(start))
        for start in starts
    )
    return lines[begin:end], lines[first : last + 1]


def with_rows(page: str, rows: Iterable[str]) -> str:
    """The page with other rows for the models that they begin with.

    Raises:
        ValueError: it has no row of a model.
    """
    for new in rows:
        start = "|".join(new.split("|")[:2]) + "|"
        page, number = re.subn(rf"^{re.escape(start)}.*$", new, page, flags=re.MULTILINE)
        if number != 1:
            raise ValueError(f"found {number} rows that begin with {start!r}, expected one")
    return page


def with_blocks(page: str, blocks: dict[str, list[str]]) -> str:
    """The page with other text between ``<!-- name -->`` and ``<!-- end of name -->``.

    Raises:
        ValueError: it lacks a mark.
    """
    for name, lines in blocks.items():
        before, begin, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- end of {name} -->")
        if not end:
            raise ValueError(f"found no marks of {name!r} on the page")
        page = before + begin + "\n".join(["```text", *lines, "```\n"]) + end + after
    return page


def main() -> None:
    """Check all configurations, set what is proposed, write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="holds configs/ and docs/")
    root = parser.parse_args().root
    configs, docs = root / "configs", root / "docs"
    papers = configs / "bytescale"
    first = sorted(papers.glob(f"*-{CONTEXTS[0]}.yaml"))
    models = [path.stem.removesuffix(f"-{CONTEXTS[0]}") for path in first]
    found = {
        model: [checked(papers / f"{model}-{context}.yaml") for context in CONTEXTS]
        for model in models
    }
    shown_model, _, context = SHOWN.rpartition("-")
    stages, choices = stages_and_choices(found[shown_model][CONTEXTS.index(context)])
    page = written(docs / "configurations.md", found)
    blocks = {"stages": stages, "choices": choices}
    (docs / "configurations.md").write_text(with_blocks(page, blocks))
    published = {
        path.parent.name: [checked(path.with_name(f"{one}.yaml")) for one in MODELS_CONTEXTS]
        for path in sorted(configs.glob(f"*/{MODELS_CONTEXTS[0]}.yaml"))
    }
    written(docs / "models.md", published)


def written(path: Path, found: Mapping[str, Sequence[Finding]]) -> str:
    """A page with the models' rows, written and printed; its text."""
    rows = [row(model, of_contexts) for model, of_contexts in found.items()]
    page = with_rows(path.read_text(), rows)
    path.write_text(page)
    print(*rows, sep="\n", end="\n" if rows else "")
    return page


if __name__ == "__main__":
    main()
