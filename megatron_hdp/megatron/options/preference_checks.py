"""Checks what works together with losses of preferences; every check raises `OptionError`."""

from dataclasses import fields
from typing import Any

from megatron_hdp.megatron.options.arguments import TrainingArguments
from megatron_hdp.options import OptionError, PreferenceOptions, flag_of, no_effect
from megatron_hdp.options.preference import WITH_REFERENCE

_ONLY_WITH = {
    "hdp_label_smoothing": ("dpo", "simpo"),
    "hdp_gamma": ("simpo",),
    "hdp_kto_divergence": ("kto",),
    "hdp_desirable_weight": ("kto",),
    "hdp_undesirable_weight": ("kto",),
    "hdp_reference_checkpoint": WITH_REFERENCE,
    "hdp_reference_log_probs": WITH_REFERENCE,
}


def given_preferences(args: Any) -> list[str]:
    """Return the names of the options of preferences that have another value than by default."""
    return [
        one.name
        for one in fields(PreferenceOptions)
        if getattr(args, one.name, one.default) != one.default
    ]


def check_preferences(args: TrainingArguments) -> None:
    """Checks the objective, its numbers, its reference, and what it does not work with."""
    objective, given = args.hdp_objective, given_preferences(args)
    if objective is None:
        if given:
            raise no_effect(flag_of(given[0]), "--hdp-objective")
        return
    found = f"--hdp-objective {objective}"
    for name in given:
        expected = _ONLY_WITH.get(name, (objective,))
        if objective not in expected:
            raise no_effect(flag_of(name), f"--hdp-objective {' or '.join(expected)}")
    if not args.hdp_beta:
        raise OptionError(f"{found}: found --hdp-beta 0, expected a number above 0")
    if objective == "kto" and args.hdp_kto_divergence == "answers" and args.global_batch_size == 1:
        raise OptionError(
            f"{found}: found --global-batch-size 1, expected at least 2, since an answer is run "
            "behind the prompt of another row: raise it, or give --hdp-kto-divergence none"
        )
    has_reference = args.hdp_reference_checkpoint or args.hdp_reference_log_probs
    if objective in WITH_REFERENCE and not has_reference and args.lora_rank is None:
        raise OptionError(
            f"{found} measures against a frozen model, and found none: give "
            "--hdp-reference-checkpoint, mostly what --pretrained-checkpoint names, or "
            "--hdp-reference-log-probs"
        )
    if args.hidden_dropout:
        raise OptionError(
            f"{found}: found --hidden-dropout {args.hidden_dropout:g}, expected none, because a "
            "step trains by what a pass before it has found: pass --hidden-dropout 0"
        )
    refused = {
        "--mtp-num-layers": args.mtp_num_layers is not None,
        "--no-hdp-fused-loss": not args.hdp_fused_loss,
        "--overlap-param-gather": args.overlap_param_gather,
        "--sft": args.sft,
        f"--hdp-long-sequence {args.long_documents}": args.long_documents != "error",
    }
    wrong = [name for name, is_found in refused.items() if is_found]
    if wrong:
        raise OptionError(
            f"{found}: found {wrong[0]}, which does not work together with losses of preferences: "
            "leave one of them out"
        )
