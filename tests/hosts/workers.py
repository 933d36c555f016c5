"""What the nannies of a host import: its workers and their rank servers are forked there."""

from tests.support import forking  # noqa: F401
from tests.support.rank_servers import start_fork_server

start_fork_server()
