"""In whose name something is published: which run, which launch of it, and which of its worlds."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

import xxhash

_WORD = re.compile(r"[0-9A-Za-z]{1,40}")
_TAG = re.compile(r"\.([0-9A-Za-z]{1,40})-(\d+)-(\d+)(?:\.|$)")


@dataclass(frozen=True)
class Claim:
    """What a worker shows when it publishes.

    Attributes:
        job: the launch; no other launch has the same.
        term: controller epoch and generation.  Of one launch it only grows, and no two worlds have the same.
        run: what the checkpoints are of, whichever launches train it; empty where nobody asks.
    """

    job: str
    term: tuple[int, int] = (0, 0)
    run: str = ""

    @classmethod
    def of_process(cls) -> Claim:
        """One that nobody else has, for a program that is no worker of a job."""
        return cls(secrets.token_hex(8))

    @property
    def tag(self) -> str:
        """Job and term as a part of file names."""
        return f"{_word(self.job)}-{self.term[0]}-{self.term[1]}"

    @property
    def generation(self) -> str:
        """The term as messages tell it."""
        return f"{self.term[0]}.{self.term[1]}"

    def supersedes(self, name: str) -> bool:
        """Whether a file's name has the tag of an older term, or of another launch; not so where it has none."""
        tag = term_in(name)
        return tag is not None and (tag[0] != _word(self.job) or tag[1] < self.term)

    def made(self, name: str) -> bool:
        """Whether a file's name has the tag of this launch, of whichever term."""
        tag = term_in(name)
        return tag is not None and tag[0] == _word(self.job)


def term_in(name: str) -> tuple[str, tuple[int, int]] | None:
    """Job and term of the tag in a file's name; None where there is none."""
    found = _TAG.search(name)
    return found and (found[1], (int(found[2]), int(found[3])))


def _word(job: str) -> str:
    return job if _WORD.fullmatch(job) else xxhash.xxh3_64_hexdigest(job.encode())
