"""Faults on purpose: how they are written, what chance makes of a seed, and that each happens once."""

import ast
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moc import fault_points
from moc.fault_points import AFTER, ELASTIC, FORMER_NAMES, POINTS, RECOVERY, reach
from moc.runtime.fault_injection import ACTIONS, Fault, InjectedError, Injector, parse_faults, random_faults
from tests.cases import each_row
from tests.errors import raises

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def told():
    """What was told, while nobody else listens."""
    yield []
    fault_points.on_reach(None)


def injector(text, directory, told, rank=0, node=0):
    return Injector(parse_faults(text), rank, node, directory, told.append)


def test_fault_text_is_parsed():
    assert parse_faults("kill rank=2 iteration=40 point=after_commit") == (
        Fault("kill", 40, (2,), point="after_commit"),
    )
    assert parse_faults("slow ranks=1,0 seconds=.5 iteration=3 times=2; stop node=1 iteration=0;") == (
        Fault("slow", 3, (0, 1), seconds=0.5, times=2),
        Fault("stop", 0, node=1),
    )


def test_former_names_of_points_are_accepted():
    for former, point in FORMER_NAMES.items():
        assert parse_faults(f"kill rank=2 iteration=4 point={former}")[0].point == point
    assert FORMER_NAMES.keys().isdisjoint(POINTS) and set(FORMER_NAMES.values()) <= POINTS.keys()


@given(
    st.builds(
        Fault,
        st.sampled_from(sorted(ACTIONS)),
        st.integers(0, 10**6),
        st.lists(st.integers(0, 99), min_size=1, unique=True).map(lambda ranks: tuple(sorted(ranks))),
        st.none() | st.integers(0, 9),
        st.sampled_from(sorted(POINTS)),
        times=st.integers(1, 9),
    )
)
def test_fault_text_round_trips(fault):
    if fault.action == "slow":
        fault = Fault("slow", fault.iteration, fault.ranks, fault.node, fault.point, 0.25, fault.times)
    assert parse_faults(str(fault)) == (fault,)


@each_row(
    "text, named",
    [
        ("murder rank=1 iteration=2", ["murder", "kill, stop, term, slow, error"]),
        ("kill rank=1", ["iteration="]),
        ("kill iteration=2", ["rank= or node="]),
        ("kill rank=1 ranks=2 iteration=2", ["ranks="]),
        ("kill rank=one iteration=2", ["ranks= takes an integer, not one"]),
        ("kill rank= iteration=2", ["ranks= takes an integer, not nothing"]),
        ("kill rank=1 iteration=2 point=lunch", [f"point= takes one of {', '.join(POINTS)}, not lunch"]),
        ("kill 3 iteration=2", ["3", "ranks=, node=, iteration=, point=, seconds=, times="]),
        ("slow rank=1 iteration=2", ["slow", "seconds="]),
        ("kill rank=1 iteration=2 seconds=3", ["slow", "seconds="]),
        ("slow rank=1 iteration=2 seconds=nan", ["seconds= takes a number of seconds, not nan"]),
        ("kill rank=1 iteration=2 times=0", ["times="]),
    ],
)
def test_invalid_fault_text_names_mistake(text, named):
    with raises("value-unreadable", *named):
        parse_faults(text)


def test_random_faults_depend_only_on_seed():
    drawn = random_faults(10, 7, 4, 200)
    assert random_faults(10, 7, 4, 200) == drawn != random_faults(10, 8, 4, 200)
    assert str(random_faults(25, 0, 4, 100)[0]) == "kill ranks=0 iteration=2 point=committed"  # anywhere


@given(st.floats(1, 50), st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 300))
def test_random_faults_hit_one_to_three_existing_workers(mean, seed, size, iterations):
    drawn = random_faults(mean, seed, size, iterations)
    for fault in drawn:
        assert fault.action == "kill" and 1 <= fault.iteration <= iterations
        assert 1 <= len(fault.ranks) <= 3 and set(fault.ranks) <= set(range(size))
    for before, fault in zip((None, *drawn), drawn, strict=False):
        if fault.point in RECOVERY:  # there is something to recover from, and what rebuilds is what was lost
            assert before.iteration == fault.iteration + 1 and before.point not in RECOVERY
            assert fault.point != "rebuilding" or before.ranks == fault.ranks


