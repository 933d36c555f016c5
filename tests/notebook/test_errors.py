"""What a notebook shows of errors that say all there is to say."""

from __future__ import annotations

import pytest

from nbelastic import errors


@pytest.mark.parametrize("kind", ["NotPicklable", "NotEnoughWorkers", "JobStopped"])
def test_the_message_comes_without_lines_of_code(shell, kind, capsys):
    shell.run_cell(
        f"import nbelastic\nraise nbelastic.errors.{kind}('this and that') from OSError()"
    )
    shown = capsys.readouterr().out
    assert shown.strip() == f"{kind}: this and that"


def test_an_interrupt_reports_the_jobs_state():
    error = errors.JobInterrupted("its workers are free")
    assert isinstance(error, KeyboardInterrupt)
    assert error._render_traceback_() == ["JobInterrupted: its workers are free"]


@pytest.mark.parametrize("options", ["np='4'", "min_np=5, max_np=2", "num_workers=4"])
def test_a_wrong_option_of_fit_is_shown_with_the_cells_line_only(shell, options, capsys):
    shell.run_cell(f"import nbelastic\nnbelastic.fit(print, {options})")
    place, line, message = capsys.readouterr().out.strip().splitlines()
    assert place.endswith("line 2")
    assert line == f"    nbelastic.fit(print, {options})"
    assert "Option" in message.split(": ")[0]


def test_errors_inside_a_rank_keep_their_lines():
    for kind in (errors.CollectiveError, errors.NotInitialized, errors.OptionError):
        assert not hasattr(kind, "_render_traceback_")
