"""Attacks the network services of a training job for a given time, and checks the effect on the job.

    python benchmarks/wire_fuzz.py --seconds 600 --output docs/results/wire_fuzz_cpu.json

A job of two workers runs under our launcher.  Its controller (TCP), its agent (Unix socket) and its replica server, if
any, are attacked in turns: by unauthenticated peers, by authenticated peers that violate the wire protocol, and by idle
connections.  Separate channels are attacked by a man in the middle and by unauthenticated peers.  Meanwhile a worker is
killed repeatedly, so that all services must work: the agent connects to the controller, a new worker to the agent, and
both to the others.

The job passes if

* it continues without help after each kill, and no other generation begins;
* unauthenticated peers receive only the handshake;
* no server accumulates memory or descriptors;
* losses, gradient norms and bits equal an undisturbed job, which trains afterwards to the iteration where the first
  job was asked to stop.

The logged refusals are counted.
"""

from __future__ import annotations

import os
import random
import re
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections import Counter, deque
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, say, write_json
from benchmarks.faults.run import End, differences, end_of
from benchmarks.live.job import EP2, IN_MEMORY, MODEL, PATIENCE_S, PROGRAM, Job, free_ports, launcher, look, running
from moc.runtime.connections import resolve
from moc.runtime.termination import SAVED
from moc.store.host_memory import SOCKETS_DIRECTORY
from tests.integration.strangers import Stranger
from tests.unit.runtime.fuzz_protocol import attack, between, stranger

WORKERS, VICTIM = 2, 1
TRAINED = [PROGRAM, *MODEL, *EP2, *IN_MEMORY]
LOITERERS = 40  # simultaneous; well below the limit of 128 pending handshakes
SAMPLE_S = 5.0
GROWTH_MB = 8.0
_REFUSED = re.compile(r"refused .*?: (.*)")
_NUMBER = re.compile(r"\d+")
_GENERATION = re.compile(r"mocrun: generation (\d+): (.*)")


