"""The store for the rendezvous of process groups: a process of its own, which dies with the controller.

Importing torch takes seconds, in which a restarted controller would serve no agent.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from datetime import timedelta

from moc.runtime import children

_AGAIN_S = 1.0


class MeetingStore:
    """A ``TCPStore`` in a child process, restarted when it dies.

    Its ``address`` is empty while it is unavailable; ``on_opened`` is called whenever it becomes available.
    """

    def __init__(self, host: str, on_opened: Callable[[], None]):
        self._host, self._on_opened = host, on_opened
        self.address = ""

    async def keep(self) -> None:
        """Runs the store until cancelled."""
        while True:
            process = await children.start("moc.runtime.meeting_store", "--host", self._host, stdout=subprocess.PIPE)
            try:
                assert process.stdout is not None  # a pipe
                self.address = (await process.stdout.readline()).decode().strip()
                if self.address:
                    self._on_opened()
                await process.wait()
            finally:
                self.address = ""
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
            await asyncio.sleep(_AGAIN_S)


def main() -> None:
    """Serves until its parent dies."""
    children.belong()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--host", required=True)
    host = parser.parse_args().host
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # public, but not in __all__

    with socket.create_server((host.strip("[]"), 0)) as listener:  # torch itself would listen on all interfaces
        port, descriptor = listener.getsockname()[1], os.dup(listener.fileno())
    minute = timedelta(seconds=60)
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=minute, master_listen_fd=descriptor)
    print(f"{host}:{port}", flush=True)
    while store is not None:
        signal.pause()


if __name__ == "__main__":
    main()
