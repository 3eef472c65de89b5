"""Defines the flags of policies, their conflicts, and the properties of a job that flags depend on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from moc.policy.errors import PolicyError

FlagValues = Any
"""All snapshot flags as attributes, with underscores: ``ckpt_tier``, ``persist_interval``, ..."""


@dataclass(frozen=True)
class PolicyFlag:
    """A flag of one policy, refused with any other.

    Attributes:
        name: name with underscores, beginning with the policy's name.
        value_type: type of the value: ``bool`` for a switch, ``int``, ``float`` or ``str``.
        parse: parser of the value, raising ``ValueError``, if ``value_type`` is not strict enough.
        metavar: name of the value in ``--help``.
        above: exclusive lower limit; the other limits are inclusive.
        chosen_by_auto: ``--ckpt-policy auto`` chooses the value, so the two must not be combined.
        required_flag: the flag without which this one only limits the choices of ``auto``.
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
        has_separate_experts: each expert has its own parameters, so the optimizer can update it separately.
        pp: pipeline stages.
        num_experts: experts of a layer; 0 without experts.
        bubble_share: estimated share of forward and backward in the pipeline's bubbles; 0 where copies cannot be
            delayed until one.
        drops_tokens: experts drop tokens beyond their capacity, and are not padded to it.
        is_elastic: workers continue in the same processes, and the only tier is the disk.
        offloads_optimizer: the optimizer's state is in host memory, where other kernels update it.
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
    offloads_optimizer: bool = False


@dataclass(frozen=True)
class FlagConflict:
    """A combination of flags that a policy refuses.

    Attributes:
        applies: whether these flags have the conflict.
        message: failure, cause and remedy: a sentence, or a function of the flags.
        code: stable code of the error.
    """

    applies: Callable[[FlagValues], bool]
    message: str | Callable[[FlagValues], str]
    code: str = PolicyError.code

    def error(self, flags: FlagValues) -> PolicyError:
        """Returns the error for these flags."""
        return PolicyError(self.message if isinstance(self.message, str) else self.message(flags), code=self.code)


def every_iteration(policy: str) -> FlagConflict:
    """Returns the conflict of a policy that requires a snapshot in every iteration with other intervals."""
    return FlagConflict(
        lambda flags: flags.snapshot_interval not in ("auto", "1"),
        lambda flags: (
            f"--ckpt-policy {policy} requires a snapshot in every iteration, not in every {flags.snapshot_interval}th. "
            "Fix: drop --snapshot-interval"
        ),
        code="snapshot-interval-fixed",
    )


@dataclass(frozen=True)
class JobRequirement:
    """A requirement of flags that a job may not meet.

    Attributes:
        is_unmet: whether the job does not meet the requirement of these flags.
        message: as in :class:`FlagConflict`; a function has the flags and the job.
        code: stable code of the error.
    """

    is_unmet: Callable[[FlagValues, JobShape], bool]
    message: str | Callable[[FlagValues, JobShape], str]
    code: str = PolicyError.code

    def error(self, flags: FlagValues, job: JobShape) -> PolicyError:
        """Returns the error for these flags and this job."""
        return PolicyError(self.message if isinstance(self.message, str) else self.message(flags, job), code=self.code)


