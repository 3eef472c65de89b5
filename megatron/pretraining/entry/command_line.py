"""The command line of a script of Megatron-LM, with our options, files of options and presets.

Words of the command line override files, which override presets.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

from megatron.pretraining.config import ConfigError
from megatron.pretraining.config.ds_config import Setting, agree, ignored_in, settings_in
from megatron.pretraining.config.flag import UNKNOWN, Problems, flags_of
from megatron.pretraining.config.groups import group_classes
from megatron.pretraining.entry.dialects import FLAG, nested, previous_release, translated
from megatron.pretraining.entry.own_flags import PREFIX, own_parser
from megatron.pretraining.presets import PRESETS
from megatron.pretraining.words import Parse, load_config, read_words, refuse_unknown
from moc.files.decode import short_repr, shorten

_OTHER_SOURCES = {"yaml_cfg": None, "use_checkpoint_args": False}
"""Values without effect of Megatron-LM's options that name other sources of options."""
_FROM_STAGE_1 = ("cpu_optimizer", "use_pin_memory", "zero_communication_dtype", "zero_grad_accum_dtype")
"""Options of DeepSpeed's optimizer that change memory or results, and that megatron-core's optimizer lacks."""


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line.

    Attributes:
        own: values of our options, by name of the flag.
        given: values that differ from the defaults, by name.
        named: names of options in words, files and presets, including those with default values.
        problems: problems of words and files.
        concealed: names whose values are unknown because of the problems.
        prints: the values are printed instead of training.
        notices: sentences about translated and ignored options.
    """

    own: Mapping[str, object] = field(default_factory=dict)
    given: Mapping[str, object] = field(default_factory=dict)
    problems: tuple[ConfigError, ...] = ()
    concealed: frozenset[str] = frozenset()
    prints: bool = False
    notices: tuple[str, ...] = ()
    named: frozenset[str] = frozenset()

    @property
    def is_foreign(self) -> bool:
        """Whether the options are another program's, so that most values are missing."""
        return any(problem.code == "config-of-another-program" for problem in self.problems)


_read = CommandLine()


def read() -> CommandLine:
    """Returns the command line that was read last."""
    return _read


def prepared(
    parser: argparse.ArgumentParser, of_script: Collection[str], ignores_unknown: bool = False
) -> argparse.ArgumentParser:
    """Lets Megatron-LM's parser, which has our options, read files and presets, and collect problems; returns it.

    Args:
        parser: the parser, with the options of Megatron-LM, the script and this project.
        of_script: the option strings that only the script has.
        ignores_unknown: words that are no option are no problem.
    """
    prepared: Any = parser
    prepared.__class__, prepared.formatter_class = _Parser, _Formatter
    prepared.of_script, prepared.ignores_unknown = of_script, ignores_unknown
    return parser


class _Formatter(argparse.HelpFormatter):
    """Formats help texts; some texts of Megatron-LM have a percent sign that argparse cannot expand."""

    def _expand_help(self, action: argparse.Action) -> str:
        try:
            return super()._expand_help(action)
        except (KeyError, TypeError, ValueError):
            return action.help or ""


