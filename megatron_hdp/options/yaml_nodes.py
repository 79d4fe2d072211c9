"""YAML as it is written: nodes whose scalars are texts, and what they say.

YAML 1.1 would make 8 of ``010``, 90 of ``1:30`` and False of ``no``; here they are the texts that
they are on a command line.
"""

import yaml

PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")}
_SWITCH = {"true": True, "false": False}
_NOTHING = ("", "~", "null")


class AsWritten(yaml.SafeLoader):
    """Resolves no scalar: each is the text that stands in the file."""

    yaml_implicit_resolvers = {}


def is_text(value: yaml.Node) -> bool:
    """Return whether it is a scalar that says something and is no switch's."""
    if not isinstance(value, yaml.ScalarNode) or value.tag not in PLAIN_TAGS:
        return False
    return not is_nothing(value) and switch_of(value) is None and "\0" not in value.value


def is_nothing(value: yaml.ScalarNode) -> bool:
    """Return whether it says nothing: left out, or null."""
    return value.style is None and value.value.lower() in _NOTHING


def switch_of(value: yaml.Node) -> bool | None:
    """Return what a switch says, None for what is none."""
    if not isinstance(value, yaml.ScalarNode) or value.style is not None:
        return None
    return _SWITCH.get(value.value.lower())


def shown(value: yaml.Node) -> str:
    """Return a node as a message names it."""
    if not isinstance(value, yaml.ScalarNode):
        if isinstance(value, yaml.SequenceNode):
            return "a list" if value.value else "an empty list"
        return "keys and values" if value.value else "no keys"
    if is_nothing(value):
        return "nothing"
    return repr(value.value if len(value.value) <= 60 else value.value[:60] + "...")
