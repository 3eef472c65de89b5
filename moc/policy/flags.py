"""Flags of policies: what a user may say of one, and what it is told of the job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Asked = Any
"""All flags of snapshots, by their names with underscores as attributes: ``ckpt_tier``, ``persist_interval``, ..."""


@dataclass(frozen=True)
class PolicyFlag:
    """A flag of one policy; with another one it is refused.

    Attributes:
        name: the flag's, with underscores; it begins with the policy's name.
        kind: of the value: ``bool`` for a switch, ``int``, ``float`` or ``str``.
        default: the value when nobody gives one.
        help: the text of ``--help``.
        choices: the values allowed.
        parse: parses a value, raising ``ValueError``, where the kind does not say enough.
        metavar: what ``--help`` calls the value.
        at_least: inclusive lower limit.
        above: exclusive lower limit.
        at_most: inclusive upper limit.
        chosen: ``--ckpt-policy auto`` chooses it, so it must not be given with that.
        needs: the flag without which this one is but a limit for what ``auto`` chooses.
    """

    name: str
    kind: type
    default: Any
    help: str
    choices: tuple[str, ...] | None = None
    parse: Callable[[Any], Any] | None = None
    metavar: str | None = None
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    chosen: bool = False
    needs: str | None = None


@dataclass(frozen=True)
class JobShape:
    """What policies may know of the job beside their flags.

    Attributes:
        ep: expert-parallel ranks.
        stages: by layer, the pipeline stage that computes it.
    """

    ep: int = 1
    stages: tuple[int, ...] = ()


def number_or_auto(text: Any) -> str:
    """Parses ``auto``, or a number of at least 1.

    Raises:
        ValueError: it is neither.
    """
    text = str(text)
    if text != "auto" and not (text.isdecimal() and int(text) >= 1):
        raise ValueError(f"take auto or a number of at least 1, not {text}")
    return text
