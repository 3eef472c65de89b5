"""Starts the process that carries experts (:mod:`moc.session.carrier`), and calls it from the worker."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterable
from dataclasses import asdict
from typing import Any

from moc.recovery.carrying import Carrier
from moc.recovery.chains import Chain
from moc.recovery.sources import AvailableCheckpoint
from moc.runtime.helper_process import HelperError, HelperProcess
from moc.state.operators import Operator
from moc.store.errors import CheckpointError
from moc.store.store import Store


class Carriers:
    """Client of this worker's process that carries experts; starts it on demand, and again if it has died."""

    def __init__(self):
        self._helper, self._calling = HelperProcess("moc.session.carrier"), threading.Lock()
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

    Methods raise CheckpointError like :class:`~moc.recovery.carrying.Carrier`, and also if the process has died.
    """

    def __init__(self, carriers: Carriers, store: Store, experts: Iterable[Operator]):
        experts = list(experts)
        super().__init__(store, experts)
        claim = store.place.claim
        self.described = {"claim": claim and asdict(claim), "experts": [asdict(one) for one in experts]}
        self._carriers = carriers

    def carry(
        self,
        coming: AvailableCheckpoint | None = None,
        copied: Collection[str] | None = None,
        compared: frozenset[str] = frozenset(),
    ) -> int:
        """See :class:`~moc.recovery.carrying.Carrier`."""
        plain = (0, {}) if coming is None else (coming.iteration, dict(coming.operators))
        names = None if copied is None else sorted(copied)
        return self._carriers.call(self, "carry", coming=plain, copied=names, compared=sorted(compared))

    def drop(self, upto: int) -> None:
        """See :class:`~moc.recovery.carrying.Carrier`."""
        self._carriers.call(self, "drop", upto=upto)

    def to_compare(self) -> list[Chain]:
        """See :class:`~moc.recovery.carrying.Carrier`."""
        return [Chain(*chain) for chain in self._carriers.call(self, "to_compare")]

    def to_fold(self, least: int) -> list[Chain]:
        """See :class:`~moc.recovery.carrying.Carrier`."""
        return [Chain(*chain) for chain in self._carriers.call(self, "to_fold", least=least)]

    def is_compared(self, experts: Collection[str]) -> None:
        """See :class:`~moc.recovery.carrying.Carrier`."""
        self._carriers.call(self, "is_compared", experts=sorted(experts))

    def compares_no_more(self) -> None:
        """See :class:`~moc.recovery.carrying.Carrier`."""
        if self.compares:
            self.compares = False
            self._carriers.call(self, "compares_no_more")

    def adopt(self) -> list[str]:
        """See :class:`~moc.recovery.carrying.Carrier`."""
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
