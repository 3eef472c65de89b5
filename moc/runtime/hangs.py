"""Limits the time that a worker may stay in a section before it counts as hung."""

from __future__ import annotations

from dataclasses import dataclass, field

from moc.errors import UserError


class HangCapError(UserError, ValueError):
    """The longest times of sections are invalid."""


CAPS = {"setup": 3600.0, "step": 1800.0, "evaluation": 1800.0, "save": 3600.0}
"""Upper limits of the time in a section, in seconds, by section."""

LEARNED = ("step", "evaluation")
"""Sections of steady duration; the duration of others depends on the amount to build or write."""

FACTOR, FLOOR_S = 10.0, 60.0
"""A section hangs when it takes FACTOR times its longest measured duration, and at least FLOOR_S seconds."""


def parse_caps(text: str) -> dict[str, float]:
    """Returns the default caps, updated from text such as ``step=600,save=1800``.

    Raises:
        ValueError: a section is unknown, or a value is not a positive number of seconds.
    """
    caps = dict(CAPS)
    for part in filter(None, text.split(",")):
        section, _, seconds = part.partition("=")
        if section not in CAPS:
            known = f"{', '.join(CAPS)}, as in step=600,save=1800"
            raise HangCapError(
                f"there is no section {section!r}. Fix: name some of {known}",
                code="hang-timeout-malformed",
            )
        try:
            caps[section] = float(seconds)
        except ValueError:
            raise HangCapError(
                f"{part!r} has no number of seconds. Fix: write {section}=600",
                code="hang-timeout-malformed",
            ) from None
        if not caps[section] > 0:
            raise HangCapError(
                f"{part!r} leaves no time. Fix: give a positive number of seconds",
                code="hang-timeout-malformed",
            )
    return caps


@dataclass
class HangLimits:
    """Time limits in seconds, by section, learned from workers' reports."""

    caps: dict[str, float]
    longest: dict[str, float] = field(default_factory=dict)  # measured by any worker of this node

    def learn(self, longest: dict[str, float]) -> None:
        """Merges a worker's measured durations."""
        for section in LEARNED:
            if section in longest:
                self.longest[section] = max(self.longest.get(section, 0.0), longest[section])

    def of(self, section: str, waits: bool) -> float:
        """Returns the seconds that a worker may stay in a section; a waiting worker gets the largest cap."""
        if waits or section not in self.caps:
            return max(self.caps.values())
        cap, longest = self.caps[section], self.longest.get(section)
        return cap if longest is None else min(cap, max(FLOOR_S, FACTOR * longest))
