"""The tables of config/README.md, made from the fields; as a script it writes them."""

from pathlib import Path

from octavo.config.flags import SECTIONS, Flag, all_flags

PAGE = Path(__file__).parents[2] / "config" / "README.md"


def render_page() -> str:
    """Return the page: its text as it is, and new tables."""
    text = PAGE.read_text().partition("\n## ")[0].rstrip("\n")
    lines = [text]
    for section in SECTIONS:
        lines += ["", f"## {section.capitalize()}", "", "| Flag | Default | |", "|---|---|---|"]
        lines += [
            f"| `{flag.option}` | {_default(flag)} | {flag.description} |"
            for flag in all_flags().values()
            if flag.section == section
        ]
    return "\n".join(lines) + "\n"


def _default(flag: Flag) -> str:
    if flag.kind == "bool":
        return "on" if flag.default else "off"
    if flag.default in (None, (), ""):
        return "-"
    return ", ".join(flag.default) if flag.kind == "list" else str(flag.default)


if __name__ == "__main__":
    PAGE.write_text(render_page())
