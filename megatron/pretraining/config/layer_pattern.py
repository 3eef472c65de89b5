"""Parses ``--moe-layer-freq``: the layers that hold experts."""

from __future__ import annotations

import ast

MOST_LAYERS = 10_000  # a larger --num-layers is refused


def parse_layer_freq(value: object) -> int | tuple[int, ...]:
    """Parses N, or a list of 0 and 1 such as ``([0]*3+[1])*4``.

    Raises:
        ValueError: the value is neither.
    """
    if isinstance(value, (list, tuple)):
        return _zeros_and_ones(list(value))
    text = str(value).strip()
    if "[" not in text:
        number = int(text)
        if number < 1:
            raise ValueError("a number must be at least 1")
        return number
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError:
        raise ValueError("write N or a list expression such as ([0]*3+[1])*4") from None
    return _zeros_and_ones(_evaluate(tree))


def expand(freq: int | tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """Returns one entry per layer, 1 if it holds experts; an integer N selects the first of every N layers."""
    if isinstance(freq, int):
        return tuple(int(layer % freq == 0) for layer in range(num_layers))
    return freq


def from_interval(interval: int, num_layers: int) -> tuple[int, ...]:
    """Converts Megatron-DeepSpeed's ``--expert-interval``: the last of every N layers holds experts."""
    return tuple(int(layer % interval == interval - 1) for layer in range(min(num_layers, MOST_LAYERS)))


def _zeros_and_ones(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or any(item not in (0, 1) for item in value):
        raise ValueError("a pattern lists 0 (dense) and 1 (experts)")
    return tuple(int(item) for item in value)


def _evaluate(node: ast.expr) -> list | int:
    """Evaluates lists, integers, + and *, without ``eval``, since the pattern is untrusted input."""
    if isinstance(node, ast.List):
        return [_evaluate(item) for item in node.elts]
    if isinstance(node, ast.Constant) and type(node.value) is int and 0 <= node.value <= MOST_LAYERS:
        return node.value
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult):
            items, times = (left, right) if isinstance(left, list) else (right, left)
            if isinstance(items, list) and isinstance(times, int) and len(items) * times <= MOST_LAYERS:
                return items * times
    raise ValueError("only lists of 0 and 1, + and * are allowed")
