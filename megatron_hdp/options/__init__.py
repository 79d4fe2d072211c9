"""One declaration a knob: a dataclass field from which flag, YAML key, check and docs derive.

A field made by `option` carries its help. `add_options` turns the fields of a dataclass into flags,
`yaml_to_argv` reads a YAML file as the same flags, `check_values` checks them, `markdown_table`
documents them. This room is below every other one and imports nothing of the package.
"""

from megatron_hdp.options.declaration import (
    OptionError,
    check_value,
    check_values,
    declared,
    flag_of,
    markdown_table,
    no_effect,
    option,
    require_multiple,
)
from megatron_hdp.options.hdp import PLANNER_FLAGS, HdpOptions, trace_steps
from megatron_hdp.options.media import BALANCES, PATCHES_PER_PACK, MediaOptions
from megatron_hdp.options.parser import OptionParser, add_options, auto_or, from_namespace
from megatron_hdp.options.preference import PreferenceOptions
from megatron_hdp.options.yaml_file import yaml_to_argv

__all__ = [
    "BALANCES",
    "PATCHES_PER_PACK",
    "PLANNER_FLAGS",
    "HdpOptions",
    "MediaOptions",
    "OptionError",
    "OptionParser",
    "PreferenceOptions",
    "add_options",
    "auto_or",
    "check_value",
    "check_values",
    "declared",
    "flag_of",
    "from_namespace",
    "markdown_table",
    "no_effect",
    "option",
    "require_multiple",
    "trace_steps",
    "yaml_to_argv",
]
