"""What the package itself has logged: a session's clusters log in threads of their own."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def own_records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return the records of the package's loggers, whatever Dask and others have logged."""
    return [record for record in caplog.records if record.name.split(".")[0] == "nbelastic"]
