"""Each test of ``tests/left_out.txt`` exists."""

import ast
from pathlib import Path

from tests import shared

TESTS = Path(shared.__file__).parent


def test_each_excluded_test_exists():
    named = {}
    for name in shared.left_out():
        path, _, test = name.partition("::")
        named.setdefault(path, []).append(test.partition("[")[0])
    for path, functions in named.items():
        module = ast.parse((TESTS / path).read_text())
        assert set(functions) <= {one.name for one in module.body if isinstance(one, ast.FunctionDef)}, path
    assert named and len(shared.left_out()) == len(set(shared.left_out()))
