"""Measures and reports the cost of snapshots.

:class:`Meter` averages the times of an iteration over workers by the commit all-reduce.  Policies adapt to them.
:class:`SnapshotReport` writes events during training, and a summary at its end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from moc.background import Harmless, Trouble
from moc.cli_output import counted
from moc.errors import cause_of, warning
from moc.policy import ObservedIteration, Policy, Transfer
from moc.policy.token_ledger import TokenDebt
from moc.session.engine import Listener
from moc.session.settings import Settings
from moc.session.tokens import TokenTracker
from moc.store.host_memory import ReservedMemory

_REPORTED_S = 1e-4  # shorter stalls are counted, but not reported


class Meter:
    """Measurement of consecutive iterations, in seconds.

    Args:
        size: number of workers.
        waited: returns the time that this worker waited for other stages; called once per iteration.
    """

    def __init__(self, size: int, waited: Callable[[], float] = float):
        self._size, self._waited = size, waited
        # of this worker, until the next commit all-reduce
        self._iteration_s = self._stall_s = self._compute_s = self._bubble_s = 0.0
        self._started = self._busy = False
        self._started_at = self._reduced_at = time.perf_counter()
        self._received = ObservedIteration(0.0)  # means over workers since the last iteration
        self._observed: ObservedIteration | None = None  # complete measurements of an iteration

    def completed(self, start: float) -> ObservedIteration | None:
        """Records the end of an iteration that began at ``start`` (``time.perf_counter``).

        Returns:
            The measurements of the previous iteration, if known and not returned yet.
        """
        self._started_at, self._compute_s = start, max(0.0, self._reduced_at - start)
        self._bubble_s = self._waited()
        observed, self._observed = self._observed, None
        return observed

    def on_iteration_end(self, started: bool, busy: bool) -> None:
        """Records the end of all work of the iteration, and whether a snapshot ``started`` or is pending (``busy``)."""
        self._started, self._busy = started, busy
        self._iteration_s = time.perf_counter() - self._started_at

    @contextlib.contextmanager
    def stalling(self) -> Iterator[None]:
        """Context of training's waits for snapshots."""
        start = time.perf_counter()
        yield
        self._stall_s += time.perf_counter() - start

    def contribution(self) -> dict[str, float]:
        """Returns this worker's times; see :class:`moc.session.engine.CommitParticipant`."""
        stall_s, self._stall_s = self._stall_s, 0.0
        return {
            "snapshot_stall_s": stall_s,
            "snapshot_iteration_s": self._iteration_s,
            "snapshot_compute_s": self._compute_s,
            "snapshot_bubble_s": self._bubble_s,
        }

    def reduced(self) -> None:
        """Records that an iteration's gradients are reduced and its commit all-reduce is over."""
        self._reduced_at = time.perf_counter()

    def receive(self, totals: Mapping[str, float]) -> float:
        """Receives the totals of any all-reduce, regular or extra; returns the mean stall since the last one."""
        stall_s = totals["snapshot_stall_s"] / self._size
        self._received = dataclasses.replace(self._received, stall_s=self._received.stall_s + stall_s)
        return stall_s

    def copied(self, totals: Mapping[str, float]) -> None:
        """Records that all workers have copied a snapshot."""
        self._received = dataclasses.replace(
            self._received,
            copied=self._mean(totals, "snapshot_bytes", "snapshot_copy_s"),
            gradients_s=totals["snapshot_gradients_s"] / self._size,
        )

    def replicated(self, amount: int, seconds: float, nodes: int) -> None:
        """Records that all nodes have a snapshot's copies: ``amount`` bytes over all nodes, ``seconds`` per node."""
        self._received = dataclasses.replace(self._received, replicated=Transfer(amount / nodes, seconds))

    def written(self, totals: Mapping[str, float]) -> None:
        """Records that all workers have written a snapshot to storage."""
        written = self._mean(totals, "snapshot_written_bytes", "snapshot_write_s")
        self._received = dataclasses.replace(self._received, written=written)

    def trained(self, totals: Mapping[str, float]) -> float | None:
        """Receives the totals after an iteration; returns its mean time in seconds.

        None for the first iteration, which allocates memory and connects.
        """
        if not totals["snapshot_iteration_s"]:
            return None
        self._observed = dataclasses.replace(
            self._received,
            iteration_s=totals["snapshot_iteration_s"] / self._size,
            snapshot_started=self._started,
            snapshot_pending=self._busy,
            forward_backward_s=totals["snapshot_compute_s"] / self._size,
            bubble_s=totals["snapshot_bubble_s"] / self._size,
        )
        self._received = ObservedIteration(0.0)
        return self._observed.iteration_s

    def _mean(self, totals: Mapping[str, float], amount: str, seconds: str) -> Transfer:
        return Transfer(totals[amount] / self._size, totals[seconds] / self._size)


