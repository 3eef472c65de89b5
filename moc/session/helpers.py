"""Clients of a worker's background processes (:mod:`moc.session.node_service`).

* One retains the states of experts from older snapshots in memory (:mod:`moc.recovery.expert_versions`).
* One applies saved gradients: MoEtion's asynchronous optimizer recomputation (section 5.2).

      each time that experts of a node's snapshots are retained:
          install the committed results of the background optimizer
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
from moc.recovery.expert_versions import ExpertVersions
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
_MAX_FAILURES = 3
_COUNTS = ("folded", "gradients", "equal", "differing", "seconds")

NextSnapshot = tuple[AvailableCheckpoint, Mapping[str, Detail], frozenset[str]]
"""A snapshot, its operators that other nodes receive copies of, and its operators with both state and gradients."""

_warned: set[str] = set()

Spans = Sequence[tuple[int, int]]


class BackgroundOptimizer:
    """This node's background optimizer and its results; inactive on workers that do not lead their node."""

    def __init__(self):
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot-fold")
        self._helper = HelperProcess(MODULE, FOLD, env={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
        self._pending: dict[str, Future[UpdateOutcome]] = {}
        self._results: dict[str, float] = defaultdict(float)
        self._changing = threading.Lock()
        self._is_verified = self._is_disabled = False
        self._failures = 0
        self._seconds = 0.0  # not reported yet, over all nodes

    @property
    def processes(self) -> list[int]:
        """Id of the background optimizer, once it has started."""
        return self._helper.pids

    def install_results(self, versions: ExpertVersions) -> None:
        """Installs the background optimizer's committed results for the snapshots of ``versions``.

        Raises:
            CheckpointError, OSError: the results cannot be read or written.
        """
        versions.is_comparing |= not self._is_disabled
        future = self._pending.get(versions.name)
        if future is None or not future.done():
            return
        del self._pending[versions.name]
        try:
            outcome = future.result()
        except (CheckpointError, OSError) as error:
            self._on_failure(error)
            return
        self._failures = 0
        versions.on_compared([*outcome.equal, *outcome.differing, *outcome.superseded])
        if outcome.why:
            problem = f"gradients cannot be folded ({outcome.why})"
            self._disable(CheckpointError(f"{problem}. Fix: keep Adam's state in fp32", code="folding-unsupported"))
        installed = versions.install_bases() if self._is_verified and not self._is_disabled and outcome.folded else []
        with self._changing:
            self._results["folded"] += len(installed)
            self._results["gradients"] += outcome.gradients if installed else 0
            self._results["equal"] += len(outcome.equal)
            self._results["differing"] += len(outcome.differing)

    def submit_next(self, versions: ExpertVersions) -> None:
        """Sends the background optimizer its next order for these snapshots, unless it is busy with them."""
        if self._is_disabled:
            versions.stop_comparing()
            return
        if versions.name in self._pending:
            return
        compare, apply = (
            versions.chains_to_compare(),
            versions.chains_to_apply(LEAST_GRADIENTS) if self._is_verified else [],
        )
        apply = apply[: -(-len(apply) // CHAINS_PER_ORDER)]
        if compare or apply:
            self._pending[versions.name] = self._thread.submit(self._order, versions.name, compare, apply)

    def contribution(self) -> dict[str, float]:
        """Returns the results since the last call; the names are identical on all workers."""
        with self._changing:
            results, self._results = self._results, defaultdict(float)
        return {f"fold_{name}": results[name] for name in _COUNTS}

    def on_totals(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Receives the results of all nodes; returns the values to report, if any."""
        results = {name: totals[f"fold_{name}"] for name in _COUNTS}
        self._is_verified |= results["equal"] > 0
        self._is_disabled |= results["differing"] > 0
        self._seconds += results["seconds"]
        if not any(results[name] for name in ("folded", "equal", "differing")):
            return {}
        results["seconds"], self._seconds = self._seconds, 0.0
        return results

    def close(self) -> None:
        """Ends the background optimizer; nothing is written afterwards."""
        self._is_disabled = True
        self._helper.close()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _order(self, memory: str, compare: list[Chain], apply: list[Chain]) -> UpdateOutcome:
        start = time.perf_counter()
        try:
            self._helper.start()  # on this thread, since the process dies with the thread that starts it
            answer = self._helper.call_process({"memory": memory, "compare": compare, "fold": apply})
        except HelperError as error:
            raise CheckpointError(
                f"the process that folds gradients {error}. Fix: read its output above; it starts again with the next "
                "snapshot",
                code="helper-lost",
            ) from None
        with self._changing:
            self._results["seconds"] += time.perf_counter() - start
        return UpdateOutcome(**answer)

    def _on_failure(self, error: Exception) -> None:
        self._failures += 1
        if self._failures >= _MAX_FAILURES:
            self._disable(error)

    def _disable(self, error: Exception) -> None:
        if not self._is_disabled:
            self._is_disabled = True
            print_lines(
                "WARNING: gradients of experts are no longer folded during training, and a recovery repeats their "
                f"updates: {with_code(error)}",
                error=True,
                flush=True,
            )


class RetentionClient:
    """Client of this worker's process that retains experts; starts it on demand, and again if it has died."""

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

    def call(self, versions: RemoteExpertVersions, method: str, **arguments: Any) -> Any:
        """Calls a method of :class:`ExpertVersions` in the process; returns its result as JSON values.

        Raises:
            CheckpointError: the call failed, or the process died or does not answer.
        """
        with self._calling:
            self._start()
            if versions.name not in self._opened:
                self._call_process(versions, "open", versions.described)
                self._opened.add(versions.name)
            return self._call_process(versions, method, arguments)

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

    def _call_process(self, versions: RemoteExpertVersions, method: str, arguments: dict[str, Any]) -> Any:
        with _as_checkpoint_error():
            reply = self._helper.call_process(
                {"memory": versions.name, "compares": versions.is_comparing, "does": method, "given": arguments}
            )
        if "error" in reply:
            raise CheckpointError(reply["error"])
        return reply["value"]


class RemoteExpertVersions(ExpertVersions):
    """Expert versions whose slow operations run in another process; fast ones run in this process.

    Methods raise CheckpointError as in the base class, and if the process has died.
    """

    def __init__(self, client: RetentionClient, store: Store, experts: Iterable[Operator]):
        experts = list(experts)
        super().__init__(store, experts)
        claim = store.storage.claim
        self.described = {"claim": claim and asdict(claim), "experts": [asdict(operator) for operator in experts]}
        self._client = client

    def retain(
        self,
        snapshot: AvailableCheckpoint | None = None,
        copied: Collection[str] | None = None,
        compared: frozenset[str] = frozenset(),
    ) -> int:
        plain = (0, {}) if snapshot is None else (snapshot.iteration, dict(snapshot.operators))
        names = None if copied is None else sorted(copied)
        return self._client.call(self, "retain", coming=plain, copied=names, compared=sorted(compared))

    def remove_outdated(self, upto: int) -> None:
        self._client.call(self, "remove_outdated", upto=upto)

    def chains_to_compare(self) -> list[Chain]:
        return [Chain(*chain) for chain in self._client.call(self, "chains_to_compare")]

    def chains_to_apply(self, least: int) -> list[Chain]:
        return [Chain(*chain) for chain in self._client.call(self, "chains_to_apply", least=least)]

    def on_compared(self, experts: Collection[str]) -> None:
        self._client.call(self, "on_compared", experts=sorted(experts))

    def stop_comparing(self) -> None:
        if self.is_comparing:
            self.is_comparing = False
            self._client.call(self, "stop_comparing")

    def install_bases(self) -> list[str]:
        return self._client.call(self, "install_bases")


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
    return [operator for operator in policy.operators if operator.expert is not None and not recovers_exactly(policy)]


class ExpertRetention:
    """Retains experts of this node's snapshots in the background; inactive on workers that do not lead the node.

    With ``optimizer``, the gradients of their chains are applied in the background.
    """

    def __init__(
        self, tiers: Tiers, policy: Policy, client: RetentionClient, optimizer: BackgroundOptimizer | None = None
    ):
        self._optimizer, self._client = optimizer, client
        memory, experts = tiers.memory if tiers.leads_node else None, experts_of(policy)
        self._versions = RemoteExpertVersions(client, memory, experts) if memory is not None and experts else None
        self._memory, self._before = memory, None if memory is None else tiers.before
        self._committed, self._durable = threading.Condition(), 0
        self._waits_for: int | None = None
        self._newest: int | None = None
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot-carry")

    @property
    def processes(self) -> list[int]:
        """Ids of the processes that retain experts and apply gradients."""
        return self._client.processes + (self._optimizer.processes if self._optimizer is not None else [])

    def begin(self, plan: SnapshotPlan) -> Future | None:
        """Starts to copy the experts that a snapshot lacks out of earlier snapshots, once these are committed.

        Returns:
            A future, done when the snapshot may supersede the earlier ones; None if there is nothing to retain.
        """
        if self._versions is None:
            return None
        with contextlib.suppress(CheckpointError):  # retain_experts() warns, and retries
            self._client.start()
        before, self._waits_for = self._waits_for, plan.iteration
        details = {name: detail.value for name, detail in plan.operators.items()}
        snapshot = AvailableCheckpoint(plan.iteration, MEMORY, details)
        return self._thread.submit(
            self._retain, self._versions, (snapshot, plan.remote_plan.operators, plan.compared), before
        )

    def committed(self, iteration: int) -> None:
        """Records that this node's part of a snapshot is committed in its memory."""
        with self._committed:
            self._newest = iteration
            self._committed.notify_all()

    def abandoned(self, iteration: int) -> None:
        """Deletes experts retained for a snapshot that will not be committed: they may not suffice for the next one.

        Raises:
            CheckpointError, OSError: a manifest cannot be written.
        """
        if self._versions is not None:
            self._versions.delete()
        self.committed(iteration)

    def release_before(self, iteration: int) -> None:
        """Reduces snapshots before a durable one to their retained experts, and clears superseded memory.

        Raises:
            CheckpointError, OSError: an older snapshot cannot be reduced.
        """
        self._durable = iteration
        if self._versions is not None:
            self._versions.retire(iteration)
        elif self._memory is not None:
            for older in (one for one in self._memory.iterations() if one < iteration):
                self._memory.remove(older)
        if self._memory is not None and self._before is not None and self._before.iterations():  # now superseded
            self._memory.storage.check_owner()
            self._before.remove_all()

    def close(self) -> None:
        """Abandons pending work."""
        with self._committed:
            self._closed = True
            self._committed.notify_all()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _retain(self, versions: ExpertVersions, snapshot: NextSnapshot, before: int | None) -> None:
        with self._committed:
            self._committed.wait_for(lambda: self._closed or before in (None, self._newest))
            if self._closed:
                return
        retain_experts(versions, self._durable, self._optimizer, *snapshot)


def retain_experts(
    versions: ExpertVersions,
    durable: int,
    optimizer: BackgroundOptimizer | None = None,
    snapshot: AvailableCheckpoint | None = None,
    copied: Collection[str] | None = None,
    compared: frozenset[str] = frozenset(),
) -> None:
    """Removes retained experts that a newer snapshot has, and retains the experts that the next snapshot lacks.

    ``snapshot`` is described as for :meth:`ExpertVersions.retain`; by default, it is the newest stored snapshot.
    ``durable`` is the iteration of the newest durable one.  ``optimizer`` applies the gradients of chains, if wanted.
    """
    try:
        if optimizer is not None:
            optimizer.install_results(versions)
        versions.remove_outdated(durable)
        versions.retain(snapshot, copied, compared)
        if optimizer is not None:
            optimizer.submit_next(versions)
    except (CheckpointError, OSError) as error:
        if versions.name not in _warned:
            _warned.add(versions.name)
            print_lines(
                warning(
                    f"experts of older snapshots cannot be kept in {versions.name} ({cause_of(error)}), and are read "
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
        self._was_started = self._failed = False

    def digests(self, buffer: HostBuffer, spans: Spans) -> tuple[str, ...]:
        """Returns the hashes of spans of a buffer, each of bytes [start, stop)."""
        hashes = None
        if buffer.path is not None and not self._failed:
            try:
                hashes = self._call([str(buffer.path), buffer.nbytes, spans])
            except HelperError as error:
                if not self._failed:
                    self._disable(str(error))
        return hashed(buffer, spans) if hashes is None else hashes

    @property
    def processes(self) -> list[int]:
        """Process id, once the process has started."""
        return self._helper.pids

    def close(self) -> None:
        """Ends the process; the calling thread computes pending and later hashes."""
        self._failed = True
        self._helper.close()

    def _call(self, call: list) -> tuple[str, ...] | None:
        if not self._started():
            return None
        reply = self._helper.call_process(call)
        if isinstance(reply, list):
            return tuple(reply)
        self._disable(f"has failed ({reply})")
        return None

    def _started(self) -> bool:
        """Whether the process accepts calls: its start takes seconds, and a waiting snapshot can be lost meanwhile."""
        if not self._was_started:
            self._was_started = self._helper.start()
        return self._helper.has_started()

    def _disable(self, reason: str) -> None:
        self._failed = True
        self._helper.close()
        print_lines(
            warning(
                f"the process that hashes snapshots {reason}: a thread of the worker hashes from now on, and training "
                "is about a percent slower. Fix: read the output of the process above",
                code="helper-lost",
            ),
            error=True,
            flush=True,
        )
