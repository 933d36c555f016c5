"""Write the tables of options in the documents from the table in ``nbelastic/driver/options.py``.

Run it after an option was added or changed: ``python docs/make_tables.py``.
"""

from __future__ import annotations

from pathlib import Path

from nbelastic.driver.options import DEFAULTS, TABLE, OptionRow

DOCS = Path(__file__).parent
MARK = "<!-- options: made by docs/make_tables.py -->"
END = "<!-- end of the options -->"


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


if __name__ == "__main__":
    main()
