"""A way to a server on which its answers come slowly, or not at all: a real socket in between, which is throttled.

python -m tests.slow_way ADDRESS RATE       # prints its own address, and ends with its standard input
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time

PIECE = 4096
SMALL = 16 << 10  # bytes that the kernel may keep of what is on its way, or the first pieces would not be slow


class SlowWay:
    """Connect to ``address`` in place of the server's.

    Args:
        to: ``host:port`` of the server.
        rate: bytes a second that come from there, at most.
        stalls_after: bytes, over all connections, after which nothing comes until :attr:`flows` is set.

    Attributes:
        address: ``host:port`` of this end.
        flows: cleared while nothing comes.
    """

    def __init__(self, to: str, rate: float = float("inf"), stalls_after: float = float("inf")):
        self._to, self._rate, self._left = to, rate, stalls_after
        self.flows = threading.Event()
        self.flows.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            here, _ = self._listener.accept()
            host, _, port = self._to.rpartition(":")
            try:
                there = socket.create_connection((host, int(port)))
            except OSError:  # it is being started again
                here.close()
                continue
            there.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
            here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)
            for source, target, slow in ((here, there, False), (there, here, True)):
                threading.Thread(target=self._pass_on, args=(source, target, slow), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, slow: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(PIECE):
                if slow:
                    self._delay(len(data))
                target.sendall(data)
        for end in (source, target):  # the other direction ends too
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _delay(self, nbytes: int) -> None:
        self._left -= nbytes
        if self._left < 0:
            self._left = float("inf")
            self.flows.clear()
        self.flows.wait()
        time.sleep(nbytes / self._rate)


if __name__ == "__main__":
    print(SlowWay(sys.argv[1], float(sys.argv[2])).address, flush=True)
    sys.stdin.read()
