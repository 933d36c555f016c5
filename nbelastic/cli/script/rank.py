"""Run a script as ``__main__`` in a rank, in its main thread."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import os
import sys
import types
import zipfile
from types import CodeType, TracebackType

from nbelastic.elastic.ranks.context import current
from nbelastic.errors import NbelasticError

from .alias import alias_horovod
from .bundle import ScriptCall, mark_of


class ScriptExit(NbelasticError):
    """A script has exited with another code than 0; the message names both."""


def run_script(call: ScriptCall) -> None:
    """Run a script as a rank of a job; an exit code other than 0 raises ``ScriptExit``."""
    process = os.getpid()
    folder, cwd = _place(call)
    script = os.path.join(folder, os.path.basename(call.script)) if call.script else ""
    os.chdir(cwd)
    sys.argv = [script or call.module, *call.arguments]
    sys.path.insert(0, folder)
    alias_horovod(call.alias)
    try:
        main, code = _load(script, call.module)
        # It stays until the process ends: exit handlers and threads may need it after the script.
        # The other name is for what comes from a spawned process, which multiprocessing, imported
        # by the rank server, has taken for that one's main module.
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main
        exec(code, main.__dict__)
    except SystemExit as error:
        if os.getpid() != process:
            raise  # a fork of the script ends with that code
        if error.code is not None and error.code != 0:
            how = f" with code {error.code}" if isinstance(error.code, int) else f": {error.code}"
            exited = ScriptExit(f"{os.path.basename(call.script) or call.module} exited{how}")
            raise exited.with_traceback(_of_script(error.__traceback__)) from None
    except Exception as error:
        raise error.with_traceback(_of_script(error.__traceback__))  # noqa: B904 -- the same


def _load(script: str, module: str) -> tuple[types.ModuleType, CodeType]:
    """Return ``__main__`` and its code, as Python makes them for a script or ``-m``."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if script:
        loader = importlib.machinery.SourceFileLoader("__main__", script)
        main.__loader__, main.__file__ = loader, script
        return main, loader.source_to_code(loader.get_data(script), script)
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.submodule_search_locations is not None:
        module = f"{module}.__main__"
        spec = importlib.util.find_spec(module)
    code = None
    if spec is not None and isinstance(spec.loader, importlib.abc.InspectLoader):
        code = spec.loader.get_code(module)
    if spec is None or code is None:
        raise ModuleNotFoundError(f"No module named {module!r} that can be run", name=module)
    main.__spec__, main.__loader__, main.__package__ = spec, spec.loader, spec.parent
    if spec.origin is not None:
        main.__file__ = sys.argv[0] = spec.origin
    return main, code


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    rest = trace
    while rest is not None and rest.tb_frame.f_code.co_filename == __file__:
        rest = rest.tb_next
    return rest or trace


def _place(call: ScriptCall) -> tuple[str, str]:
    """Return the script's folder and the working directory, on this host."""
    folder, mark = call.folder, call.mark
    if call.packed is None or (mark is not None and mark_of(mark[0]) == mark):
        if not os.path.isdir(folder):
            raise FileNotFoundError(
                f"{folder}: this worker does not see the script's folder; without --shared-fs it "
                "is sent with the job"
            )
        return folder, call.cwd if os.path.isdir(call.cwd) else folder
    place = current().scratch
    with zipfile.ZipFile(io.BytesIO(call.packed)) as file:
        file.extractall(place)
    inside = os.path.relpath(call.cwd, folder)
    cwd = os.path.normpath(os.path.join(place, inside))
    is_below = not inside.startswith("..") and os.path.isdir(cwd)
    return place, cwd if is_below else place
