"""What workers of tests of copies in bubbles do: they copy slowly, and note what the gate lets pass when."""

from __future__ import annotations

import time

from megatron.pretraining.engine.schedule import Schedule
from megatron.pretraining.engine.step import Stepper
from moc.session import components
from moc.snapshot import device_copy
from moc.snapshot.device_copy import BubbleGate
from tests.integration import bodies


def slow_down_pieces(bytes_per_s: float) -> None:
    """Gives every piece of this process's copies no more than this bandwidth."""
    copy = device_copy._copy_all

    def slow(piece, non_blocking) -> None:
        time.sleep(sum(one.source.nbytes for one in piece) / bytes_per_s)
        copy(piece, non_blocking)

    device_copy._copy_all = slow


def train_watching_the_gate(flags: dict, bytes_per_s: float) -> dict:
    """As ``bodies.train``, with slow copies; also whether the gate was open, each as a set.

    Returns:
        ``computing``: when a micro batch was computed; ``voting``: when the vote began; ``updating``: when the update
        was next; and ``waits``, how often another stage was waited for in between.
    """
    slow_down_pieces(bytes_per_s)
    gates, seen, waits = [], {"computing": [], "voting": [], "updating": []}, []

    def noting(kind: type, name: str, when: str) -> None:
        method = getattr(kind, name)

        def noted(*args, **options):
            seen[when].append(gates[-1].is_open)
            return method(*args, **options)

        setattr(kind, name, noted)

    class Watched(BubbleGate):
        """Notes waits while it is closed."""

        def waiting(self):
            waits.extend([self] if not self.is_open else [])
            return super().waiting()

    def watched() -> BubbleGate:
        gates.append(Watched())
        return gates[-1]

    components.bubbles_on = lambda device: watched()
    noting(Schedule, "_one_micro_batch", "computing")
    noting(Stepper, "_all_reduce", "voting")
    noting(Stepper, "complete", "updating")
    told = bodies.train(flags) | {when: sorted(set(states)) for when, states in seen.items()}
    return told | {"waits": len(waits)}
