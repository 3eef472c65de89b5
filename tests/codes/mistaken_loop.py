"""A program of a user: the loop of ``examples/pure_torch.py`` with a mistake, which its first argument names."""

import dataclasses
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import pure_torch

from moc import LocalRemains, ReplicatedState, Session, Settings, join_job
from moc.policy import Policy, SnapshotPlan, policy
from moc.runtime.groups import PeerFailure
from moc.runtime.protocol import make_token_file
from moc.sharding.rules import rule
from moc.state.operators import Detail


def session(engine_of=pure_torch.Engine, **settings):
    """Begins a session with an engine."""
    job = join_job()
    job.connect("gloo", timedelta(minutes=5), torch.device("cpu"))
    engine = engine_of(job)
    asked = {"directory": "snapshots", "train_iters": 3, "policy": "full"} | settings
    begun = Session(engine, Settings(**asked), pure_torch.Log(job.rank, None), LocalRemains())
    pure_torch.train(engine, begun, 3)


class Unnamed(pure_torch.Engine):
    """Does not name all parameters."""

    def __init__(self, job):
        super().__init__(job)
        ReplicatedState({}, self.optimizer, job.rank).described()


class Unknown(pure_torch.Engine):
    """Names a parameter of no operator."""

    def __init__(self, job):
        super().__init__(job)
        named = {f"strange.{name}": parameter for name, parameter in self.model.named_parameters()}
        ReplicatedState(named, self.optimizer, job.rank).described()


class Dying(pure_torch.Engine):
    """Loses a worker in the same iteration each time."""

    def gradients(self, iteration):
        if (iteration, self.world.rank) == (2, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().gradients(iteration)


class Momentum(pure_torch.Engine):
    """Has an optimizer without support."""

    def __init__(self, job):
        super().__init__(job)
        optimizer = torch.optim.NAdam(self.model.parameters())
        named = {pure_torch.name_of(name): parameter for name, parameter in self.model.named_parameters()}
        self.state = ReplicatedState(named, optimizer, job.rank)
        self.operators = self.state.described()


def lose_connections():
    """Reports again and again that connections are lost."""
    job = join_job()
    while True:
        try:
            job.connect("gloo", timedelta(minutes=5), torch.device("cpu"))
            raise PeerFailure("connection reset")
        except PeerFailure as error:
            job.rejoin_after(error)


def no_dataclass():
    """A policy that is no dataclass."""

    @policy("plain")
    class Plain(Policy):
        def plan(self, iteration, load=None):
            return None


def partial_plans():
    """A policy whose snapshots lack dense operators, without any that have them."""

    @policy("partly")
    @dataclasses.dataclass(frozen=True)
    class Partly(Policy):
        def plan(self, iteration, load=None):
            return SnapshotPlan(iteration, "partly", {self.operators[0].name: Detail.FULL}, False)

    session(policy="partly")


def bad_rule():
    """A sharding rule that assigns nothing."""

    @rule("nothing")
    def nothing(*_):
        return []

    session(sharding="nothing,nothing")


def lose_one_worker_each_time():
    """A loop that recovers, and loses a worker in the same iteration each time."""
    pure_torch.Engine, sys.argv = Dying, ["", "--ckpt-dir", "snapshots", "--iterations", "4"]
    pure_torch.Settings = lambda directory, iterations, **_: Settings(directory, iterations, policy="full")
    pure_torch.main()


def twice():
    """A token file that exists."""
    make_token_file("job.token")
    make_token_file("job.token")


MISTAKES = {
    "chooser-missing": lambda: session(policy="auto"),
    "connections-unstable": lose_connections,
    "freezing-unsupported": lambda: session(policy="sparse"),
    "engine-incomplete": lambda: session(policy="pec", options={"selection": "load_aware"}),
    "interval-invalid": lambda: session(snapshot_interval="often"),
    "optimizer-unsupported": lambda: session(Momentum),
    "parameter-unknown": lambda: session(Unknown),
    "parameter-unnamed": lambda: session(Unnamed),
    "policy-class-invalid": no_dataclass,
    "policy-option-unknown": lambda: session(options={"colour": 1}),
    "policy-plan-invalid": partial_plans,
    "progress-missing": lose_one_worker_each_time,
    "restarts-exhausted": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "setting-invalid": lambda: session(tier="tape"),
    "setting-without-effect": lambda: session(replicas=2),
    "sharding-rule-broken": bad_rule,
    "token-file-exists": twice,
}

if __name__ == "__main__":
    MISTAKES[sys.argv[1]]()