class Target:
    """A job under attack; ``refusals`` counts each logged refusal, without its numbers."""

    def __init__(self, directory: str):
        self._token, self.refusals, (self._port,) = secrets.token_bytes(32), Counter(), free_ports(1)
        command = [*launcher(WORKERS), "--rdzv-endpoint", f"127.0.0.1:{self._port}", *TRAINED, "--exit-signal-handler"]
        self.job = Job(command, directory, True, self._keep, {"MOC_TOKEN": self._token.hex()})
        self._snapshots = Path(directory) / "snapshots"
        self._loitering: deque[socket.socket] = deque()

    @property
    def addresses(self) -> dict[str, str]:
        """Addresses of its services: the controller, and a node's agent and replica server."""
        found = {"controller": f"127.0.0.1:{self._port}"}
        for name, process in self.processes.items():
            unix = {str(c.laddr) for c in process.net_connections("unix") if f"/{SOCKETS_DIRECTORY}/" in str(c.laddr)}
            found |= {f"{name}, socket {i}": f"unix:{address}" for i, address in enumerate(sorted(unix))}
        for process in running(self.job.process.pid, "moc.runtime.replica_server"):
            listening = [c.laddr for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
            found |= {f"replica server, port {i}": f"{ip}:{port}" for i, (ip, port) in enumerate(listening)}
        return found

    @property
    def processes(self) -> dict[str, psutil.Process]:
        """Processes of these services."""
        agent = self.job.process.pid
        others = {name: running(agent, f"moc.runtime.{name}") for name in ("controller", "replica_server")}
        return {"agent": psutil.Process(agent)} | {name: of[0] for name, of in others.items() if of}

    @property
    def generations(self) -> list[tuple[int, str]]:
        """Number and reason of each generation that has begun."""
        found = (_GENERATION.search(line) for _, line in self.job.said)
        return [(int(match[1]), match[2]) for match in found if match]

    def attacked(self, rng: random.Random, where: str, address: str) -> str:
        """Attacks a server once; returns the kind of attack."""
        if rng.random() < 0.02:
            self._loiter(address)
            return f"{where}, loiterer"
        return f"{where}, {attack(rng, address, self._token)}"

    def end(self) -> End:
        """Asks the job to save and stop; returns its losses and hashes."""
        self.job.process.send_signal(signal.SIGTERM)
        if (code := self.job.process.wait(PATIENCE_S)) != SAVED:
            raise RuntimeError(f"asked to stop, it ended with {code}; its last words:\n{self.job.last_words()}")
        return end_of(self._snapshots, self.job.iteration, self.job.events)

    def leave(self) -> None:
        """Closes all idle connections."""
        while self._loitering:
            self._loitering.popleft().close()

    def _loiter(self, address: str) -> None:
        family, where = resolve(address)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.connect(where)
        self._loitering.append(sock)
        if len(self._loitering) > LOITERERS:
            self._loitering.popleft().close()

    def _keep(self, line: str) -> bool:
        """Counts and discards refusals; discards the many lines of iterations."""
        if refusal := _REFUSED.search(line):
            self.refusals[_NUMBER.sub("N", refusal[1])] += 1
        return not refusal and " iteration " not in line


def fuzz(target: Target, seconds: float, kill_every: float, rng: random.Random, outsider: Stranger) -> dict:
    """Attacks until the time is over, and kills a worker repeatedly.

    Returns:
        ``attacks`` by kind, ``kills``, ``samples`` of resources by server, an outsider's attempts on all ports by kind
        (``on all ports``, includes gloo's), and its successes (``entered``).
    """
    job, counts, kills, doors, watched = target.job, Counter(), 0, target.addresses, target.processes
    samples = {who: [] for who in watched}

    def sample(now: float) -> None:
        for who, process in watched.items():
            counted = {what: value for what, value in look(process).items() if what != "rss_mb"}
            samples[who].append({"seconds": now} | counted)

    begun, next_sample, next_kill = time.monotonic(), 0.0, kill_every
    while (now := time.monotonic() - begun) < seconds:
        chosen = rng.choice([*doors, between, stranger])
        at_door = isinstance(chosen, str)
        counts[target.attacked(rng, chosen, doors[chosen]) if at_door else f"channel, {chosen(rng)}"] += 1
        if now >= next_sample:
            next_sample = now + SAMPLE_S
            sample(now)
        if now >= next_kill:
            os.kill(job.workers()[VICTIM], signal.SIGKILL)
            kills, next_kill = kills + 1, now + kill_every
            _live_through(target, kills, doors, rng, counts)
    target.leave()
    outsider.leave()
    job.reach(job.iteration + 2)
    time.sleep(2 * SAMPLE_S)  # longer than a handshake may take
    sample(time.monotonic() - begun)
    told = {"attacks": dict(sorted(counts.items())), "kills": kills, "samples": samples}
    return told | {"on all ports": outsider.tried, "entered": outsider.entered}


def _live_through(target: Target, kills: int, doors: dict[str, str], rng: random.Random, counts: Counter) -> None:
    """Continues the attacks until the job has completed new iterations."""
    job = target.job
    reached = job.iteration

    def goes_on() -> bool:
        where, address = rng.choice(list(doors.items()))
        counts[target.attacked(rng, where, address)] += 1
        return len(target.generations) >= kills and job.iteration >= reached + 2

    job.wait_for(goes_on, f"an iteration after kill {kills}")


def undisturbed(directory: str, iterations: int, limit: float) -> End:
    """Returns the losses and hashes of an undisturbed job after this many iterations."""
    command = [*launcher(WORKERS), *TRAINED, "--exit-interval", iterations]
    with Job(command, directory, True) as job:
        job.process.wait(limit)
        return end_of(Path(directory) / "snapshots", iterations, job.events)


def restarts(generations: list[tuple[int, str]]) -> tuple[int, int]:
    """Returns the number of generations that a kill caused, and of all others, which attacks caused."""
    killed = sum("was killed by signal 9" in reason for _, reason in generations)
    return killed, len(generations) - killed


def verdict(told: dict, generations: list[tuple[int, str]]) -> dict[str, bool]:
    """Returns each claim with whether it holds."""
    killed, burnt = restarts(generations)
    ends = [((samples[1:2] or samples)[0], samples[-1]) for samples in told["samples"].values()]
    grown = all(last["uss_mb"] - first["uss_mb"] < GROWTH_MB for first, last in ends)
    return {
        "the job went on after each kill": killed == told["kills"],
        "no restart was burnt": not burnt and [number for number, _ in generations] == list(range(1, killed + 1)),
        "it ended with the bits of an undisturbed job": told["tensors"] > 0 and not told["differences"],
        "the stranger got in nowhere": not told["entered"],
        "no descriptors are left": all(last["descriptors"] <= first["descriptors"] for first, last in ends),
        f"memory grew by less than {GROWTH_MB:g} MB": grown,
    }


def main() -> int:
    """Runs the attacks; returns 1 if a claim does not hold."""
    parser = command_line(__doc__)
    parser.add_argument("--seconds", type=float, default=600, help="default: 600")
    parser.add_argument("--kill-every", type=float, default=20, help="seconds (default: 20)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    own = parser.parse_args()
    print(f"seed {own.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        target = Target(name)
        with target.job as job:
            job.reach(2)
            with Stranger(job.process.pid) as outsider:
                told = fuzz(target, own.seconds, own.kill_every, random.Random(own.seed), outsider)
            ended = target.end()
            others = [line for _, line in job.said if "Error" in line]
    print(f"undisturbed, to iteration {job.iteration}", flush=True)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        expected = undisturbed(name, job.iteration, max(PATIENCE_S, 2 * own.seconds))
    told |= {"iterations": job.iteration, "restarts burnt": restarts(target.generations)[1]}
    told |= {"tensors": len(expected.hashes), "differences": differences(ended, expected)}
    held = verdict(told, target.generations)
    told |= {"refusals": dict(target.refusals.most_common()), "errors": others, "held": held}
    for kind, count in [*told["attacks"].items(), *told["refusals"].items()]:
        print(f"{count:9} {kind}")
    print(f"{len(others)} lines of errors" + "".join(f"\n  {line}" for line in others[:5]))
    write_json(own.output, {"machine": machine(), "seconds": own.seconds, "seed": own.seed} | told)
    return 0 if say(held) else 1


if __name__ == "__main__":
    sys.exit(main())
