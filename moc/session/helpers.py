"""Clients of a worker's background processes (:mod:`moc.session.node_service`).

* One carries experts from older snapshots in memory (:mod:`moc.recovery.expert_versions`).
* One applies saved gradients: MoEtion's asynchronous optimizer recomputation (section 5.2).

      each time that experts are carried from a node's snapshots:
          adopt the committed results of the background optimizer
          order: compare saved state with the result of its chain; apply the gradients of the longest chains

  No gradients are applied before one comparison, on any node, has found equal bits.  A comparison that finds different
  bits ends the mechanism.  All nodes receive both results with the commit all-reduces.
* One hashes the entries of snapshots in memory.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from moc.cli_output import print_lines
from moc.errors import cause_of, code_of, warning, with_code
from moc.policy import Policy, SnapshotPlan, recovers_exactly
from moc.recovery.expert_versions import Carrier
from moc.recovery.gradient_chains import Chain
from moc.recovery.gradient_folding import UpdateOutcome
from moc.recovery.sources import MEMORY, AvailableCheckpoint
from moc.runtime.helper_process import HelperError, HelperProcess
from moc.session.node_service import CARRY, FOLD, HASH, MODULE
from moc.session.tiers import Tiers
from moc.snapshot.saver import hashed
from moc.state.operators import Detail, Operator
from moc.store.buffers import HostBuffer
from moc.store.errors import CheckpointError
from moc.store.store import Store

LEAST_GRADIENTS = 4
"""Minimum length of a chain whose gradients are applied: one read and write of its base serves all of them."""
CHAINS_PER_ORDER = 4
"""Inverse share of the chains in one order: meanwhile memory has both bases of each."""
_DIES = 3
_COUNTS = ("folded", "gradients", "equal", "differing", "seconds")

Coming = tuple[AvailableCheckpoint, Mapping[str, Detail], frozenset[str]]
"""A snapshot, its operators that other nodes receive copies of, and its operators with both state and gradients."""

_warned: set[str] = set()

Spans = Sequence[tuple[int, int]]


class Folds:
    """This node's background optimizer and its results; inactive on workers that do not lead their node."""

    def __init__(self):
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot-fold")
        self._helper = HelperProcess(MODULE, FOLD, env={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
        self._under_way: dict[str, Future[UpdateOutcome]] = {}
        self._counts: dict[str, float] = defaultdict(float)
        self._changing = threading.Lock()
        self._trusted = self._over = False
        self._died = 0
        self._seconds = 0.0  # not reported yet, over all nodes

    @property
    def processes(self) -> list[int]:
        """Id of the background optimizer, once it has started."""
        return self._helper.pids

    def take_over(self, carrier: Carrier) -> None:
        """Adopts the background optimizer's committed results for a carrier's snapshots.

        Raises:
            CheckpointError, OSError: the results cannot be read or written.
        """
        carrier.compares |= not self._over
        done = self._under_way.get(carrier.name)
        if done is None or not done.done():
            return
        del self._under_way[carrier.name]
        try:
            outcome = done.result()
        except (CheckpointError, OSError) as error:
            self._has_failed(error)
            return
        self._died = 0
        carrier.is_compared([*outcome.equal, *outcome.differing, *outcome.superseded])
        if outcome.why:
            why = f"gradients cannot be folded ({outcome.why})"
            self._ends(CheckpointError(f"{why}. Fix: keep Adam's state in fp32", code="folding-unsupported"))
        adopted = carrier.adopt() if self._trusted and not self._over and outcome.folded else []
        with self._changing:
            self._counts["folded"] += len(adopted)
            self._counts["gradients"] += outcome.gradients if adopted else 0
            self._counts["equal"] += len(outcome.equal)
            self._counts["differing"] += len(outcome.differing)

    def go_on(self, carrier: Carrier) -> None:
        """Sends the background optimizer its next order for a carrier's snapshots, unless it is busy with them."""
        if self._over:
            carrier.compares_no_more()
            return
        if carrier.name in self._under_way:
            return
        compare, fold = carrier.to_compare(), carrier.to_fold(LEAST_GRADIENTS) if self._trusted else []
        fold = fold[: -(-len(fold) // CHAINS_PER_ORDER)]
        if compare or fold:
            self._under_way[carrier.name] = self._thread.submit(self._order, carrier.name, compare, fold)

    def contribution(self) -> dict[str, float]:
        """Returns the results since the last call; the names are identical on all workers."""
        with self._changing:
            counts, self._counts = self._counts, defaultdict(float)
        return {f"fold_{name}": counts[name] for name in _COUNTS}

    def on_totals(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Receives the results of all nodes; returns the values to report, if any."""
        told = {name: totals[f"fold_{name}"] for name in _COUNTS}
        self._trusted |= told["equal"] > 0
        self._over |= told["differing"] > 0
        self._seconds += told["seconds"]
        if not any(told[name] for name in ("folded", "equal", "differing")):
            return {}
        told["seconds"], self._seconds = self._seconds, 0.0
        return told

    def close(self) -> None:
        """Ends the background optimizer; nothing is written afterwards."""
        self._over = True
        self._helper.close()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _order(self, memory: str, compare: list[Chain], fold: list[Chain]) -> UpdateOutcome:
        begun = time.perf_counter()
        try:
            self._helper.start()  # on this thread, since the process dies with the thread that starts it
            answer = self._helper.call_process({"memory": memory, "compare": compare, "fold": fold})
        except HelperError as error:
            raise CheckpointError(
                f"the process that folds gradients {error}. Fix: read its output above; it starts again with the next "
                "snapshot",
                code="helper-lost",
            ) from None
        with self._changing:
            self._counts["seconds"] += time.perf_counter() - begun
        return UpdateOutcome(**answer)

    def _has_failed(self, error: Exception) -> None:
        self._died += 1
        if self._died >= _DIES:
            self._ends(error)

    def _ends(self, error: Exception) -> None:
        if not self._over:
            self._over = True
            print_lines(
                "WARNING: gradients of experts are no longer folded during training, and a recovery repeats their "
                f"updates: {with_code(error)}",
                error=True,
                flush=True,
            )


class Carriers:
    """Client of this worker's process that carries experts; starts it on demand, and again if it has died."""

    def __init__(self):
        self._helper, self._calling = HelperProcess(MODULE, CARRY), threading.Lock()
        self._opened: set[str] = set()

    def start(self) -> None:
        """Starts the process unless it runs.

        The process dies with the thread that starts it, so a long-lived thread should call this method.  The method
        does not wait for another thread's call, because training uses it for each snapshot.

        Raises:
            CheckpointError: the process cannot be started.
        """
        if not self._helper.is_running:
            with self._calling:
                self._start()

    def call(self, carrier: RemoteCarrier, does: str, **given: Any) -> Any:
        """Calls a method of a carrier in the process; returns its result as JSON values.

        Raises:
            CheckpointError: the call failed, or the process died or does not answer.
        """
        with self._calling:
            self._start()
            if carrier.name not in self._opened:
                self._ask(carrier, "open", carrier.described)
                self._opened.add(carrier.name)
            return self._ask(carrier, does, given)

    def close(self) -> None:
        """Kills the process."""
        self._helper.close()

    @property
    def processes(self) -> list[int]:
        """Process id, once the process has started."""
        return self._helper.pids

    def _start(self) -> None:
        with _as_checkpoint_error():
            if self._helper.start():
                self._opened.clear()

    def _ask(self, carrier: RemoteCarrier, does: str, given: dict[str, Any]) -> Any:
        with _as_checkpoint_error():
            answer = self._helper.call_process(
                {"memory": carrier.name, "compares": carrier.compares, "does": does, "given": given}
            )
        if "error" in answer:
            raise CheckpointError(answer["error"])
        return answer["value"]


class RemoteCarrier(Carrier):
    """Carrier that delegates background work to another process, and executes fast operations itself.

    Methods raise CheckpointError like :class:`~moc.recovery.expert_versions.Carrier`, and also if the process has died.
    """

    def __init__(self, carriers: Carriers, store: Store, experts: Iterable[Operator]):
        experts = list(experts)
        super().__init__(store, experts)
        claim = store.storage.claim
        self.described = {"claim": claim and asdict(claim), "experts": [asdict(one) for one in experts]}
        self._carriers = carriers

    def carry(
        self,
        coming: AvailableCheckpoint | None = None,
        copied: Collection[str] | None = None,
        compared: frozenset[str] = frozenset(),
    ) -> int:
        plain = (0, {}) if coming is None else (coming.iteration, dict(coming.operators))
        names = None if copied is None else sorted(copied)
        return self._carriers.call(self, "carry", coming=plain, copied=names, compared=sorted(compared))

    def drop(self, upto: int) -> None:
        self._carriers.call(self, "drop", upto=upto)

    def to_compare(self) -> list[Chain]:
        return [Chain(*chain) for chain in self._carriers.call(self, "to_compare")]

    def to_fold(self, least: int) -> list[Chain]:
        return [Chain(*chain) for chain in self._carriers.call(self, "to_fold", least=least)]

    def is_compared(self, experts: Collection[str]) -> None:
        self._carriers.call(self, "is_compared", experts=sorted(experts))

    def compares_no_more(self) -> None:
        if self.compares:
            self.compares = False
            self._carriers.call(self, "compares_no_more")

    def adopt(self) -> list[str]:
        return self._carriers.call(self, "adopt")


@contextlib.contextmanager
def _as_checkpoint_error():
    try:
        yield
    except HelperError as error:
        raise CheckpointError(
            f"the process that carries experts {error}. Fix: read its output above; it starts again with the next "
            "snapshot",
            code="helper-lost",
        ) from None


def experts_of(policy: Policy) -> list[Operator]:
    """Returns the operators that may be older than the rest: the experts, unless the policy is exact."""
    return [one for one in policy.operators if one.expert is not None and not recovers_exactly(policy)]


class Carrying:
    """Background carrying of experts of this node's snapshots; inactive on workers that do not lead the node.

    With ``folds``, the gradients of their chains are applied in the background.
    """

    def __init__(self, tiers: Tiers, policy: Policy, carriers: Carriers, folds: Folds | None = None):
        self._folds, self._carriers = folds, carriers
        memory, self._experts = tiers.memory if tiers.leads_node else None, experts_of(policy)
        self._carrier = None if memory is None else RemoteCarrier(carriers, memory, self._experts)
        self._memory, self._before = memory, None if memory is None else tiers.before
        self._committed, self._durable = threading.Condition(), 0
        self._waits_for: int | None = None
        self._newest: int | None = None
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot-carry")

    @property
    def processes(self) -> list[int]:
        """Ids of the processes that carry experts and apply gradients."""
        return self._carriers.processes + (self._folds.processes if self._folds is not None else [])

    def begin(self, plan: SnapshotPlan) -> Future | None:
        """Starts to carry the experts that a snapshot lacks from earlier snapshots, once these are committed.

        Returns:
            A future, done when the snapshot may supersede the earlier ones; None if there is nothing to carry.
        """
        if self._carrier is None or not self._experts:
            return None
        with contextlib.suppress(CheckpointError):  # carry() warns, and retries
            self._carriers.start()
        before, self._waits_for = self._waits_for, plan.iteration
        details = {name: detail.value for name, detail in plan.operators.items()}
        coming = AvailableCheckpoint(plan.iteration, MEMORY, details)
        return self._thread.submit(
            self._carry, self._carrier, (coming, plan.remote_plan.operators, plan.compared), before
        )

    def committed(self, iteration: int) -> None:
        """Records that this node's part of a snapshot is committed in its memory."""
        with self._committed:
            self._newest = iteration
            self._committed.notify_all()

    def abandoned(self, iteration: int) -> None:
        """Deletes the experts carried for a snapshot that will not be committed: they may not suffice for the next one.

        Raises:
            CheckpointError, OSError: a manifest cannot be written.
        """
        if self._carrier is not None:
            self._carrier.delete()
        self.committed(iteration)

    def release_before(self, iteration: int) -> None:
        """Reduces snapshots before a durable one to their carried experts, and clears superseded memory.

        Raises:
            CheckpointError, OSError: an older snapshot cannot be reduced.
        """
        self._durable = iteration
        if self._carrier is not None:
            self._carrier.retire(iteration)
        if self._memory is not None and self._before is not None and self._before.iterations():  # now superseded
            self._memory.storage.check_owner()
            self._before.remove_all()

    def close(self) -> None:
        """Abandons pending work."""
        with self._committed:
            self._closed = True
            self._committed.notify_all()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _carry(self, carrier: Carrier, coming: Coming, before: int | None) -> None:
        with self._committed:
            self._committed.wait_for(lambda: self._closed or before in (None, self._newest))
            if self._closed:
                return
        carry(carrier, self._durable, self._folds, *coming)


def carry(
    carrier: Carrier,
    durable: int,
    folds: Folds | None = None,
    coming: AvailableCheckpoint | None = None,
    copied: Collection[str] | None = None,
    compared: frozenset[str] = frozenset(),
) -> None:
    """Drops carried experts that a newer snapshot has, and carries the experts that the coming snapshot lacks.

    ``coming`` is described as for :meth:`Carrier.carry`; by default, it is the newest stored snapshot.  ``durable`` is
    the iteration of the newest durable one.  ``folds`` applies the gradients of chains, if wanted.
    """
    try:
        if folds is not None:
            folds.take_over(carrier)
        carrier.drop(durable)
        carrier.carry(coming, copied, compared)
        if folds is not None:
            folds.go_on(carrier)
    except (CheckpointError, OSError) as error:
        if carrier.name not in _warned:
            _warned.add(carrier.name)
            print_lines(
                warning(
                    f"experts of older snapshots cannot be kept in {carrier.name} ({cause_of(error)}), and are read "
                    "from --ckpt-dir after a failure. Fix: make room, or name another memory with --ckpt-memory-dir",
                    code=code_of(error),
                ),
                error=True,
                flush=True,
            )


class Hasher:
    """Client of a process that hashes buffers with files; the first thread that needs the process starts it.

    The calling thread computes the hashes itself in these cases:

    * the buffer has no file;
    * the process has not started yet;
    * the process has failed or ended.
    """

    def __init__(self):
        self._helper = HelperProcess(MODULE, HASH)
        self._begun = self._failed = False

    def digests(self, buffer: HostBuffer, spans: Spans) -> tuple[str, ...]:
        """Returns the hashes of spans of a buffer, each of bytes [start, stop)."""
        found = None
        if buffer.path is not None and not self._failed:
            try:
                found = self._ask([str(buffer.path), buffer.nbytes, spans])
            except HelperError as error:
                if not self._failed:
                    self._fails(str(error))
        return hashed(buffer, spans) if found is None else found

    @property
    def processes(self) -> list[int]:
        """Process id, once the process has started."""
        return self._helper.pids

    def close(self) -> None:
        """Ends the process; the calling thread computes pending and later hashes."""
        self._failed = True
        self._helper.close()

    def _ask(self, call: list) -> tuple[str, ...] | None:
        if not self._started():
            return None
        answer = self._helper.call_process(call)
        if isinstance(answer, list):
            return tuple(answer)
        self._fails(f"has failed ({answer})")
        return None

    def _started(self) -> bool:
        """Whether the process accepts calls: its start takes seconds, and a waiting snapshot can be lost meanwhile."""
        if not self._begun:
            self._begun = self._helper.start()
        return self._helper.has_started()

    def _fails(self, how: str) -> None:
        self._failed = True
        self._helper.close()
        print_lines(
            warning(
                f"the process that hashes snapshots {how}: a thread of the worker hashes from now on, and training is "
                "about a percent slower. Fix: read the output of the process above",
                code="helper-lost",
            ),
            error=True,
            flush=True,
        )
