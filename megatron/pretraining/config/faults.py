"""Flags of fault injection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.pretraining.config.flag import FlagGroup, flag, refuse
from moc.faults import POINTS
from moc.runtime.inject import ACTIONS, Fault, faults_of, random_faults


def _texts(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    return tuple(str(fault) for text in texts for fault in faults_of(text))


@dataclass(frozen=True)
class FaultFlags(FlagGroup):
    """Injected faults: to see what a run survives."""

    inject: tuple[str, ...] | None = flag(
        None,
        f"""Faults, as in "kill rank=2 iteration=40 point=after_vote"; several as several words or with semicolons
        between them. Each begins with what happens: {"; ".join(f"{name}, {text}" for name, text in ACTIONS.items())}.
        Then whom: rank=N, ranks=N,N or node=N; since when: iteration=N; times=N if not once; and where, point=NAME:
        {"; ".join(f"{name}, {text}" for name, text in POINTS.items())}. Without a point it is start. In one job, each
        happens once, whatever is started again.""",
        type=_texts,
        nargs="+",
        metavar="FAULT",
    )
    inject_mtbf_iterations: float | None = flag(
        None, "Kill one to three random workers at a random point, every so many iterations on the average.", at_least=1
    )
    inject_seed: int = flag(0, "Seed of --inject-mtbf-iterations.")

    def planned(self, size: int, iterations: int) -> tuple[Fault, ...]:
        """All faults of a job with this many workers and iterations."""
        chosen = faults_of(";".join(self.inject or ()))
        if self.inject_mtbf_iterations is None:
            return chosen
        return chosen + random_faults(self.inject_mtbf_iterations, self.inject_seed, size, iterations)

    @property
    def wanted(self) -> bool:
        """Whether any fault is configured."""
        return bool(self.inject) or self.inject_mtbf_iterations is not None

    def validate(self) -> None:
        """Rejects a seed without random faults."""
        refuse(
            self.inject_seed and self.inject_mtbf_iterations is None,
            "--inject-seed needs --inject-mtbf-iterations: add it.",
        )
