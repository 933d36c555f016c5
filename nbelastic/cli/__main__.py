"""Run the commands without an installed script: ``python -m nbelastic.cli``."""

from __future__ import annotations

from .entry import main

if __name__ == "__main__":
    main()
