"""ByteScale's evaluation (arXiv 2502.21231, section 8) by simulation, beside the paper's figures.

python reproduce_bytescale.py                  # docs/reproduction.json, .md and pictures
python reproduce_bytescale.py --cells 'llama-7b github *'    # these cells, to stdout
python reproduce_bytescale.py --page           # page and pictures of the JSON again
"""

import argparse
import fnmatch
import json
import os
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bytescale.cases import ablation, case_study, offload_at_256k, offload_table
from bytescale.cells import BATCHES, SEEDS, all_cells, figures_of
from bytescale.checks import reasons_for, sensitivity
from bytescale.machine import Constants
from bytescale.page import page_of

DOCS = Path(__file__).parents[2] / "docs"


def main() -> int:
    """Run what the flags say; return an exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cells", metavar="GLOB", help="only these cells, as JSON to stdout")
    parser.add_argument(
        "--sequence-parts",
        type=int,
        default=1,
        metavar="N",
        help="with --cells: ours in parts, too",
    )
    parser.add_argument(
        "--virtual-stages",
        type=int,
        default=1,
        metavar="V",
        help="with --sequence-parts: ours and the static mesh in V chunks a stage, too",
    )
    parser.add_argument("--page", action="store_true", help="from the JSON that is there")
    parser.add_argument("--folder", type=Path, default=DOCS, help="default: docs/")
    options = parser.parse_args()
    constants = Constants()
    if options.cells is not None:
        names = {cell.name: cell for cell in all_cells()}
        chosen = fnmatch.filter(names, options.cells)
        if not chosen:
            parser.error(f"--cells {options.cells}: no such cell; there are {', '.join(names)}")
        how = options.sequence_parts, options.virtual_stages
        cells = [figures_of(names[name], constants, *how) for name in chosen]
        print(json.dumps({"constants": asdict(constants), "cells": cells}, indent=1))
        return 0
    path = options.folder / "reproduction.json"
    if not options.page:
        path.write_text(_text(everything(constants)))
    found = json.loads(path.read_text())
    (options.folder / "reproduction.md").write_text(page_of(found))
    from bytescale.pictures import draw

    draw(found, options.folder)
    return 0


def everything(constants: Constants) -> dict[str, Any]:
    """What the JSON holds; progress goes to stderr."""
    started = time.perf_counter()
    cells, reasons = [], []
    for cell in all_cells():
        entry = figures_of(cell, constants)
        cells.append(entry)
        reasons += reasons_for(cell, entry, constants)
        print(f"{cell.name}, {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    found = {
        "constants": asdict(constants),
        "seeds": SEEDS,
        "batches": BATCHES,
        "cells": cells,
        "reasons": reasons,
        "case_study": case_study(constants),
        "ablation": ablation(constants),
        "offload": offload_table(constants),
        "offload_256k_s": offload_at_256k(constants),
        "sensitivity": sensitivity(constants),
    }
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    print(f"{time.perf_counter() - started:.0f} s on {machine}", file=sys.stderr)
    return found


def _text(found: dict[str, Any]) -> str:
    """JSON with a line for each cell and reason, so that a change of one is a line."""
    parts = []
    for name, value in found.items():
        if isinstance(value, list):
            lines = ",\n  ".join(json.dumps(one) for one in value)
            parts.append(f' "{name}": [\n  {lines}\n ]')
        else:
            parts.append(f' "{name}": {json.dumps(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
