"""Declared options as documentation."""

from megatron_hdp.options.declaration import declared, flag_of, metavar, switches


def markdown_table(cls: type) -> str:
    """Return the Markdown table of the flags that dataclass ``cls`` declares."""
    lines = ["| flag, or key in YAML | meaning |", "|---|---|"]
    for item, kind in declared(cls):
        flag, default = flag_of(item.name), ""
        if kind is bool:
            usage = f"`{switches(item)[bool(item.default)]}`"
        else:
            choices = item.metadata["choices"]
            usage = " ".join(f"`{one}`" for one in (flag, *choices)) if choices else ""
            usage = usage or f"`{flag} {metavar(item, kind)}`".replace("|", "\\|")
            default = "" if item.default in (None, ()) else f" Default: `{item.default}`."
        default = " Required." if item.metadata["required"] else default
        lines.append(f"| {usage} | {item.metadata['help']}{default} |")
    return "\n".join(lines) + "\n"
