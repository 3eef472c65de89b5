"""Defines the flags of fault injection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.pretraining.config.flag import FlagGroup, Problems, flag
from moc.faults import POINTS
from moc.runtime.fault_injection import ACTIONS, Fault, parse_faults, random_faults


def _texts(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    return tuple(str(fault) for text in texts for fault in parse_faults(text))


@dataclass(frozen=True)
class FaultFlags(FlagGroup):
    """Injected faults: tests of what a run survives."""

    inject: tuple[str, ...] | None = flag(
        None,
        f"""Faults such as "kill rank=2 iteration=40 point=after_vote"; several are separate words, or separated by
        semicolons. First the action: {"; ".join(f"{name}, {text}" for name, text in ACTIONS.items())}.
        Then its target: rank=N, ranks=N,N or node=N; the first iteration: iteration=N; the number of times: times=N
        (default 1); and the point (default start): point=NAME:
        {"; ".join(f"{name}, {text}" for name, text in POINTS.items())}. Each happens once in a job, restarts
        included.""",
        type=_texts,
        nargs="+",
        metavar="FAULT",
    )
    inject_mtbf_iterations: float | None = flag(
        None, "Mean iterations between random faults; each kills one to three workers at a random point.", limits=">= 1"
    )
    inject_seed: int = flag(0, "Random seed of --inject-mtbf-iterations.")

    def planned(self, size: int, iterations: int) -> tuple[Fault, ...]:
        """Returns all faults of a job with this many workers and iterations."""
        chosen = parse_faults(";".join(self.inject or ()))
        if self.inject_mtbf_iterations is None:
            return chosen
        return chosen + random_faults(self.inject_mtbf_iterations, self.inject_seed, size, iterations)

    @property
    def wanted(self) -> bool:
        """Whether any fault is configured."""
        return bool(self.inject) or self.inject_mtbf_iterations is not None

    def validate(self, problems: Problems) -> None:
        """Rejects a seed without random faults."""
        self.needs(problems, "inject_seed", "inject_mtbf_iterations")
