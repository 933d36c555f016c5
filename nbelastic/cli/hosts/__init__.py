"""Hosts: discovery, changes, and a cluster with a worker for each slot."""

from .cluster import HostCluster, SshOptions
from .discovery import DiscoveryFailed, parse_hostfile, parse_hosts
from .sources import ScriptSource, named_source

__all__ = [
    "DiscoveryFailed",
    "HostCluster",
    "ScriptSource",
    "SshOptions",
    "named_source",
    "parse_hostfile",
    "parse_hosts",
]
