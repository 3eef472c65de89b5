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
from megatron.pretraining.entry.dialects.rules import Dialect, Line, OptionOutcome, ParsedOption, split_options
from moc.files.decode import short_repr

OLDER = older_megatron.DIALECT
_OTHER_DIALECTS = (
    previous_release.DIALECT,
    megatron_deepspeed.DIALECT,
    forks.MINDSPEED,
    forks.PAI,
    forks.FLAGSCALE,
)
DIALECTS = {dialect.name: dialect for dialect in (OLDER, *_OTHER_DIALECTS)}
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
    options = split_options(words)
    named = [option.values for option in options if option.spelling == FLAG and FLAG not in of_script]
    options = [option for option in options if option.spelling != FLAG or FLAG in of_script]
    plain = tuple(word for option in options for word in option.words)
    if named:
        dialect = DIALECTS.get(" ".join(named[-1]))
        if dialect is None:
            problem = ConfigError(
                f"--dialect {short_repr(' '.join(named[-1]))} is not known. Fix: choose one of {', '.join(DIALECTS)}",
                code="value-not-a-choice",
            )
            return Translation(plain, problems=(problem,))
        dialects = [dialect]
    else:
        dialects = _matching_dialects([option.spelling for option in options], known)
    if len(dialects) > 1:
        names = " or ".join(f"--dialect {match.name}" for match in dialects)
        problem = ConfigError(
            f"the command line has options of several programs. Fix: choose {names}", code="dialect-ambiguous"
        )
        return Translation(plain, problems=(problem,))
    return _translated_from(dialects[0], options, of_script)


def _matching_dialects(options: Collection[str], known: Collection[str]) -> list[Dialect]:
    """Returns the dialects with the most unknown options; Megatron-LM's older releases if no other dialect has any."""
    unknown = [option for option in options if option.startswith("--") and option not in known]
    matches = {candidate.name: sum(option in candidate.rules for option in unknown) for candidate in _OTHER_DIALECTS}
    marked = {candidate.name for candidate in _OTHER_DIALECTS if candidate.marks.intersection(options)}
    with_matches = [candidate for candidate in _OTHER_DIALECTS if matches[candidate.name]]
    with_matches = [
        candidate for candidate in with_matches if candidate.name in marked or not candidate.needs_mark
    ] or with_matches
    best = [
        candidate
        for candidate in with_matches
        if matches[candidate.name] == max(matches[other.name] for other in with_matches)
    ]
    best = [candidate for candidate in best if candidate.name in marked] or best or [OLDER]
    return [candidate for candidate in best if not candidate.needs_mark] or best


def _translated_from(dialect: Dialect, options: Sequence[ParsedOption], of_script: Collection[str]) -> Translation:
    line, words, problems = (
        Line((option.spelling, option.values) for option in options),
        list[str](),
        list[ConfigError](),
    )
    notices = [f"options of {dialect.title}, translated for this release (--dialect {dialect.name}):"]
    for option in options:
        rule = (
            None
            if option.spelling in of_script
            else dialect.rules.get(option.spelling) or OLDER.rules.get(option.spelling)
        )
        outcome = rule(line, option.values) if rule is not None else None
        if outcome is None or outcome.words == (option.spelling, *option.values):
            words += option.words
            continue
        written = " ".join(option.words)
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
