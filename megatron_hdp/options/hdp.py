"""HDP's own flags, the same for both training commands."""

import re
from dataclasses import dataclass, fields
from pathlib import Path

from megatron_hdp.options.declaration import OptionError, check_values, flag_of, option

_MOST_TOKENS = 2**40  # the planner's limit
ONLINE = Path("online")
"""Instead of a file of a cost model: none, learn it. A file of this name needs its folder."""

PLANNER_FLAGS = {
    "tokens_per_rank": "--hdp-tokens-per-rank",
    "max_length": "--seq-length",
    'offload="auto"': "--hdp-offload auto",
}
"""Training's flags by the arguments that the planner's messages name."""


@dataclass(frozen=True, kw_only=True)
class HdpOptions:
    """Hybrid data parallelism."""

    hybrid_data_parallel: bool = option(
        False, help="Plan every global batch over one HDP dimension instead of a DP x CP mesh."
    )
    hdp_tokens_per_rank: int = option(
        None,
        minimum=1,
        maximum=_MOST_TOKENS,
        help="Capacity C: tokens that one HDP rank can hold in one micro-batch.",
    )
    hdp_global_batch_tokens: int | None = option(
        None,
        minimum=1,
        maximum=_MOST_TOKENS,
        help="Size of the global batch in tokens, instead of --global-batch-size in sequences.",
    )
    hdp_strategy: str = option(
        "auto",
        choices=(
            *("auto", "static", "naive", "bytescale", "dynamic-cp"),
            *("dp-balance", "pp-balance", "ep-balance"),
        ),
        help="How to plan: static is the fixed DP x CP mesh, the baseline; dynamic-cp is "
        "Megatron-LM's dynamic context parallelism; auto is pp-balance with pipeline stages, "
        "ep-balance where experts span HDP ranks, else dp-balance.",
    )
    hdp_offload: str = option(
        "off",
        choices=("off", "auto"),
        help="auto: activations of micro-batches that need it wait in host memory between forward "
        "and backward, where that saves ranks and the forward is long enough to hide the copies.",
    )
    hdp_long_sequence: str = option(
        "error",
        choices=("error", "truncate", "split"),
        help="What to do with a document longer than --seq-length.",
    )
    hdp_data: Path | None = option(
        None,
        metavar="FILE",
        help="YAML file of the data, instead of --data-path and its kin: sources, their weights "
        "and the longest sequence over time, held-out validation.",
    )
    hdp_loaders: str | None = option(
        None,
        choices=("local", "ray"),
        help="Who loads the data: local, each rank in its own process; ray, a data plane of Ray "
        "actors beside the job. Without it the file of --hdp-data says so, else local.",
    )
    hdp_cost_model: Path | None = option(
        None,
        metavar="FILE",
        help="Measured cost model (JSON); without it, it is derived from the model's shape. With "
        "the word online it is so derived, and corrected while training, as by --hdp-online.",
    )
    hdp_online: bool = option(
        False,
        help="Correct the cost model by the times of the steps, find slow ranks and move their "
        "work.",
    )
    hdp_rank_speeds: Path | None = option(
        None,
        metavar="FILE",
        help="Speed of one HDP rank a line, 1 being full speed, for ranks known to differ.",
    )
    hdp_slice_multiple: int = option(
        1,
        minimum=1,
        help="Pad each chunk of a sequence to a multiple of this, for kernels that want one.",
    )
    hdp_attention: str = option(
        "auto",
        choices=("auto", "transformer-engine", "flash-attn", "torch"),
        help="Whose attention kernels run on a GPU; auto takes the first of these that loads, fits "
        "and computes rightly, and says which.",
    )
    hdp_ring_max_ctas: int = option(
        16,
        minimum=0,
        maximum=64,
        help="Most blocks (CTAs) of a GPU that NCCL may take for the messages of rings, a power of "
        "two; attention runs on the others meanwhile. 0: NCCL's own number.",
    )
    hdp_float32_rings_from: int | None = option(
        None,
        minimum=2,
        metavar="RANKS",
        help="Rings of so many ranks and more add up outputs and gradients in float32, by our own "
        "ring. Without it TransformerEngine's adds them up in bfloat16 at every hop: about 0.6 % "
        "off at 64 ranks, 0.3 % in float32. Ours sends a third more bytes.",
    )
    hdp_mla_ring: str = option(
        "auto",
        choices=("auto", "latent", "kv"),
        help="What travels in rings of multi-latent attention: the latent, of which each member "
        "makes keys and values anew, or these themselves; auto asks the cost model for each ring.",
    )
    hdp_fused_loss: bool = option(
        True,
        help="Make the logits of all tokens before the loss: more memory, the same result.",
    )
    hdp_corrupt_limit: int = option(
        16,
        minimum=0,
        help="Stop after more than this many corrupt documents in a row; fewer are skipped.",
    )
    hdp_plot_plan: Path | None = option(
        None, metavar="FILE", help="Draw one step's plan, a Gantt chart per rank, into this file."
    )
    hdp_plot_step: int = option(1, minimum=1, help="The step that --hdp-plot-plan draws.")
    hdp_trace: Path | None = option(
        None,
        metavar="DIR",
        help="Write one timeline of all ranks, for Perfetto, into this folder: compute, waits and "
        "the plan laid over them. On GPUs it shows when work ran, not when it was launched.",
    )
    hdp_trace_steps: str | None = option(
        None, metavar="N|N-M", help="The steps that --hdp-trace shows: a few, like 5 or 5-7."
    )
    metrics_path: Path | None = option(
        None, metavar="FILE", help="Append one JSON object a step to this file."
    )

    @property
    def learns_costs(self) -> bool:
        """Whether the cost model is corrected while training."""
        return self.hdp_online or self.hdp_cost_model == ONLINE

    @property
    def cost_model_file(self) -> Path | None:
        """The measured cost model that training begins with, if there is one."""
        return None if self.hdp_cost_model == ONLINE else self.hdp_cost_model

    def validate(
        self, *, global_batch_size: int | None, attention_dropout: float, train_iters: int
    ) -> None:
        """Check these options together, and with those of Megatron's that they depend on.

        Raises:
            OptionError: says what was found, what was expected and the remedy.
        """
        check_values(self)
        if not self.hybrid_data_parallel:
            self._check_unused()
            return
        if self.hdp_tokens_per_rank is None:
            raise OptionError(
                "--hybrid-data-parallel needs --hdp-tokens-per-rank: the tokens that one rank can "
                "hold in a micro-batch"
            )
        if (self.hdp_global_batch_tokens is None) == (global_batch_size is None):
            found = "neither" if global_batch_size is None else "both"
            raise OptionError(
                f"found {found} of --hdp-global-batch-tokens and --global-batch-size, expected "
                "exactly one: the global batch has a size in tokens or in sequences"
            )
        if attention_dropout != 0:
            raise OptionError(
                f"--attention-dropout is {attention_dropout}, and ring attention has no dropout: "
                "pass --attention-dropout 0"
            )

        self._check_trace(train_iters)

    def _check_trace(self, train_iters: int) -> None:
        if (self.hdp_trace is None) != (self.hdp_trace_steps is None):
            raise OptionError("--hdp-trace DIR and --hdp-trace-steps go together: give both")
        if self.hdp_trace_steps is None:
            return
        last = trace_steps(self.hdp_trace_steps)[-1]
        if last > train_iters:
            raise OptionError(
                f"--hdp-trace-steps {self.hdp_trace_steps} goes beyond --train-iters "
                f"{train_iters}: trace earlier steps"
            )

    def _check_unused(self) -> None:
        for item in fields(self):
            if item.name.startswith("hdp_") and getattr(self, item.name) != item.default:
                raise OptionError(
                    f"{flag_of(item.name)} has no effect without --hybrid-data-parallel: add "
                    "the one or remove the other"
                )


def trace_steps(text: str) -> range:
    """Return the steps of ``--hdp-trace-steps``.

    Raises:
        OptionError: not a step or a range of them.
    """
    found = re.fullmatch(r"([0-9]{1,10})(?:-([0-9]{1,10}))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= last:
        raise OptionError(
            f"--hdp-trace-steps: found {text!r}, expected a step or the first and last of some, "
            "counted from 1, like 5 or 5-7"
        )
    return range(first, last + 1)
