"""Defines the flags of policies, and the properties of a job that flags depend on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from moc.policy.errors import PolicyError

Asked = Any
"""All snapshot flags as attributes, with underscores: ``ckpt_tier``, ``persist_interval``, ..."""


@dataclass(frozen=True)
class PolicyFlag:
    """A flag of one policy, refused with any other.

    Attributes:
        name: name with underscores, beginning with the policy's name.
        kind: type of the value: ``bool`` for a switch, ``int``, ``float`` or ``str``.
        parse: parser of the value, raising ``ValueError``, if ``kind`` is not strict enough.
        metavar: name of the value in ``--help``.
        above: exclusive lower limit; the other limits are inclusive.
        chosen: ``--ckpt-policy auto`` chooses the value, so the two must not be combined.
        needs: the flag without which this one only limits the choices of ``auto``.
    """

    name: str
    value_type: type
    default: Any
    help: str
    choices: tuple[str, ...] | None = None
    parse: Callable[[Any], Any] | None = None
    metavar: str | None = None
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    chosen_by_auto: bool = False
    required_flag: str | None = None


@dataclass(frozen=True)
class JobShape:
    """Properties of the job that policies may use, in addition to flags.

    Attributes:
        ep: expert-parallel ranks.
        stages: pipeline stage of each layer.
        optimizer: ``adam`` or ``sgd``.
        experts_apart: each expert has its own parameters, so the optimizer can update it separately.
        pp: pipeline stages.
        num_experts: experts of a layer; 0 without experts.
        bubble_share: estimated share of forward and backward in the pipeline's bubbles; 0 where copies cannot be
            delayed until one.
        drops: experts drop tokens beyond their capacity, and are not padded to it.
        elastic: workers continue in the same processes, and the only tier is the disk.
    """

    ep: int = 1
    stages: tuple[int, ...] = ()
    optimizer: str = "adam"
    has_separate_experts: bool = True
    pp: int = 1
    num_experts: int = 0
    bubble_share: float = 0.0
    drops_tokens: bool = False
    is_elastic: bool = False

    @property
    def memory_remedy(self) -> str:
        """The remedy for a policy that needs snapshots in memory."""
        return "drop --elastic, which keeps none there" if self.is_elastic else "add --ckpt-tier memory or peers"


def number_or_auto(text: Any) -> str:
    """Parses ``auto`` or an integer of at least 1.

    Raises:
        ValueError: the text is neither.
    """
    text = str(text)
    if text != "auto" and not (text.isdecimal() and int(text) >= 1):
        raise PolicyError(
            f"{text!r} is no number of at least 1. Fix: set auto or a number of at least 1",
            code="value-unreadable",
        )
    return text


def gradient_obstacles(asked: Asked, job: JobShape, flag: str, alternative: str = "") -> Iterator[PolicyError]:
    """Yields the reasons why snapshots cannot have gradients in place of state.

    Args:
        asked: flags.
        job: the job to check.
        flag: the flag that asks for gradients, as the subject of the sentences.
        alternative: another remedy.
    """
    instead = f", or {alternative}" if alternative else ""
    if asked.ckpt_tier == "disk" or job.is_elastic:
        yield PolicyError(
            f"{flag} needs the gradients of each iteration in memory. Fix: {job.memory_remedy}{instead}",
            code="gradients-need-memory",
        )
    if job.optimizer != "adam":
        yield PolicyError(
            f"{flag} is for Adam, whose state is three times as large as a gradient, not {job.optimizer}. Fix: take "
            f"adam{instead}",
            code="gradients-need-adam",
        )
    if not job.has_separate_experts:
        yield PolicyError(
            f"{flag} needs a separate update of each expert. Fix: drop --moe-grouped-gemm{instead}",
            code="gradients-need-separate-experts",
        )


def bubble_share(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Returns the share of forward and backward that a stage waits, with the 1F1B schedule.

    A stage computes for ``micro_batches (t_f + t_b)`` and waits for ``t_bubble = (stages - 1) (t_f + t_b) / chunks``.
    ``t_f`` and ``t_b`` are the times of a micro batch on all chunks of a stage.

    Args:
        stages: pipeline stages.
        micro_batches: micro batches of an iteration.
        chunks: virtual stages of each worker (interleaved schedule).
    """
    bubble = (stages - 1) / chunks
    return bubble / (micro_batches + bubble)
