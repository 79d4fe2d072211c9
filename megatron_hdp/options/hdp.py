"""HDP's own flags, the same for both training commands."""

import re
from dataclasses import dataclass, fields
from pathlib import Path

from megatron_hdp import strategies
from megatron_hdp.options.declaration import OptionError, check_values, flag_of, no_effect, option

_MOST_TOKENS = 2**40  # the planner's limit
ONLINE = Path("online")
"""Value of --hdp-cost-model that means --hdp-online; a file of this name needs its folder."""

LORA_TARGETS = (
    *("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
    *("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj"),
    *("linear_kv_down_proj", "linear_kv_up_proj"),
)

PLANNER_FLAGS = {
    "tokens_per_rank": "--hdp-tokens-per-rank",
    "max_length": "--seq-length",
    'offload="auto"': "--hdp-offload auto",
    "host_memory_bytes": "--hdp-host-memory-gb",
    'recompute="auto"': "--hdp-recompute auto",
    "streams=True with the strategy auto": "--hdp-long-sequence stream",
}
"""Training's flags by the arguments that the planner's messages name."""


@dataclass(frozen=True, kw_only=True)
class HdpOptions:
    """Hybrid data parallelism."""

    hybrid_data_parallel: bool = option(
        False,
        help="Train with hybrid data parallelism: plan every global batch over one HDP dimension "
        "instead of a DP x CP mesh.",
    )
    hdp_tokens_per_rank: int = option(
        None,
        minimum=1,
        maximum=_MOST_TOKENS,
        help="Capacity: tokens that one HDP rank can hold in one micro-batch.",
    )
    hdp_global_batch_tokens: int | None = option(
        None,
        minimum=1,
        maximum=_MOST_TOKENS,
        help="Size of the global batch in tokens, instead of --global-batch-size in sequences.",
    )
    hdp_strategy: str = option(
        strategies.AUTO,
        choices=strategies.CHOICES,
        help=f"Planning strategy. {strategies.HELP}.",
    )
    hdp_offload: str = option(
        "off",
        choices=("off", "auto"),
        help="Offload activations to host memory. auto: those of a micro-batch wait there between "
        "forward and backward if that saves ranks and the forward is long enough to hide the "
        "copies.",
    )
    hdp_host_memory_gb: float | None = option(
        None,
        minimum=0,
        help="The most host memory that a rank may fill by --hdp-offload auto, with activations "
        "and with what streams keep, in GB (1e9 bytes): the node's over its GPUs. Default: no "
        "limit.",
    )
    hdp_sequence_parts: int | None = option(
        1,
        minimum=1,
        maximum=1024,
        auto=True,
        help="With pipeline stages, run each micro-batch in up to this many parts of equal time: a "
        "stage hands a part on while it computes the next one, so that the next stage begins "
        "earlier. Each runs in as many as make the step shortest. 1: all run "
        "whole. auto: 8 for each stage, and 1 where no plan is in parts: without stages, or with a "
        "strategy that does not plan for them.",
    )
    hdp_long_sequence: str = option(
        "error",
        choices=("error", "truncate", "split", "stream"),
        help="What to do with a document that is longer than --seq-length. stream: an error, as "
        "with error; and a sequence up to it that all ranks together cannot hold runs as a stream, "
        "in parts that keep only keys and values (in host memory with --hdp-offload auto, if need "
        "be) and are computed again in backward. So does one of which a ring is slower.",
    )
    hdp_recompute: str = option(
        "off",
        choices=("off", "auto"),
        help="Recompute single micro-batches in backward, layer by layer. auto: a long sequence "
        "that no ring holds otherwise, or that is faster so, on fewer ranks, although it computes "
        "its forward twice. The others run as --recompute-granularity says.",
    )
    hdp_stream_sums: str = option(
        "float32",
        choices=("float32", "model"),
        help="In what a stream adds up gradients of keys and values that wait for earlier parts. "
        "model: in the type of the model's weights; in bfloat16 a third less memory for what a "
        "stream keeps, and sums that are rounded at every later part.",
    )
    hdp_data: Path | None = option(
        None,
        metavar="FILE",
        help="YAML file that describes the data, instead of --data-path and similar flags: "
        "sources, their weights over time, the longest sequence over time, validation data.",
    )
    hdp_primitives: bool = option(
        True,
        off_flag="--no-primitives",
        help="Run the code that primitives: in the file of --hdp-data names. Without it a file "
        "that names code is refused.",
    )
    hdp_loaders: str | None = option(
        None,
        choices=("local", "ray"),
        help="Where data are loaded. local: in the process of each rank. ray: in a data plane of "
        "Ray actors next to the job. Default: what the file of --hdp-data says, else local.",
    )
    hdp_cost_model: Path | None = option(
        None,
        metavar="FILE",
        help="JSON file of a measured cost model. Default: derived from the model's shape. The "
        "word online means the same as --hdp-online.",
    )
    hdp_online: bool = option(
        False,
        help="Calibrate the cost model online with measured step times, detect stragglers and move "
        "work away from them.",
    )
    hdp_rank_speeds: Path | None = option(
        None,
        metavar="FILE",
        help="Text file with the speed of one HDP rank per line, where 1 is full speed.",
    )
    hdp_slice_multiple: int = option(
        1,
        minimum=1,
        help="Pad each chunk of a sequence to a multiple of this many tokens, for kernels that "
        "need it.",
    )
    hdp_attention: str = option(
        "auto",
        choices=("auto", "transformer-engine", "flash-attn", "torch"),
        help="Attention kernels to use on a GPU. auto: the first of these that loads, supports the "
        "model and computes correctly; the log names it.",
    )
    hdp_ring_max_ctas: int = option(
        16,
        minimum=0,
        maximum=64,
        help="Maximum number of CTAs (thread blocks on the GPU) that NCCL may use for ring "
        "messages: a power of two, or 0 for NCCL's own default. Attention runs on the rest.",
    )
    hdp_module_loading: str = option(
        "eager",
        choices=("eager", "inherit"),
        help="When CUDA loads kernels. eager: at the start, even if CUDA_MODULE_LOADING says "
        "otherwise, because loading one in the middle of a ring waits for other ranks. inherit: as "
        "CUDA_MODULE_LOADING says, or by CUDA's default.",
    )
    hdp_numa_binding: bool = option(
        True,
        help="Run a rank's threads on the CPUs of its GPU's NUMA node, where no other CPUs were "
        "chosen for it: copies to host memory are faster.",
    )
    hdp_float32_rings_from: int | None = option(
        None,
        minimum=2,
        metavar="RANKS",
        help="Sum outputs and gradients in float32, with this package's own ring, in rings of this "
        "many ranks and more. Without it TransformerEngine's ring sums in bfloat16 at every "
        "hop: the error is about 0.6 % at 64 ranks instead of 0.3 %. Float32 sends a third "
        "more bytes.",
    )
    hdp_double_rings: str = option(
        "auto",
        choices=("auto", "on", "off"),
        help="Rings over several nodes send on the links of all their members of a node, side by "
        "side, not on one: Double-Ring-Attention. Plans then prefer rings of whole nodes. For "
        "nodes whose ranks have a network link each; such rings run by this package's own ring. "
        "auto: on with --hdp-sequence-parts, whose rings have little to hide their traffic under.",
    )
    hdp_mla_ring: str = option(
        "auto",
        choices=("auto", "latent", "kv"),
        help="What rings send with multi-latent attention. latent: the latent, from which each "
        "member computes keys and values again. kv: keys and values. auto: the faster one by "
        "the cost model, for each ring; beside the latent as many heads' keys and values as the "
        "attention of a step hides.",
    )
    hdp_fused_loss: bool = option(
        True,
        help="Compute the loss in chunks of tokens, without holding the logits of all tokens: less "
        "memory, the same result.",
    )
    hdp_frozen: tuple[str, ...] = option(
        (),
        metavar="PATTERN",
        help="Do not train the weights whose names match one of these patterns, as "
        "'embedding.*' '*.mlp.*'; layers are counted over the whole model, from 0. The optimizer "
        "keeps nothing of them.",
    )
    lora_rank: int | None = option(
        None,
        minimum=1,
        help="Train low-rank adapters (LoRA) of this rank and nothing else. Checkpoints then hold "
        "the adapters alone; the weights beside them come from --pretrained-checkpoint.",
    )
    lora_alpha: float | None = option(
        None,
        minimum=0,
        help="Adapters' outputs are scaled by this divided by --lora-rank. Default: the rank.",
    )
    lora_targets: tuple[str, ...] = option(
        LORA_TARGETS[:4],
        choices=LORA_TARGETS,
        help="Linear layers that get adapters, in every layer of the model. Those with latent "
        "attention have the last five instead of linear_qkv.",
    )
    hdp_corrupt_limit: int = option(
        16,
        minimum=0,
        help="Skip corrupt documents, but stop after more than this many in a row.",
    )
    hdp_plot_plan: Path | None = option(
        None,
        metavar="FILE",
        help="Draw the plan of one step, as a Gantt chart with a bar per rank, into this file, and "
        "beside it, with -items behind its name, who encodes the step's pictures.",
    )
    hdp_plot_step: int = option(1, minimum=1, help="Step whose plan --hdp-plot-plan draws.")
    hdp_trace: Path | None = option(
        None,
        metavar="DIR",
        help="Write one timeline of all ranks for Perfetto into this folder: compute, waits and "
        "the plan. On GPUs it shows when work ran, not when it was launched.",
    )
    hdp_trace_steps: str | None = option(
        None, metavar="N|N-M", help="Steps that --hdp-trace records: a few, like 5 or 5-7."
    )
    hdp_survive: bool = option(
        False,
        help="Continue when ranks die, without them: the step that ran is run again, and new ranks "
        "join. Start the job by megatron-hdp launch.",
    )
    hdp_optimizer_copies: str = option(
        "on",
        choices=("on", "off"),
        help="With --hdp-survive and --use-distributed-optimizer, keep a copy of each rank's part "
        "of the optimizer in host memory of another rank, on another node if there is one. off: a "
        "rank that dies ends the job.",
    )
    hdp_survive_pause_seconds: float = option(
        600.0,
        minimum=0,
        help="With --hdp-survive, how long a job with too few ranks for its longest sequence waits "
        "for others to join, before it saves a checkpoint and ends.",
    )
    hdp_survive_least_speed: float | None = option(
        None,
        minimum=0,
        maximum=1,
        help="With --hdp-survive and --hdp-online, a rank whose speed is found to be below this "
        "share of the median leaves behind a step, once a spare of megatron-hdp launch "
        "--spares-per-node is ready to take its place. Default: none leaves.",
    )
    metrics_path: Path | None = option(
        None,
        metavar="FILE",
        help="Append the metrics of each step to this file, one JSON object per line.",
    )

    @property
    def streams(self) -> bool:
        """Whether sequences may run as streams."""
        return self.hdp_long_sequence == "stream"

    @property
    def long_documents(self) -> str:
        """What happens to documents beyond the context."""
        return "error" if self.streams else self.hdp_long_sequence

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
            for item in fields(self):
                if (
                    item.name.startswith(("hdp_", "lora_"))
                    and getattr(self, item.name) != item.default
                ):
                    raise no_effect(flag_of(item.name), "--hybrid-data-parallel")
            return
        if self.hdp_tokens_per_rank is None:
            raise OptionError(
                "--hybrid-data-parallel needs --hdp-tokens-per-rank: give the number of tokens "
                "that one rank can hold in a micro-batch"
            )
        if (self.hdp_global_batch_tokens is None) == (global_batch_size is None):
            found = "neither" if global_batch_size is None else "both"
            raise OptionError(
                f"found {found} of --hdp-global-batch-tokens and --global-batch-size, expected "
                "exactly one: give the size of the global batch in tokens or in sequences"
            )
        if self.hdp_host_memory_gb is not None and self.hdp_offload == "off":
            raise no_effect(f"--hdp-host-memory-gb {self.hdp_host_memory_gb}", "--hdp-offload auto")
        if attention_dropout != 0:
            raise OptionError(
                f"--attention-dropout {attention_dropout} is not supported by ring attention: "
                "pass --attention-dropout 0"
            )
        if self.lora_rank is None:
            for item in fields(self):
                if item.name.startswith("lora_") and getattr(self, item.name) != item.default:
                    raise no_effect(flag_of(item.name), "--lora-rank")
        elif self.hdp_frozen:
            raise OptionError(
                "--hdp-frozen: found --lora-rank, which freezes all but adapters: leave one out"
            )
        if self.hdp_survive_least_speed is not None:
            found = f"--hdp-survive-least-speed {self.hdp_survive_least_speed}"
            for name, is_there in (("survive", self.hdp_survive), ("online", self.hdp_online)):
                if not is_there:
                    raise no_effect(found, f"--hdp-{name}")
        if (self.hdp_trace is None) != (self.hdp_trace_steps is None):
            raise OptionError("found only one of --hdp-trace DIR and --hdp-trace-steps: give both")
        if self.hdp_trace_steps is None:
            return
        last = trace_steps(self.hdp_trace_steps)[-1]
        if last > train_iters:
            raise OptionError(
                f"--hdp-trace-steps {self.hdp_trace_steps} goes beyond --train-iters "
                f"{train_iters}: trace earlier steps"
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
            f"--hdp-trace-steps: found {text!r}, expected a step, or the first and last step of a "
            "range, counted from 1, like 5 or 5-7"
        )
    return range(first, last + 1)
