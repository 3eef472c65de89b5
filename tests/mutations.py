"""Random changes of JSON values, as somebody makes them who can also compute the hash of a file.

A change depends on the type of the value that it replaces: numbers get values at the limits of their ranges, text gets
names that lead elsewhere, lists and objects get other lengths.  Two kinds of strings stand for JSON that ``json.dumps``
does not write (:func:`encoded`): keys that occur twice, and text such as ``1e400`` or ten thousand brackets.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable
from typing import Any

from moc.store.manifest import _canonical_json, compute_digest

_AGAIN, _TEXT = "\ue000", "\ue001"  # marks of strings: a key that occurs again, and JSON text
_MARKED = re.compile(r'"\\ue001((?:[^"\\]|\\.)*)"')
_RAW = [
    "1e400", "-1e400", "1e-400", "-0", "-0.0", "1E5", "9" * 400, "9" * 5000, "NaN", "-Infinity",
    "18446744073709551616", "0.1e1", "[" * 20 + "]" * 20, "[" * 600 + "]" * 600, '{"a":' * 600 + "1" + "}" * 600,
    "[" * 20_000, '{"a":1,"a":2}', '"\\ud800"', '"\\ud83d\\ude00"', "nul", "'a'", "0x10", "01", "+1", "1,", "",
]  # fmt: skip
_NUMBERS = [
    -1, 0, 1, 2, 1 << 31, (1 << 31) - 1, 1 << 32, 1 << 53, (1 << 62) - 1, 1 << 62, (1 << 62) + 1, 1 << 63, 1 << 64,
    1 << 70, -(1 << 63), 10**300, 0.0, -0.0, 0.5, -0.5, 1.0, 1e12, 1.1e12, 1e300, 1e308, 5e-324, float("nan"),
    float("inf"), float("-inf"),
]  # fmt: skip
_NAMES = [
    "", "a", "../../outside", "/etc/passwd", "a\n\x1b[2J", "..", ".", "a/b", "\0", "x" * 5000, "\u202ea", "\ud800",
    "\U0001f600", "e\u0301", "0", "-1", "1e9", "true", "null", "%s", "{}", "$HOME", "rank_00000.safetensors",
    "manifest.json", "f" * 16, "F" * 16, "0" * 32, "full", "pec", "layers.0.mlp", "\ufeff", "\u0661",
    "a" * 16 + "\n", " ",
]  # fmt: skip
_OTHERS = [None, True, False, [], [[]], {}, {"": 0}, {"bytes": 1}, {"0": 1}, [1, 2], [-1, 2], ["a"], [None], [0] * 1000]
_ANYTHING = [*_NUMBERS, *_NAMES, *_OTHERS, *(_TEXT + one for one in _RAW)]


def changed(rng: random.Random, value: Any) -> Any:
    """A copy of a JSON value with one to three changes."""
    root = copy.deepcopy(value)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        _change(rng, root)
    return root


def _change(rng: random.Random, root: Any) -> None:
    at, parents = root, []
    while isinstance(at, (dict, list)) and at and (not parents or rng.random() < 0.8):
        key = rng.choice(list(at) if isinstance(at, dict) else range(len(at)))
        parents.append((at, key))
        at = at[key]
    if not parents:
        return
    where, key = parents[-1]
    choice = rng.random()
    if choice < 0.1:
        del where[key]
    elif choice < 0.25 and isinstance(where, dict):
        _change_key(rng, where, key)
    elif choice < 0.3 and isinstance(where, list):
        where.insert(rng.randrange(len(where) + 1), copy.deepcopy(where[key]))
    elif choice < 0.35:
        elsewhere, place = rng.choice(parents)
        where[key] = copy.deepcopy(elsewhere[place])
    else:
        where[key] = _instead_of(rng, at)


def _change_key(rng: random.Random, where: dict[str, Any], key: str) -> None:
    choice = rng.random()
    if choice < 0.3:
        where[_AGAIN + key] = copy.deepcopy(rng.choice([where[key], rng.choice(_ANYTHING)]))
    elif choice < 0.5:
        where[str(rng.choice(_NAMES))] = copy.deepcopy(where[key])
    else:
        where[str(rng.choice([*_NAMES, *_NUMBERS, f"{key} ", key.upper(), f"{key}\n"]))] = where.pop(key)


def _instead_of(rng: random.Random, value: Any) -> Any:
    """Something in the place of a value, in half of the cases of the same type."""
    if rng.random() < 0.5:
        return copy.deepcopy(rng.choice(_ANYTHING))
    for kind, others in _BY_TYPE.items():
        if isinstance(value, kind):
            return others(rng, value)
    return rng.choice(_NUMBERS)


def _other_number(rng: random.Random, value: float) -> Any:
    near = [value - 1, value + 1, -value, str(value), [value]]
    near += [float(value), value * 2] if abs(value) < 1e300 else []
    return rng.choice([*near, *_NUMBERS, *(_TEXT + one for one in _RAW[:12])])


def _other_text(rng: random.Random, value: str) -> Any:
    return rng.choice(
        [value.upper(), f"{value}\n", f"{value}\0", value[:-1], f"./{value}", f"{value}/..", [value], *_NAMES]
    )


def _other_list(rng: random.Random, value: list) -> list:
    many = value[:1] * _many(value[:1])
    return rng.choice([[], value[:-1], value[1:], value[::-1], [*value, None], value * 2, [value], many])


def _many(value: list) -> int:
    """How often a value is repeated: the text of three such changes must not take gigabytes."""
    return 2000 if len(json.dumps(value)) < 2000 else 2


def _other_object(rng: random.Random, value: dict) -> Any:
    first = list(value.values())[:1]
    many = {str(number): one for number, one in enumerate(first * _many(first))}
    return rng.choice([{}, many, {**value, "more": None}, list(value.items()), {"a": value}, dict.fromkeys(value)])


_BY_TYPE: dict[type, Callable[[random.Random, Any], Any]] = {
    bool: lambda rng, value: rng.choice([not value, int(value), float(value), str(value).lower(), None]),
    int: _other_number,
    float: _other_number,
    str: _other_text,
    list: _other_list,
    dict: _other_object,
}


def encoded(value: Any) -> str:
    """JSON of a changed value."""
    text = json.dumps(value).replace(f'"{json.dumps(_AGAIN)[1:-1]}', '"')
    return _MARKED.sub(lambda found: json.loads(f'"{found[1]}"'), text)


def signed(plain: dict) -> str:
    """The text of a file whose hash is right, if the text is JSON."""
    fields = {name: value for name, value in plain.items() if name != "xxh3_128"}
    text = encoded(fields)
    try:
        digest = compute_digest(_canonical_json(json.loads(text)).encode())
    except (ValueError, RecursionError):
        digest = "0" * 32
    return f'{text[:-1]}{", " if fields else ""}"xxh3_128": "{digest}"}}'
