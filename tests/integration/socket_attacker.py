"""A process of user 65534 that connects to all local sockets of jobs that it finds, until its input ends.

In the end it prints how many names it has tried, and how many connections it has made.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import sys
import tempfile
from collections import deque
from pathlib import Path

NOBODY = 65534
_HELD = 400  # more than a queue takes


def names() -> set[str]:
    """What the kernel's list and the file systems name as sockets of jobs, abstract names included."""
    lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()[1:]
    listed = (line.split(maxsplit=7)[7] for line in lines if len(line.split(maxsplit=7)) == 8)
    found = {"\0" + name[1:] if name.startswith("@") else name for name in listed if "moc-" in name}
    for root in ("/dev/shm", os.environ.get("XDG_RUNTIME_DIR", "/dev/shm"), tempfile.gettempdir()):
        for home in Path(root).glob("moc-*"):
            for directory, _, files in os.walk(home):
                found |= {path for path in (f"{directory}/{name}" for name in files) if is_socket(path)}
    return found


def is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False


def main() -> None:
    """Attacks."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    tried, entered, held = set(), 0, deque()
    print("attacks", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        for name in names():
            tried.add(name)
            for _ in range(_HELD):
                sock = socket.socket(socket.AF_UNIX)
                sock.setblocking(False)
                held.append(sock)
                try:
                    sock.connect(name)
                    entered += 1
                except OSError:
                    break
            while len(held) > _HELD:
                held.popleft().close()
    print(len(tried), entered)


if __name__ == "__main__":
    main()