def test_random_fault_gaps_have_requested_mean():
    drawn = random_faults(20, 1, 8, 20_000)
    assert sum(fault.point not in RECOVERY for fault in drawn) == pytest.approx(1000, rel=0.1)
    assert {fault.point for fault in drawn} == POINTS.keys() - ELASTIC - AFTER.keys()


def test_fault_hits_its_rank_at_its_point_and_iteration(tmp_path, told):
    ours = injector("error rank=1 iteration=3 point=after_commit", tmp_path, told, rank=1)
    other = injector("error rank=1 iteration=3 point=after_commit", tmp_path, told, rank=0)
    for iteration in (1, 2, 3):
        for one in (ours, other):
            one.reached("start", iteration)
            one.reached("before_commit")
        other.reached("after_commit")
        if iteration < 3:
            ours.reached("after_commit")
    assert told == []
    with pytest.raises(InjectedError, match="error ranks=1 iteration=3 point=after_commit"):
        ours.reached("after_commit")
    assert told == [dict(action="error", rank=1, iteration=3, point="after_commit")]


def test_fault_occurs_when_its_point_is_next_reached(tmp_path, told):
    one = injector("slow rank=0 seconds=0.001 iteration=3 point=committed", tmp_path, told)
    for iteration in range(1, 8):
        one.reached("start", iteration)
        if iteration % 5 == 0:
            one.reached("committed")
    assert [what["iteration"] for what in told] == [5]


def test_replacement_knows_progress_of_lost_worker(tmp_path, told):
    text = "slow rank=1 seconds=0.001 iteration=3 point=loading"
    injector(text, tmp_path, told, rank=1).reached("start", 2)
    injector(text, tmp_path, told, rank=1).reached("loading")
    assert told == []
    injector(text, tmp_path, told, rank=1).reached("start", 3)
    injector(text, tmp_path, told, rank=1).reached("loading")
    assert len(told) == 1


def test_node_fault_hits_all_its_workers(tmp_path, told):
    for rank in range(4):
        one = injector("slow node=1 seconds=0.001 iteration=0", tmp_path, told, rank=rank, node=rank // 2)
        one.reached("start", 1)
        one.reached("start", 1)
    assert [what["rank"] for what in told] == [2, 3]


def test_fault_occurs_requested_times_across_processes(tmp_path, told):
    for iteration in (1, 2, 3, 4):  # each in another process
        one = injector("slow rank=0 seconds=0.001 iteration=2 times=2", tmp_path, told)
        one.reached("start", iteration)
    assert [what["iteration"] for what in told] == [2, 3]


DIES = """
import sys
from pathlib import Path
from moc.fault_points import on_reach, reach
from moc.runtime.fault_injection import Injector, parse_faults

on_reach(Injector(parse_faults("kill rank=0 iteration=2"), 0, 0, Path(sys.argv[1]), lambda what: print(what)).reached)
for iteration in (1, 2, 3):
    reach("start", iteration)
print("lives")
"""


def test_fault_kills_process_but_not_its_replacement(tmp_path):
    run = [sys.executable, "-c", DIES, str(tmp_path)]
    first, second = (subprocess.run(run, cwd=ROOT, capture_output=True, text=True) for _ in range(2))
    assert first.returncode == -signal.SIGKILL and "lives" not in first.stdout
    assert second.returncode == 0 and second.stdout == "lives\n"


def test_point_without_injector_has_no_effect():
    reach("start", 1)


def test_every_named_point_is_reached_in_code():
    reached = set()
    for path in [*(ROOT / "moc").rglob("*.py"), *(ROOT / "megatron").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "reach":
                reached.add(node.args[0].value)
    assert reached == set(POINTS)
