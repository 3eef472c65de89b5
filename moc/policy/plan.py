"""What one snapshot holds, and what a policy is: a pure function from an iteration to such a plan."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

from moc.policy.flags import Asked, JobShape, PolicyFlag
from moc.policy.interval import Interval
from moc.policy.prices import Machine, Price, Settings
from moc.state.detail import Detail
from moc.state.operators import Operator

Load = Mapping[int, Sequence[int]]
"""By layer (global number): the tokens that each of its experts has been given since training began."""

Busiest = Callable[[Mapping[str, Detail]], int]
"""From operators with their details to the bytes of the rank that saves the most of them."""


@dataclass(frozen=True)
class SnapshotPlan:
    """What is saved of the whole model at one moment; the same on every rank.  Which rank saves it is not its business.

    Attributes:
        iteration: iterations completed when it is taken.
        policy: name of the policy that made it.
        operators: by name of the operator, how much of it; in model order, and read-only.
        complete: training can be recovered from this snapshot alone; where False, it takes earlier ones too.
        since: iteration of the first snapshot of its window; its own, where it is no part of a longer one.

    Raises:
        ValueError: nothing to save.
    """

    iteration: int
    policy: str
    operators: Mapping[str, Detail] = field(hash=False)
    complete: bool
    since: int | None = None

    def __post_init__(self):
        if not self.operators:
            raise ValueError(
                f"policy {self.policy} plans an empty snapshot for iteration {self.iteration}: its plan() must return "
                "None where there is nothing to save"
            )
        object.__setattr__(self, "operators", MappingProxyType(dict(self.operators)))
        if self.since is None:
            object.__setattr__(self, "since", self.iteration)

    def of(self, detail: Detail) -> tuple[str, ...]:
        """Names of the operators that are saved at a detail, in model order."""
        return tuple(name for name, planned in self.operators.items() if planned is detail)

    @property
    def ends_window(self) -> bool:
        """Whether nothing is still to come in full; only then can it take the place of earlier snapshots."""
        return Detail.COMPUTE not in self.operators.values()

    @property
    def supersedes(self) -> int | None:
        """Once it is safe, snapshots before this iteration are of no use any more; None where they still are."""
        return self.since if self.ends_window else None

    @property
    def details(self) -> tuple[Detail, ...]:
        """The details that occur, in the order of :class:`~moc.state.detail.Detail`."""
        occurring = set(self.operators.values())
        return tuple(detail for detail in Detail if detail in occurring)


@dataclass(frozen=True)
class Policy(ABC):
    """When what is saved.

    A policy is a frozen dataclass; settings of its own are further fields, with defaults.  Every rank asks its own copy
    and acts on the answer without a word to the others, so an answer may follow from the fields, the arguments and
    what policy and interval were told (the same on all ranks), and from nothing else: no clock, no random numbers, no
    rank.  Asking changes nothing; telling does.  What was told is in :meth:`state_dict`, which is stored with every
    snapshot, since with a tuned interval the number of snapshots so far does not follow from the iteration.

    Attributes:
        operators: all operators of the model, in model order (:func:`moc.state.shape.model_operators`).
        interval: when a snapshot is due.
        name: of the policy; set by :func:`moc.policy.registry.policy`.
        exact: a run that goes on from its snapshots is the one that was never killed; if not, experts may come back in
            an older state than the rest.
        replays: to go on, iterations may have to be computed again while some operators are frozen.
        flags: its own; ``--help`` has them, and they are refused with other policies.
        grows: the setting that faults double in the simulator, if there is one; see :mod:`moc.policy.dynamic_k`.
    """

    operators: Sequence[Operator]
    interval: Interval
    name: ClassVar[str]
    exact: ClassVar[bool] = True
    replays: ClassVar[bool] = False
    flags: ClassVar[tuple[PolicyFlag, ...]] = ()
    grows: ClassVar[str | None] = None

    @classmethod
    def refusals(cls, asked: Asked) -> Iterator[str]:
        """What of the flags cannot work with this policy, in sentences that say what to change."""
        return iter(())

    @classmethod
    def reckons_with_faults(cls, asked: Asked) -> bool:
        """Whether by these flags the policy wants to know how often the job fails (``--mtbf-hours``)."""
        return False

    @classmethod
    def settings(cls, asked: Asked, job: JobShape) -> dict[str, Any]:
        """The fields of the policy that flags and job decide; by default those that are called as they are.

        Field ``k`` of policy ``pec`` is flag ``pec_k``, if there is one; else it is what is known of the job.
        """
        every, interval = asked.persist_interval, asked.snapshot_interval
        found = {
            "ep": job.ep,
            "stages": job.stages,
            "mtbf_s": asked.mtbf_s,
            "one_level": asked.ckpt_tier == "disk",
            "persist_every": every // int(interval) if every and interval.isdecimal() else 1,
        }
        found |= {flag.name.removeprefix(f"{cls.name}_"): getattr(asked, flag.name) for flag in cls.flags}
        return {field.name: found[field.name] for field in dataclasses.fields(cls) if field.name in found}

    @classmethod
    def candidates(cls, machine: Machine) -> Iterator[Settings]:
        """The settings that ``--ckpt-policy auto`` and the planner choose from; by default its defaults alone.

        What they name are flags of the policy that are ``chosen``.
        """
        yield {}

    @classmethod
    def price(cls, machine: Machine, settings: Settings) -> Price:
        """What a checkpoint is made of with some settings; by default everything at once.

        Args:
            machine: what it is priced for.
            settings: one of :meth:`candidates`, or what a user of the simulator has fixed, which may be nothing.
        """
        return Price(machine.everything)

    @classmethod
    def described(cls, settings: Settings) -> str:
        """The settings of a candidate, for people; the interval is not among them."""
        return ", ".join(f"{name} {value}" for name, value in settings.items())

    @property
    def window_length(self) -> int:
        """Snapshots of the window that is under way, or was last: so many make what a run can go on from."""
        return 1

    @property
    def counts_tokens(self) -> bool:
        """Whether it wants to know how many tokens each expert is given; by default where it is not exact."""
        return not self.exact

    @property
    def counts_probabilities(self) -> bool:
        """Whether it wants to be told :meth:`routed`."""
        return False

    @abstractmethod
    def plan(self, iteration: int, load: Load | None = None) -> SnapshotPlan | None:
        """What to save now.

        Args:
            iteration: iterations completed.
            load: tokens by layer and expert; None where nobody counts them.

        Returns:
            The plan, or None where nothing is to be saved.
        """

    def on_sizes(self, busiest: Busiest) -> None:  # noqa: B027
        """Learns how large snapshots would be; told once, before training, on all ranks.

        Args:
            busiest: the bytes of the rank that saves the most of a plan's operators.
        """

    def on_snapshot(self, plan: SnapshotPlan, load: Load | None = None) -> None:  # noqa: B027
        """Learns that a snapshot of this plan was begun; to be called before the state that it stores is asked for.

        Args:
            plan: from :meth:`plan` or :meth:`everything`.
            load: tokens by layer and expert at that moment; None where nobody counts them.
        """

    def under_way(self, iteration: int) -> Sequence[SnapshotPlan]:
        """The plans of the snapshots that the window of an iteration has so far, that iteration's the last.

        Args:
            iteration: which was completed last.

        Returns:
            Nothing where no such snapshot was begun, and where every snapshot is a window of its own.
        """
        return ()

    def begin_anew(self) -> None:  # noqa: B027
        """Learns that the window under way lacks a snapshot: the next one begins another window."""

    def on_routing(self, probabilities: Mapping[int, Sequence[float]]) -> None:  # noqa: B027
        """Learns with what probabilities routers chose; told after every iteration, before :meth:`plan`.

        Args:
            probabilities: by layer and expert their sum over the tokens that the expert was given in this iteration.
        """

    def for_storage(self, plan: SnapshotPlan) -> SnapshotPlan:
        """What of a snapshot in memory goes on to storage; all of it, where a policy does not say otherwise.

        Not for the end of a run: then :meth:`everything` goes there as it is.
        """
        return plan

    def on_stored(self, plan: SnapshotPlan) -> None:  # noqa: B027
        """Learns that this part of a snapshot, from :meth:`for_storage`, goes to storage; told after :meth:`taken`."""

    def stores(self, plan: SnapshotPlan) -> bool:
        """Whether a snapshot in memory must go to storage too, due or not; to be asked before :meth:`taken`."""
        return False

    def on_resume(self, in_memory: bool, in_storage: bool) -> None:  # noqa: B027
        """Learns what there is when a run goes on, told after :meth:`load_state_dict`.

        Args:
            in_memory: where snapshots are safe, be it storage, the newest snapshots are all that the run goes on with.
            in_storage: a run could go on from what is in storage alone.
        """

    def storage_lost(self) -> None:  # noqa: B027
        """Learns that storage does not get the first checkpoint that was to go there: it needs another one."""

    def on_recovery(self, plt: float) -> None:  # noqa: B027
        """Learns what a recovery has cost.

        Args:
            plt: by how much it has raised the proportion of lost tokens of the whole training.
        """

    def fault_cost(self, train_iters: int, in_memory: bool, in_storage: bool) -> tuple[str, dict] | None:
        """What a fault is expected to cost, for people and for the log; None where nothing is lost, or it is not known.

        Args:
            train_iters: of so many iterations' tokens a proportion is lost.
            in_memory: a memory tier has every snapshot.
            in_storage: snapshots go to storage, too.
        """
        return None

    def gauges(self) -> dict[str, float]:
        """By name, what of the policy changes during a run and is worth seeing over time."""
        return {}

    def chosen(self) -> dict[str, float]:
        """Those of :meth:`gauges` that the policy has chosen, for which there is a :meth:`reason`."""
        return self.gauges()

    def reason(self) -> str | None:
        """Why :meth:`chosen` is what it is, for people; None where nothing was chosen."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What the policy was told, as JSON can hold it; the interval's is its own."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Goes on from :meth:`state_dict`.

        Raises:
            ValueError: this is no such state.
        """

    def everything(self, iteration: int) -> SnapshotPlan:
        """All of the model, due or not: for the last iteration, and for a job that is told to stop."""
        return self._full(iteration, (operator.name for operator in self.operators))

    def _full(self, iteration: int, names: Iterable[str]) -> SnapshotPlan:
        return SnapshotPlan(iteration, self.name, dict.fromkeys(names, Detail.FULL), complete=True)
