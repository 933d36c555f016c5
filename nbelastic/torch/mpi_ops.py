"""Operations under the name of Horovod's module."""

from nbelastic.torch import *  # noqa: F403
