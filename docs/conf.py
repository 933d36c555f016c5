"""Sphinx configuration: ``make docs``."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import nbelastic

HERE = Path(__file__).parent

project = "nbelastic"
author = "the nbelastic developers"
project_copyright = author
version = release = nbelastic.__version__

extensions = [
    "myst_nb",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
root_doc = "index"

# Tutorials are the notebooks of the repository, as they are: tests execute them.
nb_execution_mode = "off"
TUTORIALS = HERE / "tutorials"
TUTORIALS.mkdir(exist_ok=True)
for notebook in sorted((HERE.parent / "notebooks").glob("*.ipynb")):
    shutil.copy(notebook, TUTORIALS / notebook.name)

myst_enable_extensions = ["colon_fence", "attrs_inline"]
myst_heading_anchors = 3

autodoc_typehints = "none"
# The pages are made without Keras and its back ends.
optional = ("keras", "tensorflow", "jax")
autodoc_mock_imports = [each for each in optional if importlib.util.find_spec(each) is None]
autosummary_generate = True
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False

# Needs the network: the published site has it.
if os.environ.get("NBELASTIC_DOCS_INTERSPHINX"):
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "dask": ("https://docs.dask.org/en/stable", None),
        "distributed": ("https://distributed.dask.org/en/stable", None),
    }

html_theme = "furo"
html_title = f"nbelastic {version}"
html_static_path = ["images"]
