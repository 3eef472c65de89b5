"""Recoveries verify the restored state by the digests of its iteration, and do not use state that has changed."""

import json
import random
import re
import shutil

import pytest

from megatron.pretraining.convert import program
from megatron.pretraining.convert.snapshot import SnapshotContents
from moc.errors import codes_in
from moc.store.dense_files import DIGESTS_FILE
from moc.store.storage import LocalStorage
from moc.store.store import Store
from tests.errors import only_code
from tests.integration.entry_jobs import EP2, USER_SCRIPT, ZERO1, run
from tests.integration.launched import Launched
from tests.integration.snapshot_files import contents, events, node_memory, start, train
from tests.integration.test_precision import BF16
from tests.integration.tiny import DEEP, EXPERT_BIAS, FOUR
from tests.shared import ALL

PROGRAM = "tests/integration/flipping_pretrain_gpt_moe.py"
FLIPPING_SCRIPT = USER_SCRIPT.with_name("flipping_user_pretrain.py")
LAST, SAVED = 14, 7
EACH = dict(ckpt_policy="full", snapshot_interval=1, train_iters=LAST)
LAYOUTS_OF_ALL_KINDS = ("1", "DP2", "DP4xEP2", "EP4", "TP2xEP2", "PP2xTP2", "PP2", "PP4", "interleaved")
OPERATORS = 30
CASES: dict[str, tuple[str, str, dict, str]] = {
    "kept by a survivor": ("DP2", "0 7 kept", dict(ckpt_tier="memory"), "kill rank=1 iteration=8 point=before_commit"),
    "kept by a replica": (
        "DP2",
        "1 7 kept",
        dict(ckpt_tier="memory", use_distributed_optimizer=False),
        "kill rank=0 iteration=8 point=before_commit",
    ),
    "schedule": (
        "DP2",
        "0 7 schedule",
        dict(ckpt_tier="memory", use_distributed_optimizer=False),
        "kill rank=1 iteration=8 point=before_commit",
    ),
    "weights": ("DP2", "0 7 weights", BF16 | dict(ckpt_tier="memory"), "kill rank=1 iteration=8 point=before_commit"),
    "kept, all snapshots older": (
        "PP2",
        "0 7 kept",
        dict(ckpt_policy="sparse", sparse_window=2, upstream_logging=True, ckpt_tier="memory"),
        "kill rank=1 iteration=8 point=before_commit",
    ),
    "saved in memory": (
        "PP2",
        "0 7 saved",
        dict(ckpt_tier="memory", persist_interval=3),
        "kill rank=0 iteration=8 point=before_commit",
    ),
    "saved on disk": ("EP2", "1 7 saved", BF16, "kill ranks=0,1 iteration=8 point=before_commit"),
}


DRAWN_LAYOUTS = ("DP2", "EP2", "PP2", "TP2", "interleaved")
DRAWN_FLAGS: tuple[dict, ...] = ({}, BF16, BF16 | EXPERT_BIAS, EXPERT_BIAS, dict(use_distributed_optimizer=False))


DRAWN_POLICIES: tuple[dict, ...] = (
    {},
    dict(ckpt_policy="sparse", sparse_window=2),
    dict(ckpt_policy="gradient", gradient_window=3, persist_interval=6),
)


def drawn(seed: int) -> tuple[str, str, dict, str]:
    """Draws layout, flags, policy, tier, moment, tensor and bit of a case."""
    chance = random.Random(seed)
    layout, flags = chance.choice(DRAWN_LAYOUTS), chance.choice(DRAWN_FLAGS)
    moment = chance.choice(("kept", "saved", "weights"))
    if moment == "saved":
        tier, lost = chance.choice(("disk", "memory")), "ranks=0,1"
        if "use_distributed_optimizer" in flags:
            flags = {}  # another replica may be the one that is saved
        if tier == "memory":  # which has one snapshot, so storage needs an older one
            flags = flags | dict(persist_interval=3)
    else:
        tier = chance.choice(("memory", "peers") if layout != "TP2" else ("memory",))
        lost = "node=1" if tier == "peers" else "rank=1"
        flags = flags | chance.choice(DRAWN_POLICIES) | (BF16 if moment == "weights" else {})
        if flags.get("ckpt_policy") == "sparse" and layout in ("PP2", "interleaved"):
            flags = flags | dict(upstream_logging=True)
    return (
        layout,
        f"0 7 {moment} {seed}",
        flags | dict(ckpt_tier=tier),
        f"kill {lost} iteration=8 point=before_commit",
    )


CASES |= {f"drawn {seed}": drawn(seed) for seed in (range(12) if ALL else ())}


