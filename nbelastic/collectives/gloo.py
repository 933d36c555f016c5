# STOPGAP by the lead, to be replaced whole
import threading
from datetime import timedelta
import torch, torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo
from nbelastic.collectives.communicator import Communicator, Op
from nbelastic.errors import CollectiveError
OPS = {Op.SUM: dist.ReduceOp.SUM, Op.AVERAGE: dist.ReduceOp.SUM, Op.MIN: dist.ReduceOp.MIN, Op.MAX: dist.ReduceOp.MAX, Op.PRODUCT: dist.ReduceOp.PRODUCT}
class H:
    def __init__(s, c, work, after=None):
        s.c, s.work, s.after = c, work, after
        s.event = threading.Event(); s.err = None
        c._handles.append(s)
        def cb(f):
            try: f.value()
            except Exception as e: s.err = str(e)
            s.event.set()
        try: work.get_future().add_done_callback(cb)
        except RuntimeError:
            def go():
                try: work.wait()
                except Exception as e: s.err = str(e)
                s.event.set()
            threading.Thread(target=go, daemon=True).start()
    def done(s): return s.event.is_set() or s.c._reason is not None
    def wait(s):
        c = s.c; c._waiting += 1
        try:
            while not s.event.is_set():
                if c._reason: raise CollectiveError(c._reason)
                s.event.wait(0.5)
        finally: c._waiting -= 1
        if c._reason or s.err: 
            c.abort(s.err or "x"); raise CollectiveError(c._reason)
        if s.after: s.after(); s.after = None
        if s in c._handles: c._handles.remove(s)
        c._done += 1
class GlooCommunicator(Communicator):
    def __init__(self, r):
        self.r = r; self.rank, self.size, self.generation = r.rank, r.size, r.generation
        self._reason = None; self._handles = []; self._waiting = 0; self._done = 0; self._pg = None
    def connect(self):
        ready = threading.Event(); self._ready = ready; out = []
        def go():
            try:
                c = dist.TCPStore(self.r.store[0], self.r.store[1], None, False, timeout=timedelta(seconds=5))
                o = ProcessGroupGloo._Options(); o._timeout = timedelta(seconds=30)
                o._devices = [ProcessGroupGloo.create_device(hostname=self.r.bind, lazy_init=True)]
                out.append(ProcessGroupGloo(dist.PrefixStore(f"{self.r.job}/{self.r.generation}", c), self.rank, self.size, o))
            except Exception as e: out.append(str(e))
            ready.set()
        threading.Thread(target=go, daemon=True).start()
        ready.wait()
        if self._reason: raise CollectiveError(self._reason)
        if isinstance(out[0], str): raise CollectiveError(out[0])
        self._pg = out[0]
    def _go(self, f, after=None):
        if self._reason: raise CollectiveError(self._reason)
        return H(self, f(self._pg), after)
    def allreduce_async(self, t, op=Op.SUM):
        o = dist.AllreduceOptions(); o.reduceOp = OPS[op]
        return self._go(lambda p: p.allreduce([t], o), (lambda: t.div_(self.size)) if op is Op.AVERAGE else None)
    def broadcast_async(self, t, root=0):
        o = dist.BroadcastOptions(); o.rootRank = root
        return self._go(lambda p: p.broadcast([t], o))
    def allgather_async(self, outputs, t): return self._go(lambda p: p.allgather([list(outputs)], [t]))
    def reduce_scatter_async(self, output, inputs, op=Op.SUM): raise NotImplementedError
    def all_to_all_async(self, outputs, inputs): raise NotImplementedError
    def barrier_async(self): return self._go(lambda p: p.barrier())
    def send_async(self, t, to): return self._go(lambda p: p.send([t], to, 0))
    def receive_async(self, t, source): return self._go(lambda p: p.recv([t], source, 0))
    @property
    def waiting(self): return self._waiting > 0
    @property
    def completed(self): return self._done
    def abort(self, reason):
        if self._reason is None: self._reason = reason or "aborted"
        for h in list(self._handles): h.event.set()
        if hasattr(self, "_ready"): self._ready.set()
    def close(self):
        self.abort("closed"); g, self._pg = (self._pg, self._handles), None; self._handles = []
        threading.Thread(target=lambda x: None, args=(g,), daemon=True).start()
