"""Process group of torch.distributed: ``init_process_group("nbelastic")``."""

from nbelastic.torch.process_group.backend import answer, default_group, install
from nbelastic.torch.process_group.ddp import renew
from nbelastic.torch.process_group.group import NAME, ElasticProcessGroup

__all__ = ["NAME", "ElasticProcessGroup", "answer", "default_group", "install", "renew"]