class _Parser(argparse.ArgumentParser):
    """Megatron-LM's parser with our options; it collects problems instead of exiting at the first one."""

    of_script: Collection[str] = ()
    ignores_unknown = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Reads the words, and the files that they name; nothing is left over."""
        global _read
        words, self.exit_on_error = sys.argv[1:] if args is None else list(args), False
        problems = Problems()
        first_values, _ = read_words(self, words, super().parse_known_args)
        if (files := first_values.get(f"{PREFIX}config")) and files is not UNKNOWN:
            words = [*_words_of_files(self, files, problems), *words]
        keys = nested.content_of(words)
        refusal = nested.refusal(keys, _options_with_values(self), "the command line", "NeMo" if keys else None)
        if refusal is not None:
            words, problems.found = [word for word in words if not nested.is_key(word)], [*problems.found, refusal]
        translation = translated(words, self._option_string_actions, self.of_script)
        words, problems.found = [*translation.words], [*problems.found, *translation.problems]
        values = _read_with_added_words(self, words, super().parse_known_args, problems)
        if values.get(f"{PREFIX}help_all"):
            super().print_help(sys.__stdout__)
            self.exit(0)
        if (path := values.get(f"{PREFIX}deepspeed_config")) and path is not UNKNOWN:
            words = [*_words_of_ds_config(self, path, words, values, problems), *words]
            values = _read_with_added_words(self, words, super().parse_known_args, problems)
        preset = values.get(f"{PREFIX}model")
        if preset and preset is not UNKNOWN:
            words = [*_words_of_options(self, preset_options(preset, values), f"--model {preset}", problems), *words]
            values = _read_with_added_words(self, words, super().parse_known_args, problems)
        _refuse_other_sources(values, problems)
        concealed = frozenset(name for name, value in values.items() if value is UNKNOWN)
        defaults = {action.dest: action.default for action in self._actions}
        values = {name: defaults[name] if name in concealed else value for name, value in values.items()}
        values = {name: value for name, value in values.items() if value is not argparse.SUPPRESS}
        own = {name.removeprefix(PREFIX): values.pop(name) for name in [*values] if name.startswith(PREFIX)}
        prints = bool(own.pop("print_config", False))
        own = {name: value for name, value in own.items() if name not in ("config", "model", "dialect", "help_all")}
        non_default = {name: value for name, value in values.items() if value not in (None, defaults.get(name))} | own
        notices = [*translation.notices, *_notices_of_ds_config(own.get("deepspeed_config"))]
        own, stage = _without_deepspeed(own, problems)
        notices += stage
        named = frozenset(action.dest.removeprefix(PREFIX) for action in _named_actions(self, words))
        _read = CommandLine(own, non_default, tuple(problems.found), concealed, prints, tuple(notices), named)
        return argparse.Namespace(**values), []

    def print_help(self, file: Any = None) -> None:
        """Prints our options; Megatron-LM's and the script's have ``--help-all``."""
        own_parser(self.prog).print_help(file)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)  # pyright: ignore[reportAttributeAccessIssue]
        except KeyError:  # names of Megatron-LM's enumerations
            raise argparse.ArgumentError(action, f"invalid value: {arg_string!r}") from None


def _read_with_added_words(
    parser: argparse.ArgumentParser, words: list[str], parse: Parse, problems: Problems
) -> dict[str, Any]:
    """Parses words to which a file has added some; returns the values, and adds new problems."""
    values, new_problems = read_words(parser, words, parse, getattr(parser, "ignores_unknown", False))
    known = {str(problem) for problem in problems.found}
    problems.found += [problem for problem in new_problems.found if str(problem) not in known]
    return values


def _refuse_other_sources(values: dict[str, Any], problems: Problems) -> None:
    """Rejects options that name other sources of options, which Megatron-LM would read before it checks options."""
    problems.refuse(
        values.get("yaml_cfg"),
        "--yaml-cfg takes the place of all options. Fix: pass a file of options with --config",
        code="loop-argument-unsupported",
    )
    problems.refuse(
        values.get("use_checkpoint_args") and not (values.get("load") or values.get("pretrained_checkpoint")),
        "--use-checkpoint-args needs --load or --pretrained-checkpoint. Fix: add one of them",
        code="flag-needs-another",
    )
    if problems.found:
        values |= {name: unset for name, unset in _OTHER_SOURCES.items() if name in values}


def _notices_of_ds_config(path: object) -> list[str]:
    try:
        return [f"{path}: {key} is ignored: {why}" for key, why in ignored_in(str(path))] if path else []
    except ConfigError:  # reported with the settings
        return []


def _without_deepspeed(own: dict[str, object], problems: Problems) -> tuple[dict[str, object], list[str]]:
    """Removes DeepSpeed's options at ZeRO stage 0, which megatron-core's optimizer implements; adds a notice."""
    if not own.get("deepspeed") or str(own.get("zero_stage")) != "0":
        return own, []
    of_zero = {flag.name: flag for flag in flags_of(group_classes()["zero"])}
    unsupported = [
        name for name in _FROM_STAGE_1 if str(own.get(name, of_zero[name].default)) != str(of_zero[name].default)
    ]
    problems.refuse_without([of_zero[name].spelling for name in unsupported], "--zero-stage 1 or 2")
    remaining = {name: value for name, value in own.items() if name not in of_zero}
    return remaining, [
        "--zero-stage 0: each data-parallel worker holds a complete optimizer state, and DeepSpeed is not used"
    ]


def _words_of_files(parser: argparse.ArgumentParser, files: Sequence[str], problems: Problems) -> Iterator[str]:
    for file in files:
        content: dict[str, Any] = {}
        problems.check(lambda file=file, content=content: content.update(load_config(file)))
        if (refusal := nested.refusal(content, _options_with_values(parser), f"--config {file}")) is not None:
            problems.found.append(refusal)
            continue
        if previous_release.is_configuration(content):
            yield from (FLAG, previous_release.DIALECT.name)
            content = previous_release.options_of_groups(content)
        problems.refuse(
            any(value and _underscored(key) == "config" for key, value in content.items()),
            f"config in {file} names another file, which is not read. Fix: give each file its own --config",
            code="flag-has-no-effect",
        )
        yield from _words_of_options(parser, content, file, problems, allow_unknown=True)


def _options_with_values(parser: argparse.ArgumentParser) -> dict[str, bool]:
    """Returns whether an option takes a value, by option."""
    return {spelling: action.nargs != 0 for spelling, action in parser._option_string_actions.items()}


def _words_of_ds_config(
    parser: argparse.ArgumentParser, path: str, words: Sequence[str], values: Mapping[str, Any], problems: Problems
) -> Iterator[str]:
    """Yields the options that a ds_config adds to the words; options in both must agree."""
    explicit = {action.dest.removeprefix(PREFIX): values[action.dest] for action in _named_actions(parser, words)}
    added: dict[str, object] = {}

    def settings() -> tuple[Setting, ...]:
        batch_grows = "step_batch_size_schedule" in explicit  # the batch grows to the size in the ds_config
        return tuple(
            setting for setting in settings_in(path) if not (batch_grows and setting.flag == "global_batch_size")
        )

    problems.check(lambda: added.update(agree(explicit, settings(), _values_agree)))
    yield from _words_of_options(parser, added, path, problems)


def _named_actions(parser: argparse.ArgumentParser, words: Sequence[str]) -> Iterator[argparse.Action]:
    """Returns the options that words name, in order."""
    actions = (parser._option_string_actions.get(word.partition("=")[0]) for word in words)
    return (action for action in actions if action is not None)


def _values_agree(name: str, value: object, expected: object) -> bool:
    try:
        return value is UNKNOWN or value == expected or float(str(value)) == float(str(expected))
    except ValueError:
        return str(value) == str(expected)


def _words_of_options(
    parser: argparse.ArgumentParser,
    options: Mapping[Any, Any],
    source: str,
    problems: Problems,
    allow_unknown: bool = False,
) -> Iterator[str]:
    """Yields options by name as words of a command line; with ``allow_unknown``, also options that the parser lacks."""
    by_name: dict[str, list[argparse.Action]] = {}
    for action in parser._actions:
        for name in {action.dest.removeprefix(PREFIX), *map(_underscored, action.option_strings)}:
            by_name.setdefault(name, []).append(action)
    for key, value in options.items():
        actions = by_name.get(_underscored(key))
        if actions is None and allow_unknown:
            name = _underscored(key).replace("_", "-")
            words = [
                f"--{name}",
                *(() if value in (True, None) else map(str, value if isinstance(value, list) else [value])),
            ]
            yield from previous_release.words_of(name, value) or words
        elif actions is None:
            refuse_unknown([f"--{key}"], {f"--{name}": name for name in by_name}, problems)
        elif value is not None:
            yield from _words_of(actions, value, f"{shorten(key)} in {source}", problems)


def _words_of(actions: Sequence[argparse.Action], value: Any, named: str, problems: Problems) -> Iterator[str]:
    action = actions[0]
    if action.nargs == 0:
        for switch in actions:
            for spelling in switch.option_strings:
                namespace = argparse.Namespace()
                switch(_Parser(), namespace, [], spelling)
                if getattr(namespace, switch.dest) == value:
                    yield spelling
                    return
        if value != (action.default or False):
            problems.refuse(
                True, f"{named} is {short_repr(value)}. Fix: make it true or false", code="value-unreadable"
            )
    elif action.nargs is None:
        text = f"[{','.join(map(str, value))}]" if isinstance(value, list) else value  # as in layer patterns
        yield f"{action.option_strings[0]}={text}"
    elif value != []:
        yield action.option_strings[0]
        yield from map(str, value if isinstance(value, list) else [value])


def _underscored(key: object) -> str:
    return str(key).removeprefix("--").replace("-", "_")


_MAX_LAYERS = 10_000


def preset_options(name: str, explicit: Mapping[str, object]) -> dict[str, object]:
    """Returns the options of a preset, by Megatron-LM's names.

    The pattern of layers with experts is cut or repeated if another number of layers is given.

    Args:
        name: name of the preset.
        explicit: values of options that override the preset's values, by name; None if an option is not given, and
            ``UNKNOWN`` if its value is not readable.
    """
    options: dict[str, Any] = dict(PRESETS[name].values)
    layers, length = ({**options, **_numbers(explicit)}[key] for key in ("num_layers", "seq_length"))
    if (pattern := options.get("moe_layer_freq")) is not None:
        options["moe_layer_freq"] = list(islice(cycle(pattern), max(0, min(layers, _MAX_LAYERS))))
    return options | {"max_position_embeddings": length}


def _numbers(values: Mapping[str, object]) -> dict[str, int]:
    return {name: value for name, value in values.items() if isinstance(value, int)}
