"""Chooses how many experts to save, and how often, and explains the choice."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from moc.policy.pec_tuner import PecChoice, PecMeasurements
from moc.simulate.errors import SimulationError
from moc.simulate.tables import sentences

_MEASURED = {
    "forward_backward_s": "seconds of forward and backward of an iteration",
    "iteration_s": "seconds of an iteration",
    "snapshot_gbs": "GB/s from a rank's device to host memory",
    "persist_gbs": "GB/s that a rank gets to storage when all write",
    "restart_s": "seconds from a fault until training goes on",
    "mtbf_hours": "hours from one fault to the next, in the mean",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds ``--explain-k`` and the flags that it needs."""
    group = parser.add_argument_group("--explain-k: how many experts, and how often (MoC, sections 5.3 and 6.2.5)")
    group.add_argument("--explain-k", action="store_true", help="choose from what was measured, sharded by EE+AN")
    for name, text in _MEASURED.items():
        group.add_argument(_flag(name), type=float, metavar="X", help=text)
    group.add_argument("--plt-limit", type=float, metavar="P", help="most tokens that faults may lose, such as 0.0375")


def measured(args: argparse.Namespace, busiest: Mapping[int, int]) -> PecMeasurements:
    """Returns the measurements given by the flags, for bytes of the busiest rank by K.

    Raises:
        ValueError: a flag is missing or invalid.
    """
    missing = [_flag(name) for name in _MEASURED if getattr(args, name) is None]
    if missing:
        raise SimulationError(
            f"--explain-k needs {', '.join(missing)} too. Fix: add what was measured",
            code="flag-needs-another",
        )
    if not busiest:
        raise SimulationError(
            "--explain-k chooses numbers of experts. Fix: take a model that has some",
            code="model-without-experts",
        )
    if not args.mtbf_hours > 0:
        raise SimulationError(
            f"--mtbf-hours cannot be {args.mtbf_hours}. Fix: give a number above 0",
            code="value-out-of-range",
        )
    return PecMeasurements(
        busiest_rank_bytes=busiest,
        forward_backward_s=args.forward_backward_s,
        iteration_s=args.iteration_s,
        snapshot_bandwidth=1e9 * args.snapshot_gbs,
        persist_bandwidth=1e9 * args.persist_gbs,
        restart_s=args.restart_s,
        faults_per_iteration=args.iteration_s / (3600 * args.mtbf_hours),
    )


def explained(choice: PecChoice) -> list[str]:
    """Returns the choice, as lines."""
    return [
        f"K_snapshot {choice.k_snapshot}, K_persist {choice.k_persist}, a snapshot every {choice.interval} iterations",
        *sentences(choice.reason),
    ]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
