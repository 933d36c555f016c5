"""Stand in for Horovod where it is not installed: ``cli/script/alias.py``."""

from nbelastic.cli.script.alias import answer_as

answer_as(__name__)
