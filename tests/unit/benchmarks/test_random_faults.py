"""What a campaign of random faults takes for a failure."""

import json
import random

from benchmarks.faults.drawn import FACTORS, LEAST, draw_runs, is_valid
from benchmarks.faults.recovery import ALONE, ELECTED, LOSSES, SEVERAL, During, Recoveries, Trouble, troubles
from benchmarks.faults.run import LAYOUTS, TIERS, End, differences, missing, mistakes
from benchmarks.live.job import Events
from benchmarks.random_faults import (
    Row,
    _somewhere,
    _write,
    computed_again,
    from_outside,
    of_selective,
    parse,
    summary,
)
from tests.cases import each_row

EXPECTED = End({1: (2.0, 0.5), 2: (1.5, 0.4)}, {"box": "a", "other": "b"})


@each_row(
    "ended, wrong",
    [
        (End({1: (2.0, 0.5), 2: (1.5, 0.4)}, {"box": "a", "other": "b"}), []),
        (End({1: (2.0, 0.5), 2: (1.5, 0.41)}, EXPECTED.hashes), ["losses differ in iterations [2]"]),
        (End({2: (1.5, 0.4)}, EXPECTED.hashes), ["losses differ in iterations [1]"]),
        (End(EXPECTED.losses, {"box": "a", "other": "c"}), ["1 of 2 tensors differ"]),
        (
            End(EXPECTED.losses, EXPECTED.hashes, frozenset({(2, "valid", 1.0)})),
            ["evaluations differ after iterations [2]"],
        ),
        (End(EXPECTED.losses, {}), ["2 of 2 tensors differ"]),
        (End(EXPECTED.losses, EXPECTED.hashes | {"third": "c"}), ["1 of 3 tensors differ"]),
    ],
)
def test_differences_from_expected_end_are_listed(ended, wrong):
    assert differences(ended, EXPECTED) == wrong


def test_all_faults_are_counted():
    rows = [
        Row("PP2xEP2", "disk", 0, ["kill 1 at 3, start", "stop 0 at 5, start"]),
        Row(
            "PP2xEP2",
            "memory",
            1,
            ["kill 1 at 4, loading", "replica_server 0 at 4, outside"],
            wrong=["exit code 1"],
            again=[2, 5],
        ),
    ]
    assert summary(rows) == {
        "runs": 2,
        "equal": 1,
        "wrong": 1,
        "hangs": 0,
        "leftovers": 0,
        "faults": 4,
        "by_point": {"start": 2, "loading": 1, "outside": 1},
        "by_action": {"kill": 2, "stop": 1, "replica_server": 1},
        "computed_again": {"recoveries": 2, "mean": 3.5, "most": 5},
        "computed_again_by_all": None,
        "killed_inside_micro_batches_by_value": {},
    }


def test_kills_inside_micro_batches_are_counted_by_value():
    fired = [["kill 1 at 3, forward_backward", "kill 0 at 5, forward_backward"], ["kill 1 at 3, completed"]]
    rows = [Row("DP2", "disk", 0, faults, values={"loss": "aux"}) for faults in (*fired, ["stop 1 at 2, start"])]
    assert summary(rows)["killed_inside_micro_batches_by_value"] == {"loss: aux": 1}


def test_replayed_iterations_belong_to_their_recovery():
    replay, kept, lost = {"type": "replay"}, {"type": "resume", "stages": []}, {"type": "generation"}
    events = [kept, lost, replay, lost, replay, replay, {"type": "resume", "stages": [1]}, {"type": "iteration"}]
    events += [lost, replay, kept]
    assert computed_again(events) == ([2], [1])


@each_row("action", ["stop", "slow"])
def test_same_seed_selects_same_worker(action):
    assert _somewhere(action, random.Random(3), 4, 20) == _somewhere(action, random.Random(3), 4, 20)
    assert parse([]).layouts == list(LAYOUTS)


@each_row("tier", TIERS)
@each_row("layout", LAYOUTS)
def test_every_external_fault_is_drawn(layout, tier):
    for seed in range(20):
        done = from_outside(random.Random(seed), layout, tier, 24)
        lost = () if tier == "selective, all" else ("node",)  # everything is exact, so it must not be lost with a node
        assert {"controller", "agent", *lost} <= {one.action for one in done}
        assert all(2 <= one.iteration <= 24 - 5 for one in done)
        replica_servers = [one.node for one in done if one.action == "replica_server"]
        assert len(replica_servers) == ("peers" in tier and layout != "DP4, replicated") and set(replica_servers) <= {
            0,
            1,
        }


class Standing:
    """A run that recovers when it is told to."""

    def __init__(self):
        self.iteration, self.met = 0, []

    def reached(self):
        return self.iteration

    def kill_worker(self, rank):
        self.met.append(rank)
        return True

    def disturb_recovery(self, what):
        self.met.append(what.action)
        return what.action != "zygote"


