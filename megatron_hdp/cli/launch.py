"""``megatron-hdp launch``: starts the ranks of a job, and others for those it loses."""

import argparse
import os
import re
from collections.abc import Mapping
from typing import Any

from megatron_hdp.cli.shared.numbers import whole

_DESCRIPTION = """\
Starts ranks as torchrun does, by the same flags and with the same environment. Ranks that run with
--hdp-survive continue when one of them dies: its place is taken by a new process. Without that flag
the job ends with its first rank that fails. On several nodes call it once on each; under Slurm each
knows its --node-rank and --rdzv-endpoint."""

_MOST = 2**20  # of nodes, and of processes of one
_NUM_PORTS = 10_000
_FIRST_PORT = 20_000
_NODE_RANKS = ("GROUP_RANK", "SLURM_NODEID")  # torchrun's, which may run this, and Slurm's
_MOST_SILENT_S = 30.0  # ranks blame each other after a minute


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "launch",
        help="start the ranks of a job, which survive the loss of some",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--nproc-per-node",
        type=whole(1, _MOST),
        required=True,
        metavar="N",
        help="ranks of this node",
    )
    parser.add_argument(
        "--spares-per-node",
        type=whole(0, _MOST),
        default=0,
        metavar="N",
        help="further processes of this node, on GPUs of their own, that build the model and wait "
        "to take the place of lost ranks and stragglers (default: 0)",
    )
    parser.add_argument(
        "--nnodes",
        type=whole(1, _MOST),
        default=1,
        metavar="M",
        help="nodes of the job (default: 1)",
    )
    parser.add_argument(
        "--node-rank",
        type=int,
        metavar="R",
        help="this node's number; 0 holds the job's store (default: that of torchrun or Slurm)",
    )
    parser.add_argument(
        "--rdzv-endpoint",
        metavar="HOST:PORT",
        help="where node 0 listens (default: the first host of Slurm's list of nodes, "
        f"{_FIRST_PORT} + job id %% {_NUM_PORTS}; on one node a free port)",
    )
    parser.add_argument(
        "--node-timeout",
        type=_seconds,
        default=10.0,
        metavar="SECONDS",
        help="after which a node that gives no sign of life is lost, with its ranks (default: 10)",
    )
    parser.add_argument(
        "--max-replacements",
        type=int,
        default=100,
        metavar="N",
        help="processes started in the place of lost ones, over the whole job (default: 100)",
    )
    parser.add_argument(
        "-m", "--module", action="store_true", help="the program is a module, not a script"
    )
    parser.add_argument("program", metavar="PROGRAM", help="what each rank runs")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="its arguments")
    parser.set_defaults(run=_run)


def _seconds(text: str) -> float:
    number = float(text)
    if not 1 <= number <= _MOST_SILENT_S:
        raise argparse.ArgumentTypeError(f"found {number:g}, expected 1 to {_MOST_SILENT_S:g}")
    return number


def _run(arguments: argparse.Namespace) -> int:
    from megatron_hdp.launching import Agent, LaunchPlan, NodeAgent, command_of

    node_rank, address, port = place_of(
        arguments.nnodes, arguments.node_rank, arguments.rdzv_endpoint, os.environ
    )
    plan = LaunchPlan(
        command=command_of([arguments.program, *arguments.rest], arguments.module),
        num_ranks=arguments.nproc_per_node,
        address=address,
        port=port,
        max_replacements=arguments.max_replacements,
        num_spares=arguments.spares_per_node,
        num_nodes=arguments.nnodes,
        node_rank=node_rank,
        node_timeout_s=arguments.node_timeout,
    )
    return Agent(plan).run() if node_rank == 0 else NodeAgent(plan).run()


def place_of(
    num_nodes: int, node_rank: int | None, endpoint: str | None, environment: Mapping[str, str]
) -> tuple[int, str, int]:
    """The number of this node, and where the first one listens: host and port.

    Args:
        num_nodes: of the job.
        node_rank: as given.
        endpoint: as given, HOST:PORT.
        environment: which Slurm may have filled.

    Raises:
        ValueError: neither was given nor does Slurm say it, or it cannot be.
    """
    if num_nodes == 1:
        node_rank, endpoint = node_rank or 0, endpoint or "127.0.0.1:0"
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if node_rank is None:
        known = [environment[name] for name in _NODE_RANKS if name in environment]
        node_rank = int(known[0]) if known else None
    if endpoint is None and nodes:
        port = _FIRST_PORT + int(environment.get("SLURM_JOB_ID", 0)) % _NUM_PORTS
        endpoint = f"{first_node(nodes)}:{port}"
    if node_rank is None or endpoint is None:
        flag = "--rdzv-endpoint" if endpoint is None else "--node-rank"
        raise ValueError(
            f"--nnodes {num_nodes}: found no {flag} and no Slurm that knows it: give each node its "
            "--node-rank, 0 to the first, and all the first one's --rdzv-endpoint HOST:PORT"
        )
    host, _, port_text = endpoint.rpartition(":")
    least_port = 0 if num_nodes == 1 else 1
    if not host or not port_text.isdigit() or not least_port <= int(port_text) < 1 << 16:
        raise ValueError(
            f"found --rdzv-endpoint {endpoint}, expected HOST:PORT, a port from {least_port} to "
            "65535"
        )
    if not 0 <= node_rank < num_nodes:
        raise ValueError(
            f"found --node-rank {node_rank}, expected 0 to {num_nodes - 1}: --nnodes {num_nodes}"
        )
    return node_rank, host, int(port_text)


def first_node(nodes: str) -> str:
    """The first name of a list of Slurm's, such as ``n[03-05,9],m1``."""
    while found := re.match(r"([^[,]*)\[(\d+)[^]]*\](.*)$", nodes):
        nodes = "".join(found.groups())
    return nodes.partition(",")[0]