@pytest.mark.recovery
@pytest.mark.parametrize("case", CASES)
def test_changed_bit_is_detected_named_and_not_used(case, data, tmp_path, monkeypatch):
    layout, flip, changes, fault = CASES[case]
    flags, nodes = data | EACH | changes, 2 if changes.get("ckpt_tier") == "peers" else 1
    monkeypatch.setenv("TEST_FLIP", flip)
    if nodes > 1:
        monkeypatch.setenv("TEST_LOSES", "1")
    with node_memory() as memory:
        places = dict(ckpt_dir=str(tmp_path / "c"), ckpt_memory_dir=memory, inject=[fault])
        how = dict(program=PROGRAM, nodes=nodes, spares=nodes - 1)
        with Launched(layout, flags | places, tmp_path / "job", **how) as job:
            assert job.wait() == 0, job.console[-4000:]
    changed = (tmp_path / "job" / "flipped").read_text()
    warnings = [line for line in job.console.splitlines() if "state-digest-differs" in line]
    may_not_use_it = "ckpt_policy" in changes or nodes > 1  # which may resume from an older snapshot anyway
    assert len(warnings) == 1 or not warnings and may_not_use_it
    assert all(changed in warning for warning in warnings)
    (resumed,) = job.events("resume")
    assert resumed["iteration"] <= SAVED and resumed["wrong"] == []
    dense = data | EACH | changes | dict(ckpt_policy="full", ckpt_tier="disk", snapshot_interval=LAST)
    dense = {
        name: value
        for name, value in dense.items()
        if not name.startswith(("sparse", "upstream", "gradient_window", "persist"))
    }
    train(layout, dense | dict(ckpt_dir=str(tmp_path / "straight")))
    ends = [Store(LocalStorage(tmp_path / name)) for name in ("c", "straight")]
    assert contents(ends[0], LAST) == contents(ends[1], LAST)


@pytest.mark.recovery
def test_digests_do_not_depend_on_layout(data, tmp_path):
    saved, flags = tmp_path / "saved", data | BF16 | EXPERT_BIAS | DEEP | FOUR | EACH | dict(snapshot_interval=3)
    train("PP2xEP2", flags | dict(ckpt_dir=str(saved), exit_interval=3))
    for layout in LAYOUTS_OF_ALL_KINDS:
        here = tmp_path / layout
        shutil.copytree(saved, here / "c")
        places = dict(ckpt_dir=str(here / "c"), log_dir=str(here / "log"))
        assert train(layout, flags | places | dict(exit_interval=4)).start == 3
        (resumed,) = events(places, "resume")
        assert (resumed["unverified"], resumed["wrong"]) == ([], []) and resumed["verified"] == OPERATORS, layout


def test_state_without_digests_is_not_verified(data, tmp_path):
    places = dict(ckpt_dir=str(tmp_path / "c"), log_dir=str(tmp_path / "log"))
    flags = data | EACH | places | dict(digest_interval=0)
    train("1", flags | dict(exit_interval=3))
    train("1", flags | dict(exit_interval=4))
    (resumed,) = events(places, "resume")
    assert (resumed["verified"], resumed["unverified"]) == (0, [])
    assert not Store(LocalStorage(tmp_path / "c")).read_manifest(3).digests


DENSE = dict(train_iters=LAST, exit_interval=3)
DENSE_CASES: dict[str | int, tuple[str, str, dict]] = dict.fromkeys(("param", "exp_avg"), ("PP2xEP2", "EP2", BF16))


def drawn_dense(seed: int) -> tuple[str, str, dict]:
    """Draws the layouts of a save and of the start from it, and flags."""
    chance, layouts = random.Random(seed), ("1", "DP2", "EP2", "PP2", "TP2", "PP2xEP2", "TP2xEP2")
    return chance.choice(layouts), chance.choice(layouts), chance.choice(DRAWN_FLAGS)


DENSE_CASES |= {seed: drawn_dense(seed) for seed in (range(12) if ALL else ())}


