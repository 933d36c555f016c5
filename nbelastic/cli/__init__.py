"""Commands for a terminal: ``dask elastic …``, or ``nbelastic …``.

Runs in the process of the command, except for ``script/rank.py``, which runs in ranks. The ``dask``
command imports :mod:`~nbelastic.cli.entry` on every call, so that module imports click alone.
"""
