"""A device that lies, on the CPU: what NCCL and CUDA do to a job whose workers die, where no GPU is.

    from tests import lying
    lying.install()                  # in a worker, before Groups.install(); then --distributed-backend nccl

Groups of the backend ``nccl`` are gloo's underneath (:mod:`tests.lying.groups`), and behave as NCCL's:

* operations are only enqueued.  ``wait()`` returns at once; the *stream* waits, which here is the compute thread at its
  next computation or read (:mod:`tests.lying.device`).  Copies are enqueued, too, and executed when the stream gets
  there;
* a send ends when it is received, and a communicator executes transfers in the order of the calls;
* what workers exchange in host memory waits for no stream;
* after an abort the stream goes on, over garbage, and nothing raises.  A peer's death or abort may do the same to an
  operation of a worker that has not aborted;
* an error keeps the lock of enqueuing for as long as NCCL's watchdog sleeps: ``TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC``;
* a batch that is never ended keeps all later operations of its thread from starting;
* connecting never ends if a peer dies meanwhile, and two ranks cannot have one device;
* an abort may fail, and errors of the device are sticky.

``LYING_DEVICE`` has the chances as JSON, such as ``{"seed": 1, "breaks": 0.05}``: see :class:`Lies`.
"""

from tests.lying.device import DEVICE, Lies
from tests.lying.groups import install

__all__ = ["DEVICE", "Lies", "install"]
