"""From a command line and its YAML files to checked options."""

from collections.abc import Sequence
from pathlib import Path

from megatron_hdp.megatron.options.arguments import GROUPS, TrainingArguments, with_derived_defaults
from megatron_hdp.megatron.options.batch_sizes import check_batch_size, sequences_of
from megatron_hdp.megatron.options.checks import (
    check_data,
    check_model,
    check_mtp,
    check_parallel,
    check_run,
    check_schedule,
)
from megatron_hdp.megatron.options.layer_patterns import check_windows
from megatron_hdp.megatron.options.media_checks import check_media
from megatron_hdp.megatron.options.mla_checks import check_mla
from megatron_hdp.megatron.options.moe_checks import check_moe
from megatron_hdp.megatron.options.position_checks import check_positions
from megatron_hdp.megatron.options.preference_checks import check_preferences
from megatron_hdp.options import (
    OptionError,
    OptionParser,
    add_options,
    check_values,
    from_namespace,
    markdown_table,
    yaml_to_argv,
)


def build_parser() -> OptionParser:
    """Return the training command's parser."""
    parser = OptionParser(
        prog="pretrain_gpt",
        description="Train a megatron.core GPT, with or without hybrid data parallelism. "
        "Each switch has an opposite, --no-..., to override a --config file.",
    )
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="Read flags from this YAML file, whose keys are names of flags. Flags on the command "
        "line take precedence over it, and later files over earlier ones. Its key config names "
        "files to read first, relative to it.",
    )
    for group in GROUPS:
        add_options(parser, group)
    return parser


def parse_arguments(argv: Sequence[str], *, needs_data: bool = True) -> TrainingArguments:
    """Returns the options of a command line, which `needs_data`; its ``--config`` files included.

    Raises:
        OptionError: an unknown, missing or unusable flag or key.
    """
    parser = build_parser()
    config = OptionParser(add_help=False)
    config.add_argument("--config", action="append", default=[], type=Path)
    paths, _ = config.parse_known_args(argv)
    from_files = [text for path in paths.config for text in yaml_to_argv(path, parser)]
    namespace = parser.parse_args(from_files)
    if namespace.config:
        raise OptionError(
            "'config' is inside a section of a --config file: move it to the top level"
        )
    namespace = parser.parse_args(argv, namespace)
    arguments = from_namespace(TrainingArguments, namespace)
    check_values(arguments)
    if needs_data:
        check_data(arguments)
    check_run(arguments)
    arguments = with_derived_defaults(arguments)
    check_model(arguments)
    check_positions(arguments)
    check_windows(arguments)
    check_parallel(arguments)
    check_moe(arguments)
    check_mla(arguments)
    check_schedule(arguments)
    check_mtp(arguments)
    arguments.validate(
        global_batch_size=sequences_of(arguments),
        attention_dropout=arguments.attention_dropout,
        train_iters=arguments.train_iters,
    )
    check_preferences(arguments)
    check_media(arguments)
    check_batch_size(arguments)
    return arguments


def markdown_tables() -> str:
    """Return the tables of all flags, one Markdown section a group."""
    sections = [
        f"### {(group.__doc__ or '').rstrip('.')}\n\n{markdown_table(group)}" for group in GROUPS
    ]
    return "\n".join(sections)
