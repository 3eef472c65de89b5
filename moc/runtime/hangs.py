"""How long a worker may be in a section before it is taken to hang."""

from __future__ import annotations

from dataclasses import dataclass, field

CAPS = {"setup": 3600.0, "step": 1800.0, "evaluation": 1800.0, "save": 3600.0}
"""By section, the seconds after which a worker hangs in any case."""

LEARNED = ("step", "evaluation")
"""Sections that take as long each time; how long the others take depends on what there is to build and to write."""

FACTOR, FLOOR_S = 10.0, 60.0
"""A section hangs when it takes so many times the longest that was measured, but not before so many seconds."""


def parse_caps(text: str) -> dict[str, float]:
    """The caps, with those that a text such as ``step=600,save=1800`` names.

    Raises:
        ValueError: it names another section, or what is not a positive number of seconds.
    """
    caps = dict(CAPS)
    for part in filter(None, text.split(",")):
        section, _, seconds = part.partition("=")
        if section not in CAPS:
            raise ValueError(
                f"there is no section {section!r}: name some of {', '.join(CAPS)}, as in step=600,save=1800"
            )
        try:
            caps[section] = float(seconds)
        except ValueError:
            raise ValueError(f"{part!r} has no number of seconds: write {section}=600") from None
        if not caps[section] > 0:
            raise ValueError(f"{part!r} leaves no time: give a positive number of seconds")
    return caps


def limit(longest: float | None, cap: float) -> float:
    """Seconds that a section may take.

    Args:
        longest: seconds of the longest that was measured; None if none was.
        cap: seconds that it may never exceed.
    """
    return cap if longest is None else min(cap, max(FLOOR_S, FACTOR * longest))


@dataclass
class HangLimits:
    """The limits of all sections, as they are learned from what workers report.

    Attributes:
        caps: seconds, by section.
        longest: seconds of the longest that any worker of this node has measured, by section.
    """

    caps: dict[str, float]
    longest: dict[str, float] = field(default_factory=dict)

    def learn(self, longest: dict[str, float]) -> None:
        """A worker has measured."""
        for section in LEARNED:
            if section in longest:
                self.longest[section] = max(self.longest.get(section, 0.0), longest[section])

    def of(self, section: str, waits: bool) -> float:
        """Seconds that a worker may be in a section; who waits for others has the time of any section."""
        if waits or section not in self.caps:
            return max(self.caps.values())
        return limit(self.longest.get(section), self.caps[section])
