"""Checks what works together with an encoder; every check raises `OptionError`."""

from dataclasses import fields
from typing import Any

from megatron_hdp.options import MediaOptions, OptionError, flag_of, no_effect


def check_media(args: Any) -> None:
    """Checks that there is an encoder to balance, and nothing that does not know it.

    Args:
        args: our arguments, or Megatron's.
    """
    if args.hdp_encoder is None:
        for item in fields(MediaOptions):
            if getattr(args, item.name) != item.default:
                raise no_effect(flag_of(item.name), "--hdp-encoder")
        return
    refused = {
        "no --hybrid-data-parallel": not args.hybrid_data_parallel,
        "--hdp-objective": args.hdp_objective is not None,
        f"--hidden-dropout {args.hidden_dropout:g}": bool(args.hidden_dropout),
    }
    wrong = [name for name, is_found in refused.items() if is_found]
    if wrong:
        raise OptionError(
            f"--hdp-encoder {args.hdp_encoder}: found {wrong[0]}, which does not work together "
            "with an encoder: change it, or leave --hdp-encoder out"
        )
