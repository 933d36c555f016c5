"""What a real kernel leaves in a notebook."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = str(Path(__file__).parents[2])

SETUP = f"""
import sys, threading, time
sys.path.insert(0, {ROOT!r})
from nbelastic.notebook.display_service import display as show
from tests.notebook.fakes import FakeJob, until
job = FakeJob()
show.show(job)
"""

OVER = """
job.happens("lost", 3, rank=2, size=3)
job.end(size=3)
until(lambda: "nbelastic-panel" not in str(threading.enumerate()))
"""

WAITED = """
job = FakeJob(name="waited")
threading.Timer(0.3, job.end).start()
with show.watching(job) as watch:
    job.set(resets=3)
    while not job.done():
        job.prints("epoch\\n")
        watch.tick()
        time.sleep(0.05)
show.show(job)
"""


@pytest.mark.slow
def test_a_saved_notebook_has_final_states_output_and_last_line_and_no_widget():
    cells = [nbformat.v4.new_code_cell(source) for source in (SETUP, OVER, WAITED)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    shown, ended, waited = NotebookClient(notebook, timeout=60).execute().cells
    (output,) = shown.outputs
    assert output.output_type == "display_data"
    assert set(output.data) == {"text/html", "text/plain"}
    assert output.data["text/plain"].startswith("nbelastic job quickstart: finished · 3 ranks")
    assert "Rank 2 on 10.0.0.1:40001 lost" in output.data["text/html"]
    assert ended.outputs == []
    displays = [o for o in waited.outputs if o.output_type == "display_data"]
    words = "".join(o.text for o in waited.outputs if o.output_type == "stream")
    assert [set(o.data) for o in displays] == [{"text/html", "text/plain"}]
    assert "✓</i> finished" in displays[0].data["text/html"]
    assert words.startswith("epoch\n")
    assert words.endswith("nbelastic job waited: finished · 4 ranks · 3 resets · 120 commits\n")
