"""``megatron-hdp check``: proves that a configuration is sound before any GPU is booked."""

import argparse
import re
from typing import TYPE_CHECKING

from megatron_hdp.cli.shared.numbers import number
from megatron_hdp.exit_codes import ExitCode

if TYPE_CHECKING:
    from megatron_hdp.cli.checking import Finding

_UNITS = {"TB": 10**12, "TiB": 2**40, "GB": 10**9, "GiB": 2**30, "MiB": 2**20}
_PRESETS = ("github", "byted")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "check",
        help="check that a training configuration fits its GPUs; estimate a step's time",
        description="Checks degrees, memory and the longest sequence, and plans one global batch. "
        "Exit code 0: sound. Exit code 1: refused; the message says what to change.",
    )
    add = parser.add_argument
    add("configs", nargs="+", metavar="CONFIG", help="YAML files as for --config; later files win")
    number(add, "--gpus", "N", 1, 2**20, "GPUs of the job", required=True)
    add(
        "--gpu-memory",
        default="80GB",
        metavar="SIZE",
        help="memory of one GPU, in GB (1e9 bytes), GiB or MiB (default: 80GB)",
    )
    add(
        "--host-memory",
        metavar="SIZE",
        help="memory of one node, like 2TB; offloaded activations must fit into it (default: not "
        "checked)",
    )
    number(add, "--gpus-per-node", "N", 1, 2**20, "GPUs that share it", default=8)
    add(
        "--runtime-memory",
        metavar="SIZE",
        help="what CUDA, libraries and NCCL hold of a GPU, like 5.2GB; a run on GPUs says it after "
        "its first step (default: runtime_bytes of --hdp-cost-model, else assumed)",
    )
    add(
        "--preset",
        choices=_PRESETS,
        default="github",
        help="plan a global batch with lengths drawn from this preset (default: github)",
    )
    add(
        "--items",
        metavar="FILE",
        help="sizes of a step's pictures, HEIGHT WIDTH [FRAMES] a line, for --hdp-encoder of a "
        "configuration: their rows' memory and the time that they are encoded",
    )
    number(
        add,
        *("--vocab-size", "V", 1, 2**31 - 1),
        "entries of the tokenizer (default: 257 for byte, else LLaMA 3's 128,256)",
    )
    add("--json", action="store_true", help="print all figures as JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from megatron_hdp.cli.checking import as_json, as_text, check

    host_memory, runtime_memory = arguments.host_memory, arguments.runtime_memory
    finding: Finding = check(
        arguments.configs,
        num_gpus=arguments.gpus,
        gpu_memory_bytes=memory_bytes("--gpu-memory", arguments.gpu_memory),
        host_memory_bytes=host_memory and memory_bytes("--host-memory", host_memory),
        gpus_per_node=arguments.gpus_per_node,
        runtime_bytes=runtime_memory and memory_bytes("--runtime-memory", runtime_memory),
        preset=arguments.preset,
        vocab_size=arguments.vocab_size,
        items=arguments.items,
    )
    print(as_json(finding) if arguments.json else as_text(finding))
    return ExitCode.DONE if finding.is_sound else ExitCode.FAILED


def memory_bytes(option: str, text: str) -> float:
    """Bytes of a size like 80GB, 79.6GiB, 81559MiB or 2TB.

    Raises:
        ValueError: no such size.
    """
    found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)\s*(TB|TiB|GB|GiB|MiB)", text)
    if not found or not float(found[1]):
        raise ValueError(
            f"{option} is {text!r}; expected a size like 80GB, 79.6GiB, 81559MiB or 2TB"
        )
    return float(found[1]) * _UNITS[found[2]]
