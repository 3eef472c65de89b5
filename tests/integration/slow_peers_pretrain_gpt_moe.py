"""The held program, whose nodes reach each other's snapshots by sockets on which little comes."""

import os
import subprocess
import sys
from pathlib import Path

import pretrain_gpt_moe as program
from pretrain_gpt_moe import warm_up
from tests.integration.held_pretrain_gpt_moe import hold

RATE = 10e6  # bytes a second


def slow_down() -> None:
    """Has the replica server of this node known by the address of a slow way to it, which ends with this worker."""
    from moc.runtime.replica_server import ReplicaClient

    begin = ReplicaClient.__init__

    def slowed(self, *args):
        begin(self, *args)
        command = [sys.executable, "-m", "tests.slow_way", self.address, str(RATE)]
        self.way = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = self.way.stdout.readline().strip()

    ReplicaClient.__init__ = slowed


if __name__ == "__main__":
    warm_up()
    slow_down()
    hold(Path(os.environ["TEST_MAY_END"]))
    sys.exit(program.main())
