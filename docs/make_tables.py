"""Write the tables of options in the documents from the tables in the code.

Those are in ``nbelastic/driver/options.py`` and ``nbelastic/cli/commands.py``.

Run it after an option was added or changed: ``python docs/make_tables.py``.
"""

from __future__ import annotations

from pathlib import Path

from nbelastic.cli.commands import TERMINAL, flags_of
from nbelastic.driver.options import DEFAULTS, OF_SCRIPTS, TABLE, OptionRow
from nbelastic.driver.parser import LineOption

DOCS = Path(__file__).parent
MARK = "<!-- options: made by docs/make_tables.py -->"
END = "<!-- end of the options -->"
TERMINAL_MARK = "<!-- options of the terminal: made by docs/make_tables.py -->"
TERMINAL_END = "<!-- end of the options of the terminal -->"


def default(row: OptionRow) -> str:
    """Return the default of an option as a cell of a table."""
    value = DEFAULTS[row.name]
    if value is None:
        return "none"
    return f"`{value}`" if isinstance(value, bool) or value == "auto" else str(value)


def of_fit(row: OptionRow) -> str:
    """Return the row of an option of ``fit``."""
    return f"| `{row.name}` | {default(row)} | {row.meaning} |"


def of_magic(row: OptionRow) -> str:
    """Return the row of an option of ``%%elastic_train``."""
    value = DEFAULTS[row.name]
    known = "" if value in (None, False) else f" ({value})"
    option = f"{row.flag} {row.kind.metavar}".rstrip()
    return f"| `{option}` | {row.meaning}{known} | `{row.example}` |"


def of_run(row: OptionRow) -> str:
    """Return the row of an option of ``dask elastic run`` that ``fit`` has, too."""
    names = ", ".join(f"`{flag}`" for flag in flags_of(row))
    return f"| {names} | {row.meaning} | `{row.name}` |"


def of_terminal(option: LineOption) -> str:
    """Return the row of an option of ``dask elastic run`` alone."""
    flags = [*option.opts, *option.secondary_opts]
    names = f"`{'/'.join(flags)}`" if option.secondary_opts else ", ".join(f"`{f}`" for f in flags)
    value = f" `{option.metavar}`" if option.metavar else ""
    return f"| {names}{value} | {option.help} |"


def terminal(text: str) -> str:
    """Return the page of the terminal with both of its tables as they should be."""
    before, rest = text.split(MARK)
    old, rest = rest.split(END)
    between, rest = rest.split(TERMINAL_MARK)
    older, after = rest.split(TERMINAL_END)
    jobs = [*old.strip().splitlines()[:2], *map(of_run, OF_SCRIPTS)]
    own = [*older.strip().splitlines()[:2], *map(of_terminal, TERMINAL)]
    parts = [before + MARK, "", *jobs, "", END + between + TERMINAL_MARK, "", *own, ""]
    return "\n".join([*parts, TERMINAL_END + after])


def written(text: str) -> str:
    """Return a document with its table as it should be."""
    before, rest = text.split(MARK)
    old, after = rest.split(END)
    head = "\n".join(old.strip().splitlines()[:2])
    row = of_magic if "example" in head else of_fit
    return "\n".join([before + MARK, "", head, *map(row, TABLE), "", END + after])


def main() -> None:
    """Write the documents anew."""
    for name in ("options.md", "notebooks.md"):
        path = DOCS / name
        path.write_text(written(path.read_text()))
    path = DOCS / "terminal.md"
    path.write_text(terminal(path.read_text()))


if __name__ == "__main__":
    main()
