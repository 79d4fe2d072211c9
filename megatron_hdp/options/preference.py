"""What a run is told of preferences: the loss, and what it measures against."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_hdp.options.declaration import option

OBJECTIVES = ("dpo", "ipo", "orpo", "simpo", "kto")
WITH_REFERENCE = ("dpo", "ipo", "kto")
"""Those that measure against a frozen model."""


@dataclass(frozen=True, kw_only=True)
class PreferenceOptions:
    """Preferences."""

    hdp_objective: str | None = option(
        None,
        choices=OBJECTIVES,
        help="Train on preferences by this loss: pairs of a chosen and a rejected answer, or with "
        "kto answers that are desirable or not. The global batch counts pairs. Default: the loss "
        "of the next token.",
    )
    hdp_reference_checkpoint: Path | None = option(
        None,
        metavar="DIR",
        help="Folder of checkpoints with the weights of the frozen model that dpo, ipo and kto "
        "measure against. It runs forward once, before the first step, for all answers of the run. "
        "Default with --lora-rank: the model without its adapters.",
    )
    hdp_reference_log_probs: Path | None = option(
        None,
        metavar="FILE",
        help="File of the frozen model's log-probabilities, one sum an answer. It is made from "
        "--hdp-reference-checkpoint if need be; what it holds is not computed again. Default: "
        "reference-log-probs.npz in the folder of --save.",
    )
    hdp_kto_divergence: str = option(
        "answers",
        choices=("answers", "none"),
        help="What kto measures against: the divergence from the frozen model over the answers of "
        "the step, each behind the prompt of the row behind it; or 0, which saves their forward.",
    )
    hdp_beta: float = option(
        0.1,
        minimum=0,
        help="Factor of the loss on differences of log-probabilities, above 0; of orpo, the weight "
        "of its odds.",
    )
    hdp_label_smoothing: float = option(
        0.0,
        minimum=0,
        below=0.5,
        help="Share of pairs whose sides are taken to be swapped, with dpo and simpo.",
    )
    hdp_gamma: float = option(0.5, minimum=0, help="Margin that simpo asks for.")
    hdp_desirable_weight: float = option(
        1.0, minimum=0, help="Weight of desirable answers in the loss of kto."
    )
    hdp_undesirable_weight: float = option(
        1.0, minimum=0, help="Weight of undesirable answers in the loss of kto."
    )
