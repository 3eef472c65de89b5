"""Claims: the run, the launch and the term under which a worker publishes."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

import xxhash

_WORD = re.compile(r"[0-9A-Za-z]{1,40}")
_TAG = re.compile(r"\.([0-9A-Za-z]{1,40})-(\d+)-(\d+)(?:\.|$)")


@dataclass(frozen=True)
class Claim:
    """The identity under which a worker publishes.

    Attributes:
        job: unique id of the launch.
        term: controller epoch and generation; it only grows within a launch, and is unique to a membership.
        run: the run that the checkpoints belong to, across launches; empty if not checked.
    """

    job: str
    term: tuple[int, int] = (0, 0)
    run: str = ""

    @classmethod
    def of_process(cls) -> Claim:
        """Returns a unique claim, for a program that is not a worker of a job."""
        return cls(secrets.token_hex(8))

    @property
    def tag(self) -> str:
        """Job and term as used in file names."""
        return f"{_word(self.job)}-{self.term[0]}-{self.term[1]}"

    @property
    def generation(self) -> str:
        """The term as shown in messages."""
        return f"{self.term[0]}.{self.term[1]}"

    def supersedes(self, name: str) -> bool:
        """Returns whether a file name has the tag of an older term or of another launch; False without a tag."""
        tag = term_in(name)
        return tag is not None and (tag[0] != _word(self.job) or tag[1] < self.term)

    def made(self, name: str) -> bool:
        """Returns whether a file name has the tag of any term of this launch."""
        tag = term_in(name)
        return tag is not None and tag[0] == _word(self.job)


def term_in(name: str) -> tuple[str, tuple[int, int]] | None:
    """Returns the job and term of the tag in a file name; None without a tag."""
    found = _TAG.search(name)
    return found and (found[1], (int(found[2]), int(found[3])))


def _word(job: str) -> str:
    return job if _WORD.fullmatch(job) else xxhash.xxh3_64_hexdigest(job.encode())