class PolicyFlags:
    """Flags of a policy, and their requirements; without state.

    Attributes:
        specs: the policy's own flags; listed in ``--help``, refused with other policies.
        conflicts: combinations of flags that the policy refuses.
        requirements: requirements of the job. Two fields of the job are not known yet: ``stages`` and ``bubble_share``.
    """

    specs: ClassVar[tuple[PolicyFlag, ...]] = ()
    conflicts: ClassVar[tuple[FlagConflict, ...]] = ()
    requirements: ClassVar[tuple[JobRequirement, ...]] = ()

    def conflicts_in(self, flags: FlagValues) -> Iterator[PolicyError]:
        """Yields an error for each conflict of these flags."""
        yield from (conflict.error(flags) for conflict in self.conflicts if conflict.applies(flags))

    def unmet_requirements(self, flags: FlagValues, job: JobShape) -> Iterator[PolicyError]:
        """Yields an error for each requirement of these flags that the job does not meet."""
        yield from unmet(self.requirements, flags, job)
        requested = max(self.experts_per_layer(flags) or (0,))
        if requested > job.num_experts > 0:
            yield PolicyError(
                f"{requested} experts of each layer cannot be in a snapshot, of {job.num_experts}. Fix: choose at most "
                f"{job.num_experts}",
                code="experts-per-snapshot-invalid",
            )

    def chooses_settings(self, flags: FlagValues) -> bool:
        """Returns whether the policy's settings are chosen as by ``--ckpt-policy auto``, with no other policy."""
        return False

    def experts_per_layer(self, flags: FlagValues) -> tuple[int, int] | None:
        """Returns the numbers of experts of each layer in a snapshot and in storage, if flags set them."""
        return None

    def max_lost_tokens(self, flags: FlagValues) -> float:
        """Returns the limit of tokens that faults may lose, as a proportion of the training's tokens; by default 1."""
        return 1.0

    def may_save_gradients(self, flags: FlagValues, job: JobShape) -> bool:
        """Returns whether flags and job allow snapshots with gradients in place of state; by default never."""
        return False

    def settings(self, flags: FlagValues, job: JobShape) -> dict[str, Any]:
        """Returns the policy fields that do not follow from a flag or a property of the job with the same name."""
        return {}


def unmet(requirements: Iterable[JobRequirement], flags: FlagValues, job: JobShape) -> Iterator[PolicyError]:
    """Yields an error for each requirement that the job does not meet."""
    return (requirement.error(flags, job) for requirement in requirements if requirement.is_unmet(flags, job))


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


def gradient_requirements(
    flag: str, alternative: str = "", applies: Callable[[FlagValues], bool] = lambda flags: True
) -> tuple[JobRequirement, ...]:
    """Returns the requirements of snapshots with gradients in place of state.

    Args:
        flag: the flag that asks for gradients, as the subject of the sentences.
        alternative: another remedy.
        applies: whether the flags ask for gradients.
    """
    instead = f", or {alternative}" if alternative else ""
    return (
        JobRequirement(
            lambda flags, job: applies(flags) and job.is_elastic,
            f"{flag} needs the gradients of each iteration in memory. Fix: drop --elastic{instead}",
            code="gradients-need-memory",
        ),
        JobRequirement(
            lambda flags, job: applies(flags) and flags.ckpt_tier == "disk" and not job.is_elastic,
            f"{flag} needs the gradients of each iteration in memory. Fix: add --ckpt-tier memory or peers{instead}",
            code="gradients-need-memory",
        ),
        JobRequirement(
            lambda flags, job: applies(flags) and job.optimizer != "adam",
            f"{flag} requires Adam, since gradients save bytes only with its state. Fix: set --optimizer adam{instead}",
            code="gradients-need-adam",
        ),
        JobRequirement(
            lambda flags, job: applies(flags) and job.offloads_optimizer,
            f"{flag} repeats updates by torch's Adam, and --optimizer-cpu-offload has other kernels. Fix: drop "
            f"--optimizer-cpu-offload{instead}",
            code="gradients-need-adam",
        ),
        JobRequirement(
            lambda flags, job: applies(flags) and not job.has_separate_experts,
            f"{flag} needs a separate update of each expert. Fix: drop --moe-single-grouped-weight and "
            f"--moe-single-grouped-bias{instead}",
            code="gradients-need-separate-experts",
        ),
    )


def bubble_share(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Returns the share of forward and backward that a stage waits, with the 1F1B schedule (MoEtion, section 5.3).

    A stage computes for ``micro_batches (t_f + t_b)`` and waits for ``t_bubble = (stages - 1) (t_f + t_b) / chunks``.
    ``t_f`` and ``t_b`` are the times of a micro batch on all chunks of a stage.

    Args:
        stages: pipeline stages.
        micro_batches: micro batches of an iteration.
        chunks: virtual stages of each worker (interleaved schedule).
    """
    bubble = (stages - 1) / chunks
    return bubble / (micro_batches + bubble)
