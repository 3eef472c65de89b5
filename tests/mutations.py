"""Random changes of JSON values, as somebody makes them who can also compute a manifest's hash."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

from moc.store.digest import digest_of
from moc.store.manifest import _canonical

NUMBERS = [None, True, -1, 0, 1, 1 << 62, 1 << 70, 0.5, -0.5, 1e308, float("nan"), float("inf")]
NAMES = ["", "a", "../../outside", "/etc/passwd", "a\n\x1b[2J", "..", ".", "a/b", "\0", "x" * 5000]
HOSTILE = [*NUMBERS, *NAMES, [], [[]], {}, {"": 0}, {"bytes": 1}, [1, 2], [-1, 2], ["a"]]


def changed(rng: random.Random, value: Any) -> Any:
    """A copy in which one place of a JSON value has something else, or lost or gained a key."""
    root = copy.deepcopy(value)
    at, parents = root, []
    while isinstance(at, (dict, list)) and at and (not parents or rng.random() < 0.8):
        key = rng.choice(list(at) if isinstance(at, dict) else range(len(at)))
        parents.append((at, key))
        at = at[key]
    if not parents:
        return root
    where, key = parents[-1]
    choice = rng.random()
    if choice < 0.1:
        del where[key]
    elif choice < 0.25 and isinstance(where, dict):
        where[str(rng.choice(HOSTILE))] = where.pop(key)
    elif choice < 0.3 and isinstance(where, list):
        where.append(copy.deepcopy(where[key]))
    elif choice < 0.4 and type(at) in (int, float):
        where[key] = at + rng.choice([-1, 1])
    else:
        where[key] = copy.deepcopy(rng.choice(HOSTILE))
    return root


def signed(plain: dict) -> str:
    """A manifest whose hash is right."""
    fields = {name: value for name, value in plain.items() if name != "xxh3_128"}
    return json.dumps({**fields, "xxh3_128": digest_of(_canonical(fields).encode())})
