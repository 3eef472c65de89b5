"""Somebody else on this machine, who has no token and attacks every port of a job."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from datetime import timedelta

import psutil
import torch.distributed as dist


class Stranger(threading.Thread):
    """Attacks all ports of a process and its children until it is told to stop.

    Attributes:
        tried: by kind, how often.
        entered: what it got out of somebody, which must be nothing.
    """

    def __init__(self, pid: int):
        super().__init__(daemon=True)
        self._pid, self._over, self._rng = pid, threading.Event(), random.Random(0)
        self._kept: list[socket.socket] = []
        self._known: set[tuple[str, int]] = set()
        self.tried = {"number": 0, "short": 0, "idle": 0, "noise": 0, "store": 0}
        self.entered: list[str] = []

    def __enter__(self) -> Stranger:
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.leave()

    def leave(self) -> None:
        """Stops, and leaves no connection."""
        self._over.set()
        self.join(60)
        while self._kept:
            self._kept.pop().close()

    def run(self) -> None:
        while not self._over.wait(0.002):
            for address in self._ports():
                kind = self._next(address)
                with contextlib.suppress(OSError, RuntimeError):
                    self.tried[kind] += 1
                    getattr(self, f"_{kind}")(address)

    def _next(self, address: tuple[str, int]) -> str:
        """What to try at an address: first each kind once, since a store's client may take as long as the job."""
        never = [kind for kind, times in self.tried.items() if not times and kind != "store"]
        if never:
            return never[0]
        if address not in self._known:  # once is enough
            self._known.add(address)
            return "store"
        return self._rng.choice(["number", "short", "noise", "noise", "number", "idle"])

    def _ports(self) -> list[tuple[str, int]]:
        found = set()
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            for process in [psutil.Process(self._pid), *psutil.Process(self._pid).children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    there = process.net_connections("tcp")
                    found |= {tuple(one.laddr[:2]) for one in there if one.status == psutil.CONN_LISTEN}
        return sorted(found)

    def _connect(self, address) -> socket.socket:
        return socket.create_connection(address, timeout=0.02)

    def _number(self, address) -> None:
        """As gloo does: the number of a connection that somebody may wait for."""
        sock = self._connect(address)
        self._keep(sock)
        sock.sendall(struct.pack("<q", self._rng.randrange(64)))

    def _short(self, address) -> None:
        for _ in range(20):
            self._connect(address).close()

    def _idle(self, address) -> None:
        self._keep(self._connect(address))

    def _noise(self, address) -> None:
        with self._connect(address) as sock:
            sock.sendall(self._rng.randbytes(300))

    def _store(self, address) -> None:
        """As torch's own client of a store."""
        self._connect(address).close()  # the client would try again where nobody listens
        soon = timedelta(seconds=0.2)
        store = dist.TCPStore(*address, is_master=False, wait_for_workers=False, timeout=soon)
        store.set("planted", "")
        self.entered.append(f"the store at {address}, which has {store.num_keys()} keys")

    def _keep(self, sock: socket.socket) -> None:
        self._kept.append(sock)
        if len(self._kept) > 60:
            self._kept.pop(0).close()