@pytest.mark.parametrize("drawn", DENSE_CASES)
def test_changed_bit_of_dense_checkpoint_is_named(drawn, data, tmp_path, capsys):
    (layout, loads, changes), saved = DENSE_CASES[drawn], tmp_path / "saved"
    flags = data | FOUR | EXPERT_BIAS | DENSE | changes
    told = start(layout, flags | dict(save=str(saved)), "snapshot_bodies:train_and_flip", drawn=drawn).wait()
    changed = told[0].value
    assert changed, told[0].output[-4000:]
    try:
        resumed = train(loads, flags | dict(load=str(saved)))
    except AssertionError as failed:
        assert "state-digest-differs" in str(failed) and changed in str(failed)
    else:  # another worker's copy of the tensor was saved
        train(layout, flags | dict(save=str(tmp_path / "unchanged")))
        assert resumed.weights == train(loads, flags | dict(load=str(tmp_path / "unchanged"))).weights
        assert isinstance(drawn, int)
        return
    for output, target in (("snapshots", "snapshot"), ("hf", "hf")):
        assert program.main([str(saved), str(tmp_path / output), "--to", target]) == 1
        errors = capsys.readouterr().err
        assert codes_in(errors) == ["state-digest-differs"] and changed in errors
        assert not (tmp_path / output).exists()


def test_dense_checkpoint_digests_ignore_layout(data, tmp_path):
    flags, saved = data | BF16 | EXPERT_BIAS | FOUR | DENSE, tmp_path / "saved"
    train("PP2xEP2", flags | dict(save=str(saved)))
    assert (saved / "iter_0000003" / DIGESTS_FILE).exists()
    for layout in ("TP2xEP2", "DP2"):
        assert train(layout, flags | dict(load=str(saved), exit_interval=4)).start == 3
    assert program.main([str(saved), str(tmp_path / "snapshots")]) == 0
    assert program.main([str(tmp_path / "snapshots"), str(tmp_path / "dense")]) == 0
    stored = [(root / "iter_0000003" / DIGESTS_FILE).read_text() for root in (saved, tmp_path / "dense")]
    assert json.loads(stored[0]) == json.loads(stored[1])
    assert train("1", flags | dict(load=str(tmp_path / "dense"), exit_interval=4)).start == 3
    places = dict(ckpt_policy="full", ckpt_dir=str(tmp_path / "snapshots"), log_dir=str(tmp_path / "log"))
    assert train("EP2", flags | places | dict(exit_interval=4)).start == 3
    (resumed,) = events(places, "resume")
    assert (resumed["unverified"], resumed["wrong"]) == ([], []) and resumed["verified"] > 0


SAVES = {  # flags of the save, and of the start from it
    "weights": ("param", "", ""),
    "moments, ZeRO": ("exp_avg_sq", f"{ZERO1} --bf16", f"{ZERO1} --bf16"),
    "moments": ("exp_avg", "", ""),
    "weights only": ("param", "--no-save-optim", "--no-load-optim"),
    "weights only, finetuning": ("param", "", "--finetune"),
}


@pytest.mark.parametrize("case", SAVES)
def test_changed_bit_in_megatron_lm_script_is_named(case, tmp_path, monkeypatch):
    slot, saves, loads = SAVES[case]
    monkeypatch.setenv("TEST_FLIP", slot)
    saved = run(tmp_path, FLIPPING_SCRIPT, 2, f"{EP2} {saves} --save saved --save-interval 2 --exit-interval 2")
    (changed,) = re.findall(r"changed (\S+)", saved.output)
    assert saved.code == 0, saved.output[-4000:]
    resumed = run(tmp_path, USER_SCRIPT, 2, f"{EP2} {loads} --load saved", log="resumed")
    (error,) = [line for line in resumed.output.splitlines() if "user_pretrain.py: error" in line]
    assert resumed.code == 1 and only_code(error) == "state-digest-differs" and changed in error


def test_checkpoint_without_digests_is_reported(tmp_path):
    flags = f"{EP2} --save saved --save-interval 2 --exit-interval 2 --digest-interval 0"
    assert run(tmp_path, USER_SCRIPT, 2, flags).code == 0
    resumed = run(tmp_path, USER_SCRIPT, 2, f"{EP2} --load saved --exit-interval 3", log="resumed")
    assert resumed.code == 0 and "is not verified: the checkpoint has no digests" in resumed.output


def test_changed_snapshot_is_not_converted(data, tmp_path, monkeypatch, capsys):
    train("1", data | EACH | dict(ckpt_dir=str(tmp_path / "c"), exit_interval=3))
    assert program.main([str(tmp_path / "c"), str(tmp_path / "dense")]) == 0
    read = SnapshotContents.read

    def change(self, name, slot, region):
        values = read(self, name, slot, region)
        return -values if (name, slot) == ("decoder.final_layernorm.weight", "exp_avg") else values

    monkeypatch.setattr(SnapshotContents, "read", change)
    assert program.main([str(tmp_path / "c"), str(tmp_path / "other")]) == 1
    errors = capsys.readouterr().err
    assert codes_in(errors) == ["state-digest-differs"] and "output" in errors
