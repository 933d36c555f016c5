"""Register the commands with click, and import each command when called.

The ``dask`` command imports this module on every call, also for ``dask worker``. So it imports
click alone: neither Dask's scheduler nor torch.
"""

from __future__ import annotations

import difflib
import importlib
import io
import sys

import click

COMMANDS = ("run", "jobs", "status", "why", "logs", "scale", "stop", "cancel", "attach", "doctor")
"""All commands, in the order of the help. Each is a function of ``nbelastic.cli.commands``."""


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called or listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; return None if there is none of this name."""
        if cmd_name not in COMMANDS:
            close = difflib.get_close_matches(cmd_name, COMMANDS, n=1)
            if close:
                ctx.fail(f"there is no command {cmd_name!r}; did you mean {close[0]}?")
            return None
        commands = importlib.import_module("nbelastic.cli.commands")
        command: click.Command = getattr(commands, cmd_name)
        return command


@click.group(
    cls=LazyGroup,
    name="elastic",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="nbelastic", message="nbelastic %(version)s")
def elastic() -> None:
    """Train elastically: start scripts, and control the jobs of a cluster."""
    for stream in (sys.stdout, sys.stderr):  # a letter that a terminal lacks is no error
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def main() -> None:
    """Run the commands as ``nbelastic …``."""
    elastic(prog_name="nbelastic")
