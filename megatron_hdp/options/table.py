"""Declared options as documentation."""

from megatron_hdp.options.declaration import declared, flag_of, metavar, switches


def markdown_table(cls: type) -> str:
    """Return the Markdown table of the flags and YAML keys that dataclass ``cls`` declares."""
    lines = ["| flag | YAML key | default | meaning |", "|---|---|---|---|"]
    for item, kind in declared(cls):
        flag = flag_of(item.name)
        key = flag.removeprefix("--")
        if kind is bool:
            on_flag, off_flag = switches(item)
            flag, default = (off_flag, "") if item.default else (on_flag, "")
            key += ": false" if item.default else ": true"
        else:
            shown = "|".join(item.metadata["choices"]) or metavar(item, kind)
            flag = f"{flag} {shown}".replace("|", "\\|")
            default = "" if item.default in (None, ()) else f"`{item.default}`"
        default = "required" if item.metadata["required"] else default
        lines.append(f"| `{flag}` | `{key}` | {default} | {item.metadata['help']} |")
    return "\n".join(lines) + "\n"
