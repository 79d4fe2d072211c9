"""``megatron-hdp convert``: weights of Hugging Face's files to a checkpoint, and back."""

import argparse
import functools
from pathlib import Path

from megatron_hdp.cli.shared.numbers import number
from megatron_hdp.exit_codes import ExitCode


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "convert", help="convert Hugging Face weights to a Megatron checkpoint, and back"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--from-hf",
        type=Path,
        metavar="FOLDER",
        help="a model saved by transformers: config.json, safetensors, tokenizer",
    )
    source.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="DIR",
        help="folder of checkpoints in the torch_dist format, from --to or from a run's --save",
    )
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--to", type=Path, metavar="DIR", help="folder to create, for --load")
    target.add_argument(
        "--to-hf", type=Path, metavar="FOLDER", help="folder to create, for from_pretrained"
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="with --from-hf: also write the model's flags to this YAML file (DIR/model.yaml "
        "always has them)",
    )
    parser.add_argument(
        "--like",
        type=Path,
        metavar="FOLDER",
        help="with --from: the model that training began with; its config.json and tokenizer are "
        "copied (default: DIR/hugging_face, which --to and runs keep)",
    )
    number(
        parser.add_argument,
        *("--ckpt-step", "N", 1, 10**15),
        "with --from: step of the checkpoint to convert (default: the latest)",
    )
    parser.add_argument(
        "--adapters",
        choices=("separate", "merged"),
        help="with --from of a run with --lora-rank: write the adapters as PEFT's files, or added "
        "to the weights of --base (default: separate)",
    )
    parser.add_argument(
        "--base",
        type=Path,
        metavar="DIR",
        help="with --adapters merged: folder of the checkpoint that they were trained beside",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    say = functools.partial(print, flush=True)
    from megatron_hdp.megatron import known_warnings

    known_warnings.leave_out()
    if arguments.from_hf is not None:
        from megatron_hdp.convert.to_megatron import to_megatron

        to_megatron(arguments.from_hf, arguments.to, arguments.config, say)
        print(f"{arguments.to}: give it to --load; {arguments.to}/model.yaml to --config")
    else:
        from megatron_hdp.convert.to_hugging_face import to_hugging_face

        source, target, step = arguments.source, arguments.to_hf, arguments.ckpt_step
        how = {"adapters": arguments.adapters, "base": arguments.base}
        to_hugging_face(source, target, say, like=arguments.like, step=step, **how)
        is_peft = (target / "adapter_config.json").is_file()
        takes = "peft's PeftModel.from_pretrained" if is_peft else "transformers' from_pretrained"
        print(f"{arguments.to_hf}: {takes} takes it")
    return ExitCode.DONE


def _check(arguments: argparse.Namespace) -> None:
    """Refuse flags of the other direction."""
    from_hf = arguments.from_hf is not None
    if from_hf != (arguments.to is not None):
        raise ValueError(
            "found --from-hf with --to-hf or --from with --to, expected --from-hf with --to, or "
            "--from with --to-hf"
        )
    others = {"--like": arguments.like, "--ckpt-step": arguments.ckpt_step}
    others |= {"--adapters": arguments.adapters, "--base": arguments.base}
    if not from_hf:
        others = {"--config": arguments.config}
    given = [flag for flag, value in others.items() if value is not None]
    if given:
        side = "--from-hf" if from_hf else "--from"
        raise ValueError(f"{given[0]}: found it with {side}, expected it with the other: remove it")
