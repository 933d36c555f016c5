import socket
from datetime import timedelta
import torch.distributed as dist
class Store:
    def __init__(self, bind):
        s = socket.socket(); s.bind((bind, 0)); s.listen(128)
        port = s.getsockname()[1]
        self.address = (bind, port)
        self._store = dist.TCPStore(bind, port, None, True, timeout=timedelta(seconds=10), wait_for_workers=False, master_listen_fd=s.detach())
    def close(self):
        self._store = None
