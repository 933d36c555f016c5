"""Reading a checkpoint outside a job."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from nbelastic.elastic.checkpoint.files import CheckpointFiles, NotAFile
from nbelastic.elastic.checkpoint.format import unstored
from nbelastic.elastic.redaction import Secrets, hide_secrets, without_secrets
from nbelastic.errors import NbelasticError

if TYPE_CHECKING:
    from nbelastic.elastic.checkpoint.format import Checkpoint


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the contents of a checkpoint, without a job.

    Parameters
    ----------
    path : str or path-like
        A checkpoint file, or a directory or URL as ``fit(checkpoint=...)`` takes it. Of a
        directory, the newest complete checkpoint is read: that of the last run, and of the last
        elastic loop of its function. The directory of one run will do, too.

    Returns
    -------
    dict
        The values of the state by the names that the training function gave them. Models,
        optimizers, schedulers, samplers and other objects are state dicts, for
        ``load_state_dict``. A ``torch.Generator`` is its state. All tensors are on the CPU.

    Raises
    ------
    FileNotFoundError
        There is no checkpoint.
    NbelasticError
        It is not complete, has another format, or its values cannot be unpickled here.

    Warnings
    --------
    Values other than tensors are unpickled, which can run any code. Load only files that you trust.
    For the tensors of a file that you do not trust, use ``safetensors``.

    See Also
    --------
    fit : ``checkpoint=`` writes these files, ``resume=True`` continues from them.

    Notes
    -----
    The files are in the format of safetensors. ``safetensors.torch.load_file(path)`` reads
    their tensors under names such as ``model.0.weight`` and ``optimizer.state.0.exp_avg``.

    Examples
    --------
    >>> loaded = nbelastic.load_checkpoint("/shared/resnet")  # doctest: +SKIP
    >>> model.load_state_dict(loaded["model"])  # doctest: +SKIP
    >>> loaded["epoch"]  # doctest: +SKIP
    3
    """
    url = os.fspath(path)
    try:
        return _load(url)
    except NbelasticError:
        raise
    except Exception as error:  # file systems raise any type, and quote the URL
        if isinstance(error, OSError) and Secrets([url]).shown(error):
            raise
        shown = hide_secrets(repr(error), url)
        raise NbelasticError(f"{without_secrets(url)} cannot be read: {shown}") from None


def _load(url: str) -> dict[str, Any]:
    from nbelastic.elastic.sampler import state_dict_of

    where, checkpoint = _read(url)
    shown = hide_secrets(where, url)
    try:
        payload, (as_dict, progress) = unstored(checkpoint.tensors)
        values: dict[str, Any] = as_dict(payload, [state_dict_of(each) for each in progress])
    except Exception as error:  # classes of the user may be missing, or raise anything
        raise NbelasticError(
            f"{shown}: its values cannot be unpickled: {error!r}. Import the modules that define "
            "their classes; to read only the tensors, use safetensors"
        ) from error
    return {name: value for name, value in values.items() if not name.startswith("_")}


def _read(url: str) -> tuple[str, Checkpoint]:
    """Return the path of a checkpoint, and its contents."""
    passed_over = []
    files = CheckpointFiles(url, run="")
    for name in files.paths():
        try:
            found = files.read(name)
        except NotAFile as what:
            passed_over.append(f"{name} is no file ({what})")
            continue
        if found is not None:
            return name, found
        passed_over.append(f"{name} is not complete, or no checkpoint of nbelastic")
    shown = without_secrets(url)
    if passed_over:
        raise NbelasticError(
            f"no checkpoint in {shown}: {hide_secrets('; '.join(passed_over), url)}"
        )
    raise FileNotFoundError(f"no checkpoint in {shown}")
