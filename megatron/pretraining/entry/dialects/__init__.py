"""Translates command lines of programs derived from Megatron-LM to the options of Megatron-LM and this project.

Each dialect is a table (:class:`Dialect`) of options that are ignored, translated or refused, with the reasons.  An
option without an entry keeps its meaning.  The words of a command line need no parser: the values of an option are the
words up to the next option.  Nothing here imports torch, so that a launcher can translate as well.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from megatron.pretraining.config import ConfigError
from megatron.pretraining.entry.dialects import (
    forks,
    megatron_deepspeed,
    older_megatron,
    previous_release,
)
from megatron.pretraining.entry.dialects.rules import Dialect, Given, Line, OptionOutcome, split_options
from moc.files.decode import short_repr

OLDER = older_megatron.DIALECT
_OTHERS = (
    previous_release.DIALECT,
    megatron_deepspeed.DIALECT,
    forks.MINDSPEED,
    forks.PAI,
    forks.FLAGSCALE,
)
DIALECTS = {dialect.name: dialect for dialect in (OLDER, *_OTHERS)}
"""Dialects by the name for ``--dialect``; all have the entries of :data:`OLDER` unless they override them."""
FLAG = "--dialect"


@dataclass(frozen=True)
class Translation:
    """A translated command line.

    Attributes:
        words: in options of Megatron-LM and of this project.
        notices: sentences about everything that was changed.
        problems: options that are refused.
    """

    words: tuple[str, ...]
    notices: tuple[str, ...] = ()
    problems: tuple[ConfigError, ...] = field(default=())


def translated(words: Sequence[str], known: Collection[str], of_script: Collection[str] = ()) -> Translation:
    """Translates a command line; pure.

    Args:
        words: words of the command line; ``--dialect NAME`` among them selects a dialect, and is removed.
        known: the option strings of Megatron-LM, this project and the script.
        of_script: the option strings that only the script has, which keep their meaning.
    """
    given = split_options(words)
    named = [one.values for one in given if one.option == FLAG and FLAG not in of_script]
    given = [one for one in given if one.option != FLAG or FLAG in of_script]
    plain = tuple(word for one in given for word in one.words)
    if named:
        dialect = DIALECTS.get(" ".join(named[-1]))
        if dialect is None:
            problem = ConfigError(
                f"--dialect {short_repr(' '.join(named[-1]))} is not known. Fix: choose one of {', '.join(DIALECTS)}",
                code="value-not-a-choice",
            )
            return Translation(plain, problems=(problem,))
        found = [dialect]
    else:
        found = _spoken([one.option for one in given], known)
    if len(found) > 1:
        names = " or ".join(f"--dialect {one.name}" for one in found)
        problem = ConfigError(
            f"the command line has options of several programs. Fix: choose {names}", code="dialect-ambiguous"
        )
        return Translation(plain, problems=(problem,))
    return _in(found[0], given, of_script)


def _spoken(options: Collection[str], known: Collection[str]) -> list[Dialect]:
    """Returns the dialects with the most unknown options; Megatron-LM's older releases if no other dialect has any."""
    unknown = [option for option in options if option.startswith("--") and option not in known]
    counts = {one.name: sum(option in one.rules for option in unknown) for one in _OTHERS}
    marked = {one.name for one in _OTHERS if one.marks.intersection(options)}
    having = [one for one in _OTHERS if counts[one.name]]
    having = [one for one in having if one.name in marked or not one.needs_mark] or having
    likely = [one for one in having if counts[one.name] == max(counts[each.name] for each in having)]
    likely = [one for one in likely if one.name in marked] or likely or [OLDER]
    return [one for one in likely if not one.needs_mark] or likely


def _in(dialect: Dialect, given: Sequence[Given], of_script: Collection[str]) -> Translation:
    line, words, problems = Line((one.option, one.values) for one in given), list[str](), list[ConfigError]()
    notices = [f"options of {dialect.title}, translated for this release (--dialect {dialect.name}):"]
    for one in given:
        rule = None if one.option in of_script else dialect.rules.get(one.option) or OLDER.rules.get(one.option)
        outcome = rule(line, one.values) if rule is not None else None
        if outcome is None or outcome.words == (one.option, *one.values):
            words += one.words
            continue
        written = " ".join(one.words)
        words += outcome.words
        if outcome.problem:
            problems.append(
                ConfigError(f"{written}: {outcome.problem}. Fix: {outcome.fix}", code="dialect-option-unsupported")
            )
        else:
            notices.append(f"{written}: {_sentence(outcome)}")
    for outcome in dialect.defaults(line):
        words += outcome.words
        notices.append(f"{' '.join(outcome.words)}: {outcome.why}")
    return Translation(tuple(words), tuple(notices) if len(notices) > 1 else (), tuple(problems))


def _sentence(outcome: OptionOutcome) -> str:
    if not outcome.words:
        return f"ignored: {outcome.why}"
    because = f" ({outcome.why})" if outcome.why else ""
    return f"read as {' '.join(outcome.words)}{because}"