def _harmless(method: Callable[..., None]) -> Callable[..., None]:
    """Wraps a method of a report so that its errors do not end training."""

    @functools.wraps(method)
    def reporting(self: SnapshotReport, *args, **kwargs) -> None:
        with self.harmless():
            method(self, *args, **kwargs)

    return reporting


class SnapshotReport:
    """Counts of snapshots and their cost; times are means over workers."""

    def __init__(self, log: Listener, tier: str):
        self._log, self._tier = log, tier
        self.harmless = Harmless(log.message, "a report of snapshots", "training continues")
        self._count = self._bytes = 0
        self._stall_s = self._training_s = 0.0
        self._chosen: Mapping[str, float] | None = None
        self._has_warned_of_differences = False
        self._has_warned = False
        self._bubble_bytes = 0
        self.gauges: dict[str, float] = {}
        """Gauges of copies in the pipeline's bubbles; empty without bubbles."""
        self._boosted = False
        self._memory_short, self._copies_short = Trouble(), Trouble()

    @_harmless
    def trained(self, seconds: float, bubble_s: float) -> None:
        """Adds the time of an iteration, including all stalls, and its part in the pipeline's bubbles."""
        self._training_s += seconds
        if bubble_s:
            self.gauges["bubble_s"] = bubble_s

    @_harmless
    def stalled(self, newest: int | None, seconds: float) -> None:
        """Adds a stall of training, of 0 or more seconds; ``newest`` is the last started snapshot."""
        self._stall_s += seconds
        if seconds > _REPORTED_S:
            self._log.events.write("stall", iteration=newest, cause="snapshot", seconds=seconds)

    @_harmless
    def expected(self, policy: Policy, settings: Settings) -> None:
        """Reports once, before training, the expected cost of a fault under the given flags."""
        in_memory = settings.tier != "disk"
        persists = not in_memory or settings.persist_interval is not None
        if (cost := policy.report.fault_cost(settings.train_iters, in_memory, persists)) is None:
            return
        text, fields = cost
        self._log.message(text)
        self._log.events.write("expected", **fields)

    @_harmless
    def reserved(self, memory: ReservedMemory) -> None:
        """Reports once, before training, the host memory that snapshots take."""
        self._log.message(memory.describe())
        self._log.events.write("memory", **dataclasses.asdict(memory))

    @_harmless
    def not_reserved(self, iteration: int, reason: str) -> None:
        """Reports that a node has too little memory for the snapshots of a new generation."""
        self._log.events.write("memory_short", iteration=iteration, reason=reason)
        self._log.message(
            f"WARNING: memory for snapshots is not reserved ({reason}). Training continues, and abandons snapshots and "
            "copies that do not fit [memory-full]"
        )

    @_harmless
    def window_limited(self, iteration: int, requested: int, length: int) -> None:
        """Reports that memory limits the length of windows; warns once for each limit."""
        self._log.events.write("window_limited", iteration=iteration, wanted=requested, length=length)
        problem = (
            f"a window of {requested} iterations does not fit into the memory for snapshots, and windows have {length}"
        )
        fix = "free memory, enlarge the file system (Docker: --shm-size), or name another one with --ckpt-memory-dir"
        self._log.message(warning(f"{problem}. Fix: {fix}", code="memory-full"))

    @_harmless
    def chosen(self, iteration: int, policy: Policy) -> None:
        """Reports the choice of a policy, if it is new."""
        if (reason := policy.report.reason()) is None or (chosen := policy.report.chosen()) == self._chosen:
            return
        self._chosen = chosen
        values = ", ".join(f"{name} {value}" for name, value in chosen.items())
        self._log.message(f"--ckpt-policy {policy.name} has chosen {values}: {reason}")
        self._log.events.write("choice", iteration=iteration, **chosen, reason=reason)

    @_harmless
    def at_risk(self, iteration: int, policy: Policy, tokens: TokenTracker, train_iters: int) -> None:
        """Warns once if the next fault would lose too many tokens."""
        if self._has_warned or (risk := policy.report.at_risk(tokens.plt_of_training, max(1, train_iters))) is None:
            return
        self._has_warned = True
        text, fields = risk
        self._log.message(f"WARNING: {text}")
        self._log.events.write("at_risk", iteration=iteration, **fields)

    @_harmless
    def boost(self, iteration: int, debt: TokenDebt | None) -> None:
        """Reports that experts start, or stop, to compensate lost tokens."""
        boosted = debt is not None and debt.left > 0
        if debt is None or boosted == self._boosted:
            return
        self._boosted = boosted
        tokens, compensated = debt.totals
        remaining = f"; they have {debt.left} iterations left for it" if boosted else ""
        self._log.message(f"experts have made up {compensated} of {tokens} lost tokens by more capacity{remaining}")
        fields = dict(boosted=boosted, tokens=tokens, made_up=compensated, left=debt.left)
        self._log.events.write("boost", iteration=iteration, **fields)

    @_harmless
    def snapshot(self, iteration: int, totals: Mapping[str, float], workers: int) -> None:
        """Reports a copied snapshot from the totals over all workers."""
        amount, in_bubbles = int(totals["snapshot_bytes"]), int(totals["snapshot_bubble_bytes"])
        self._count += 1
        self._bytes += amount
        self._bubble_bytes += in_bubbles
        if in_bubbles:
            self.gauges["bubble_share"] = in_bubbles / amount
        self._log.events.write(
            "snapshot",
            iteration=iteration,
            tier=self._tier,
            bytes=amount,
            copy_s=totals["snapshot_copy_s"] / workers,
            hash_s=totals["snapshot_seal_s"] / workers,
            **({"bubble_bytes": in_bubbles} if in_bubbles else {}),
        )

    @_harmless
    def abandoned(self, iteration: int, reason: str) -> None:
        """Reports that a worker lacked memory for a snapshot; warns at most once a minute."""
        self._log.events.write("abandoned", iteration=iteration, reason=reason)
        if self._memory_short.failed():
            self._log.message(
                warning(
                    f"the snapshot of iteration {iteration} is abandoned ({cause_of(reason)}). The one before it "
                    "stays, and training continues. Fix: free memory, or name a larger file system with "
                    "--ckpt-memory-dir",
                    code="snapshot-abandoned",
                )
            )

    @_harmless
    def replicated(self, iteration: int, amount: int, identical: int, seconds: float) -> None:
        """Reports that all copies of a snapshot are complete: bytes over all nodes, and mean seconds of a node.

        ``identical`` further bytes were not sent, because the receiving nodes have identical replicas.
        """
        not_sent = {"not_sent_bytes": identical} if identical else {}
        self._log.events.write("replicate", iteration=iteration, bytes=amount, **not_sent, replicate_s=seconds)

    @_harmless
    def copies_missing(self, iteration: int, reasons: Sequence[str]) -> None:
        """Reports that nodes lack memory for copies; warns at most once a minute."""
        for reason in reasons:
            self._log.events.write("copy_missing", iteration=iteration, reason=reason)
        if self._copies_short.failed():
            self._log.message(
                warning(
                    f"the snapshot of iteration {iteration} has {counted(len(reasons), 'copy')} less "
                    f"({cause_of(reasons[0])}). Fix: free memory, or keep fewer copies with --replicas",
                    code="copies-missing",
                )
            )

    @_harmless
    def retried(self, iteration: int, writes: int) -> None:
        """Reports that writes of a snapshot to storage failed, and succeeded when they were repeated."""
        self._log.events.write("save_retried", iteration=iteration, writes=writes)

    @_harmless
    def replicas_differ(self, iteration: int, reasons: Sequence[str]) -> None:
        """Reports nodes whose replicas are not identical, so that the state was sent; warns the first time."""
        for reason in reasons:
            self._log.events.write("not_alike", iteration=iteration, reason=reason)
            if not self._has_warned_of_differences:
                self._log.message(f"WARNING: {reason}")
        self._has_warned_of_differences = True

    @_harmless
    def background_updates(self, iteration: int, totals: Mapping[str, float]) -> None:
        """Reports the results of all background optimizers since the last report."""
        fields = {name: int(totals[name]) for name in ("folded", "gradients", "equal", "differing")}
        self._log.events.write("fold", iteration=iteration, **fields, seconds=totals["seconds"])
        differing = fields["differing"]
        if differing:
            self._log.message(
                warning(
                    "applying gradients in the background does not reproduce the bits of training for "
                    f"{differing} experts, so recoveries apply all gradients from now on. Fix: choose "
                    "--selective-fold recovery",
                    code="fold-differs",
                )
            )

    @_harmless
    def end(self, tokens: TokenTracker | None) -> None:
        """Reports the totals at the end of the run, and the lost tokens if snapshots are partial."""
        if not self._count:
            return
        share = self._stall_s / self._training_s if self._training_s else 0.0
        self._log.message(
            f"snapshots: {self._count} taken, {self._bytes / self._count / 1e9:.3g} GB each; "
            f"training waited {self._stall_s:.2f} s for them, {share:.2%} of its time"
            + (f"; {self._bubble_bytes / self._bytes:.2%} copied in bubbles" if self._bubble_bytes else "")
        )
        if tokens is not None:
            layers = ", ".join(f"{plt:.3%} in layer {layer}" for layer, plt in tokens.plt_by_layer.items() if plt)
            self._log.message(
                f"experts have lost {tokens.plt:.3%} of their tokens to faults" + (f": {layers}" if layers else "")
            )