def test_faults_are_injected_during_recovery(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("benchmarks.faults.recovery.time.monotonic", lambda: clock[0])
    during = During("controller", 0.5, 0, 0), During("zygote", 0.9, 0, 1)
    run, recoveries = Standing(), Recoveries((Trouble(2, 1, during), Trouble(4, 0, during)))
    recoveries.look(run)
    assert run.met == []
    run.iteration = 4  # the second one waits until the first is over
    for moment, met in ((0.0, [1]), (1.4, [1]), (1.6, [1, "controller"]), (3.0, [1, "controller", "zygote"])):
        clock[0] = moment
        recoveries.look(run)
        assert run.met == met
    run.iteration, clock[0] = 5, 10.0
    recoveries.look(run)
    assert recoveries.seconds == [10.0]
    recoveries.look(run)
    clock[0] = 14.9
    recoveries.look(run)
    assert run.met[3:] == [0]  # a recovery takes 10 seconds now
    assert recoveries.done == ["kill 1 at 2, outside", "controller 0 at 0.50, recovery", "kill 0 at 4, outside"]


@each_row("nodes, candidates, possible", [(1, 1, ALONE), (2, 1, SEVERAL), (2, 3, ELECTED)])
def test_every_possible_recovery_fault_is_drawn(nodes, candidates, possible):
    def drawn(seed):
        return troubles(random.Random(seed), 4, nodes, 24, candidates=candidates)

    during = [trouble.during for seed in range(40) for trouble in drawn(seed)]
    assert {one.action for several in during for one in several} == set(possible)
    assert all(one.node < max(nodes, candidates) and 0 <= one.share < 1 for several in during for one in several)
    assert candidates == 1 or all(sum(one.action in LOSSES for one in several) <= 1 for several in during)
    assert drawn(3) == drawn(3)


def test_partial_snapshot_run_must_end_completely():
    assert missing(End({1: (9.0, 9.0), 2: (8.0, 8.0)}, {"box": "z"}), EXPECTED) == []
    assert missing(End({1: (9.0, 9.0)}, {"box": "z"}), EXPECTED) == ["iterations [2] are not reported"]
    assert len(missing(End(EXPECTED.losses, {}), EXPECTED)) == 1
    assert len(missing(End(EXPECTED.losses, {"other model's": "a"}), EXPECTED)) == 1


def told(tmp_path, *stale, lost=0):
    lines = [{"type": "resume", "sources": [[3, "memory"]], "stale": number} for number in stale]
    lines += [{"type": "lost"}] * (len(stale) - lost)
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps({"time": 0.0, **line}) + "\n" for line in lines))
    return Events(path)


def test_bits_are_compared_unless_experts_were_stale(tmp_path):
    other = End(EXPECTED.losses, {"box": "z", "other": "b"})
    assert mistakes(EXPECTED, EXPECTED, told(tmp_path, 0, 0)) == []
    assert mistakes(other, EXPECTED, told(tmp_path, 0, 0)) == ["1 of 2 tensors differ"]
    assert mistakes(other, EXPECTED, told(tmp_path, 0, 3)) == []
    assert len(mistakes(other, EXPECTED, told(tmp_path, 0, 3, lost=1))) == 1


def test_workers_killed_with_unusual_selective_snapshots():
    def points(tier, nodes):
        return [fault.point for fault in of_selective(random.Random(1), tier, 4, nodes, 16)]

    assert points("selective, fewer copies", 2) == ["gradient_staged", "folding", "peers_committed"]
    assert points("selective, fewer copies, states", 2) == ["peers_committed"]
    assert points("selective, all, peers", 1) == ["gradient_staged", "folding"]
    assert points("selective, disk", 2) == points("pec", 2) == []


def test_campaign_parts_are_merged(tmp_path):
    own = parse(["--append", str(tmp_path / "all.json"), "--moments", "recoveries"])
    _write(own, [Row("PP4", "disk", 1, ["kill 1 at 3, outside"])])
    _write(
        own, [Row("PP4", "disk", 2, ["kill 1 at 3, outside"], stand=["hangs"], wrong=["no end"], left=["x is left"])]
    )
    told = json.loads((tmp_path / "all.json").read_text())
    counts = {name: told["summary"][name] for name in ("runs", "faults", "equal", "wrong", "hangs", "leftovers")}
    assert counts == {"runs": 2, "faults": 2, "equal": 1, "wrong": 0, "hangs": 1, "leftovers": 1}


@each_row("seed", range(5))
def test_drawn_runs_are_valid_and_cover_each_value(seed):
    runs = draw_runs(seed, 24)
    assert runs == draw_runs(seed, 24) != draw_runs(seed + 1, 24)
    assert all(is_valid(run.values) for run in runs)
    for factor, values in FACTORS.items():
        counts = [sum(run.values[factor] == value for run in runs) for value in values]
        assert min(counts) >= LEAST, factor
