"""Somebody else's policy: flags, prices and candidates, from a package that is installed outside of the tree."""

import ast
import json
import re
import subprocess
import sys

import pytest

from moc.policy import POLICIES
from moc.policy.interface import Full
from moc.policy.selective import Selective
from tests.errors import only_code
from tests.own_policy import FILE, PAGE, ROOT, USE, install
from tests.unit.pretraining.flags import BASE


def run(*arguments, env, status=0):
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    return install(tmp_path_factory.mktemp("installed"))


def test_installed_policy_works_as_documented(env):
    assert f"prints\n\n    {run('-c', USE, env=env)}" in PAGE
    assert "torch" not in run("-c", "import sys, moc.policy; print(*sys.modules)", env=env).split()


def test_policy_flags_are_in_help_and_require_their_policy(env):
    words = run("pretrain_gpt_moe.py", "--help", env=env).split()
    assert "--busier-experts" in words and "{auto,busier,full,gradient,pec,selective,sparse}" in "".join(words)
    flags = f"{BASE} --save x --busier-experts 2 --ckpt-policy".split()
    for policy, more, code, named in (
        ("full", [], "policy-lacks-flag", "--busier-experts"),
        ("auto", [], "flag-chosen-by-auto", "--busier-experts"),
        ("busier", ["--ckpt-tier", "memory"], "policy-flags-conflict", "--ckpt-tier"),
    ):
        said = run("pretrain_gpt_moe.py", *flags, policy, *more, env=env, status=2)
        assert only_code(said) == code and named in said
    others = f"{BASE} --save x --ckpt-policy auto --ckpt-tier memory --print-config".split()  # busier is left out
    assert "ckpt_policy: auto" in run("pretrain_gpt_moe.py", *others, env=env)


def test_installed_policy_is_simulated(env):
    flags = "--model deepseek-moe-16b --pp 12 --ep 8 --mtbf 1h --hours 1 --policy busier,full --json".split()
    found = json.loads(run("tools/simulate.py", *flags, env=env))["policies"]
    assert found.keys() == {"busier", "full"} and found["busier"]["written"] != found["full"]["written"]


def test_auto_chooses_among_settings_of_installed_policy(env):
    chosen = """
from moc.simulate.planner import best_of, every_candidate, priced
from moc.simulate.live_costs import flags_of_candidate, options_of
from tests.unit.simulate.test_live_costs import LIMITS, running
import dataclasses
limits = dataclasses.replace(LIMITS, policies=("busier", "full"), plt=1.0)
run = running(copy_s=60.0, write_s=60.0)
best = best_of(every_candidate(run, 60.0, limits), run.iteration_s, 60.0, limits).best
flags = flags_of_candidate(best)
assert priced(run, "busier", options_of(flags, 60.0)).saving == best.saving
print(best.name, flags)
"""
    name, _, flags = run("-c", chosen, env=env).partition(" {")
    number = name.removeprefix("busier, experts ").partition(",")[0]
    assert number.isdecimal() and f"'busier_experts': {number}" in flags


def test_unimportable_policy_module_is_named(tmp_path):
    said = run("pretrain_gpt_moe.py", "--help", env=install(tmp_path, FILE + "\n1 / 0\n"), status=1)
    assert only_code(said) == "policy-module-broken" and "busier" in said and "division by zero" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "there, instead, named",
    [
        ('"busier_experts"', '"experts"', ["flag experts", "busier_."]),
        (
            '"busier_experts"',
            '"busier_expert"',
            ["flag busier_expert", "settings()"],
        ),
        ("@dataclass(frozen=True)\n", "", ["policy busier", "@dataclass(frozen=True)"]),
        ("def plan(", "def plans(", ["policy busier", " plan."]),
        (re.search("@policy.*\n", FILE)[0], "", ["policy-module-broken", "ValueError"]),
    ],
)
def test_invalid_installed_policy_is_refused(there, instead, named, tmp_path):
    said = run("-c", "import moc.policy", env=install(tmp_path, FILE.replace(there, instead)), status=1)
    assert all(name in said for name in named) and "Traceback" not in said


WITHOUT_A_POLICY = """
import importlib.abc, os, pkgutil, sys, traceback
import numpy, torch  # once, for all forks

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == f"moc.policy.{absent}":
            raise ModuleNotFoundError(name)

def check():
    found = pkgutil.iter_modules
    pkgutil.iter_modules = lambda path=None, prefix="": (one for one in found(path, prefix) if one.name != absent)
    sys.meta_path.insert(0, Absent())
    import moc.policy, moc.session.auto
    assert absent not in moc.policy.POLICIES and moc.policy.full_policy_name() == "full"

failed = []
for absent in sys.argv[1:]:
    if (child := os.fork()) == 0:
        code = 1
        try:
            check()
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    if os.waitpid(child, 0)[1]:
        failed.append(absent)
sys.exit(f"cannot be imported without {failed}" if failed else 0)
"""


def test_auto_can_be_imported_without_policies():
    command = [sys.executable, "-c", WITHOUT_A_POLICY, "pec", "selective", "sparse", "gradient"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_policy_names_occur_only_in_policy_package():
    """Nothing outside of ``moc/policy`` is decided by a policy's name."""
    named = [f"{path.relative_to(ROOT)}:{node.lineno} {node.value}" for path, node in words_that_decide()]
    assert not named


OTHER_MEANINGS = (Full.name, Selective.name)
"""Policies with names that Megatron's flags have other meanings for, such as ``--recompute-granularity``."""


def words_that_decide():
    """The names of policies; of those with other meanings where something is decided by them."""
    for path in sorted((ROOT / "moc").rglob("*.py")) + sorted((ROOT / "megatron").rglob("*.py")):
        if (ROOT / "moc" / "policy") in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for part in deciding(node):
                for word in ast.walk(part):
                    if isinstance(word, ast.Constant) and word.value in POLICIES:
                        yield path, word


def deciding(node):
    """The parts of a node that name a policy, if they have its name: in comparisons, subscripts, cases, tables."""
    if isinstance(node, ast.Constant):
        return [node] if node.value not in OTHER_MEANINGS else []
    if isinstance(node, ast.Compare) and "recompute_granularity" not in ast.unparse(node.left):
        return [node.left, *node.comparators]
    if isinstance(node, ast.Subscript):
        return [node.slice]
    if isinstance(node, ast.MatchValue):
        return [node.value]
    if isinstance(node, ast.Dict):
        return [part for part in (*node.keys, *node.values) if part is not None]
    if isinstance(node, ast.keyword):
        return [node.value] if node.arg in ("name", "policy") else []
    if isinstance(node, ast.Call) and "policy" in ast.unparse(node.func).lower():
        return node.args
    return []
