"""Operations under the name of Horovod's module, for scripts that import from it."""

from nbelastic.torch import *  # noqa: F403
