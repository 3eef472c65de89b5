"""Workers whose lease has ended do nothing any more, whatever their agent does."""

import os
import signal
import subprocess
import sys
import time

from moc.runtime import environment
from moc.runtime.progress import Lease

TELLS = """
import sys, time
from moc.events import EventLog
log = EventLog(sys.argv[1])
log.write("before")
print("ready", flush=True)
sys.stdin.readline()
log.write("after")
time.sleep(60)
"""


def test_resumed_worker_with_ended_lease_writes_no_event(tmp_path):
    lease = Lease.create()
    assert lease.remaining_s > 1e9
    values = {environment.LEASE: str(lease.descriptor), "RANK": "3"}
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    worker = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", TELLS, str(tmp_path)],
        env=os.environ | values, pass_fds=[lease.descriptor], **pipes,
    )  # fmt: skip
    with worker:
        assert worker.stdout.readline() == "ready\n"
        worker.send_signal(signal.SIGSTOP)
        lease.end = time.monotonic()
        print(file=worker.stdin, flush=True)
        worker.send_signal(signal.SIGCONT)
        assert worker.wait(60) == -signal.SIGKILL
        assert "worker 3" in worker.stderr.read()
    told = (tmp_path / "events.jsonl").read_text()
    assert '"before"' in told and '"after"' not in told
