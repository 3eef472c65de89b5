"""Applies saved gradients in the background: MoEtion's asynchronous optimizer recomputation (section 5.2).

    each time that experts are carried from a node's snapshots:
        adopt the committed results of the background optimizer
        order: compare saved state with the result of its chain; apply the gradients of the longest chains

No gradients are applied before one comparison, on any node, has found equal bits.  A comparison that finds different
bits ends the mechanism.  All nodes receive both results with the commit all-reduces.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from moc.cli_output import print_lines
from moc.errors import with_code
from moc.recovery.expert_versions import Carrier
from moc.recovery.gradient_chains import Chain
from moc.recovery.gradient_folding import FoldOutcome
from moc.runtime.helper_process import HelperError, HelperProcess
from moc.store.errors import CheckpointError

LEAST = 4
"""Minimum length of a chain whose gradients are applied: one read and write of its base serves all of them."""
SHARE = 4
"""Inverse share of the chains in one order: meanwhile memory has both bases of each."""
_DIES = 3
_COUNTS = ("folded", "gradients", "equal", "differing", "seconds")


class Folds:
    """This node's background optimizer and its results; inactive on workers that do not lead their node."""

    def __init__(self):
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot-fold")
        self._helper = HelperProcess("moc.session.folder", {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
        self._under_way: dict[str, Future[FoldOutcome]] = {}
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
        compare, fold = carrier.to_compare(), carrier.to_fold(LEAST) if self._trusted else []
        fold = fold[: -(-len(fold) // SHARE)]
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

    def _order(self, memory: str, compare: list[Chain], fold: list[Chain]) -> FoldOutcome:
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
        return FoldOutcome(**answer)

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
