"""A checkpoint that is not whole is never called whole, and what is wrong with it is named."""

import json
import math
import random
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moc.errors import codes_in
from moc.inspect import coverage
from moc.inspect import verify as tool
from moc.inspect.checkpoint import Checkpoint, StoredBox
from moc.inspect.coverage import coverage_problems
from moc.state.operators import Region
from tests.cases import each_row
from tests.errors import only_code
from tests.unit.conftest import REPOSITORY
from tests.unit.inspect.checkpoints import QKV, SLOTS, TENSORS, entries, publish_again, save
from tests.unit.store.test_shard_file import cuts

FIRST, SECOND = "optimizer/rank_00000.safetensors", "optimizer/rank_00001.safetensors"


def verify(capsys, *argv) -> tuple[int, list[str]]:
    """Exit status, and all problems by the tool's JSON."""
    code = tool.main([*map(str, argv), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["whole"] == (code == 0)
    return code, [problem for verdict in told["verified"] for problem in verdict["problems"]]


def named(found: tuple[int, list[str]]) -> tuple[int, list[str]]:
    """Exit status, and the file or tensor that each problem names."""
    return found[0], [problem.partition(": ")[0] for problem in found[1]]


def flip(path, position=None):
    """Flips one bit of a file."""
    content = bytearray(path.read_bytes())
    position = random.randrange(8 * len(content)) if position is None else position
    content[position // 8] ^= 1 << position % 8
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def test_complete_checkpoint_is_verified(capsys, tmp_path):
    directory = save(tmp_path)
    assert verify(capsys, tmp_path) == verify(capsys, directory) == (0, [])
    assert tool.main([str(tmp_path)]) == 0
    verdict, speed = capsys.readouterr().out.splitlines()
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.name != "manifest.json" and path.is_file())
    assert verdict.startswith(f"{directory}: whole") and not codes_in(verdict)
    assert re.findall(r"[\d.]+", verdict.removeprefix(str(directory))) == ["7", f"{size / 1000:.1f}", str(len(TENSORS))]
    assert speed.startswith(f"hashed {size / 1000:.1f} kB in ") and speed.endswith(" GB/s")


@each_row("name", [FIRST, SECOND, ".metadata", "common.pt", "__0_0.distcp", "__1_0.distcp", "training_state.json"])
@each_row(
    "damage, words",
    [(flip, "hash"), (truncate, "bytes"), (lambda path: path.unlink(), "missing")],
    ids=["a flipped bit", "truncated", "missing"],
)
def test_damaged_file_is_named(capsys, tmp_path, name, damage, words):
    damage(save(tmp_path) / name)
    code, (problem,) = verify(capsys, tmp_path)
    assert code == 1 and problem.startswith(f"{name}: ") and (words in problem or "read" in problem)


def test_any_flipped_bit_in_state_is_one_problem(capsys, tmp_path):
    path = save(tmp_path) / "training_state.json"
    whole = path.read_bytes()
    for position in range(0, 8 * whole.index(b"consumed")):  # among them those of the iteration's name and number
        path.write_bytes(whole)
        flip(path, position)
        code, (problem,) = verify(capsys, tmp_path)
        assert code == 1 and problem.startswith("training_state.json: ")


def test_every_header_bit_is_verified(capsys, tmp_path):
    directory = save(tmp_path)
    for position in random.sample(range(8 * 2000), 100):
        flip(directory / FIRST, position)
        code, (problem,) = verify(capsys, tmp_path)
        assert code == 1 and problem.startswith(f"{FIRST}: ") and "hash" in problem
        flip(directory / FIRST, position)
    assert verify(capsys, tmp_path) == (0, [])


def test_missing_file_is_one_problem_with_note(capsys, tmp_path):
    directory = save(tmp_path)
    (directory / FIRST).unlink()
    assert tool.main([str(tmp_path)]) == 1
    verdict, problem, note, _ = capsys.readouterr().out.splitlines()
    assert only_code(verdict) == "checkpoint-not-whole" and str(directory) in verdict and " 1 " in verdict
    assert problem == f"  {FIRST}: is missing"
    assert "note: " in note and "holes" in note


@each_row("name", ["stray.txt", ".hidden", "optimizer/rank_00002.safetensors"])
def test_unlisted_file_is_named(capsys, tmp_path, name):
    (save(tmp_path) / name).write_text("?")
    assert named(verify(capsys, tmp_path)) == (1, [name])


def no_manifest(path):
    path.unlink()
    (path.parent / "training_state.json").unlink()


def edited(**changes):
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@each_row(
    "damage, words",
    [
        (no_manifest, "manifest.json: is missing"),
        (lambda path: path.unlink(), "manifest.json is missing although training_state.json is there"),
        (truncate, "manifest.json is damaged"),
        (edited(format="another"), "is of format 'another'"),
        (edited(iteration=4), "is of iteration 4, and the directory of 3"),
        (edited(iteration=4), "training_state.json: is of iteration 3, manifest.json of 4"),
        (edited(files=7), "is damaged (Expected `object`, got `int` - at `$.files`)"),
        (edited(files={"a": {"bytes": 1}}), "missing required field `xxh3_128`"),
        (edited(files={"../a": {"bytes": 1, "xxh3_128": "0" * 32}}), "'../a' is outside of the checkpoint"),
        (edited(files={}), "does not list training_state.json"),
        (edited(files={}), "lists no weights"),
    ],
)
def test_damaged_or_missing_manifest_is_named(capsys, tmp_path, damage, words):
    damage(save(tmp_path) / "manifest.json")
    code, problems = verify(capsys, tmp_path)
    assert code == 1 and any("manifest.json" in problem and words in problem for problem in problems)


def without(wanted):
    return lambda workers: [[entry for entry in boxes if not wanted(entry)] for boxes in workers]


def changed(**fields):
    """Changes the first box of the first worker that is of the QKV weight's first moment."""

    def change(workers):
        at = next(i for i, e in enumerate(workers[0]) if (e.name, e.slot) == (QKV, "exp_avg"))
        workers[0][at] = replace(workers[0][at], **fields)
        return workers

    return change


def doubled(workers):
    box = next(e for e in workers[0] if (e.name, e.slot) == (QKV, "master"))
    return [workers[0], [*workers[1], box]]


def is_slot(name, slot):
    return lambda entry: (entry.name, entry.slot) == (name, slot)


@each_row(
    "change, problems",
    [
        (
            without(lambda e: is_slot(QKV, "exp_avg")(e) and e.region.offset == (5, 3)),
            [f"{QKV}: exp_avg has a hole at [5:6, 3:4]: 1 of 48 elements are in no file"],
        ),
        (doubled, [f"{QKV}: master overlaps at [0:5, 0:4] in {FIRST} and {SECOND}"]),
        (
            changed(region=Region((1, 0), (5, 4))),
            [
                f"{QKV}: exp_avg overlaps at [5:6, 0:3] in {FIRST} and {FIRST}",
                f"{QKV}: exp_avg has a hole at [0:1, 0:4]: 4 of 48 elements are in no file",
            ],
        ),
        (
            changed(region=Region((8, 0), (5, 4))),
            [f"{QKV}: exp_avg [8:13, 0:4] in {FIRST} reaches out of the tensor, which is [0:12, 0:4]"],
        ),
        (
            changed(global_shape=(13, 4)),
            [f"{QKV}: its boxes are of tensors of different shapes, (12, 4) and (13, 4)"],
        ),
        (without(is_slot(QKV, "exp_avg_sq")), [f"{QKV}: has no exp_avg_sq"]),
        (without(lambda e: e.slot == "exp_avg"), ["exp_avg: no file holds it for any tensor"]),
        (
            without(lambda e: "experts.1" in e.name),
            ["layers.0.expert.1: no file holds any optimizer state of it"],
        ),
        (
            without(lambda e: "layers.1." in e.name),
            [f"layers.1.{kind}: no file holds any optimizer state of it" for kind in ("attention", "mlp")],
        ),
    ],
    ids=["hole", "overlap", "moved", "outside", "shape", "slot of a tensor", "slot", "expert", "layer"],
)
def test_wrongly_saved_optimizer_state_is_described(capsys, tmp_path, change, problems):
    save(tmp_path, workers=change(entries()))
    assert verify(capsys, tmp_path) == (1, problems)


@each_row(
    "content",
    [b"", b"short", b"\xff" * 100, b"\x02" + b"\0" * 7 + b"[]", b"\x02" + b"\0" * 7 + b"{}"],
    ids=str,
)
def test_file_with_invalid_header_is_named(capsys, tmp_path, content):
    directory = save(tmp_path)
    (directory / FIRST).write_bytes(content)
    publish_again(directory)
    code, (problem,) = verify(capsys, tmp_path)
    assert code == 1 and problem.startswith(f"{FIRST}: ") and "header" in problem


def test_file_longer_than_its_header_is_named(capsys, tmp_path):
    directory = save(tmp_path)
    (directory / FIRST).write_bytes((directory / FIRST).read_bytes() + b"more")
    publish_again(directory)
    code, (problem,) = verify(capsys, tmp_path)
    assert code == 1 and problem.startswith(f"{FIRST}: ") and "header" in problem and "describes" in problem


def test_optimizer_state_is_required_only_if_recorded(capsys, tmp_path):
    save(tmp_path, 3, workers=[], optimizer=None)
    assert verify(capsys, tmp_path) == (0, [])
    save(tmp_path, 4, workers=[])
    code, (problem,) = verify(capsys, tmp_path)
    assert code == 1 and problem.startswith("manifest.json: ") and "adam" in problem


@each_row("state", [{"shape": {}}, {"shape": 3}, {"shape": {**dict.fromkeys(("num_layers",), "2")}}])
def test_invalid_training_state_is_named(capsys, tmp_path, state):
    save(tmp_path, **state)
    code, (problem,) = verify(capsys, tmp_path)
    assert code == 1 and problem.startswith("training_state.json: ")


def boxes_of(regions, shape, slots=SLOTS):
    return [StoredBox("f", "w", s, shape, region, 4 * region.numel) for s in slots for region in regions]


def problems(boxes):
    return coverage_problems(Checkpoint(Path("c"), {}), boxes)


@given(st.data())
def test_holes_and_overlaps_in_any_partition_are_detected(data):
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    cut = [region for region in data.draw(cuts(shape)) if region.numel]
    assert problems(boxes_of(cut, shape)) == []
    some = data.draw(st.sampled_from(cut))
    (double,) = problems(boxes_of([*cut, some], shape, ["master"]))
    assert double.startswith("w: ") and "overlaps" in double
    if len(cut) > 1:
        cut.remove(some)
        (hole,) = problems(boxes_of(cut, shape, ["master"]))
        assert f": {some.numel:,} of {math.prod(shape):,} " in hole


def test_scalar_tensor_is_covered_once():
    assert problems(boxes_of([Region((), ())], ())) == []
    assert "overlaps" in problems(boxes_of([Region((), ())] * 2, (), ["master"]))[0]


@each_row(
    "tracker, problem",
    [
        ("7", " 7,"),
        ("six", "hold"),
        ("", "hold"),
        (None, "missing"),
    ],
)
def test_invalid_tracker_is_named(capsys, tmp_path, tracker, problem):
    save(tmp_path, 3)
    save(tmp_path, 6)
    path = tmp_path / "latest_checkpointed_iteration.txt"
    path.write_text(tracker) if tracker is not None else path.unlink()
    code, (found,) = verify(capsys, tmp_path)
    assert code == 1 and found.startswith(f"{path.name}: ") and problem in found
    assert verify(capsys, tmp_path, "--iteration", "6") == (0, [])


def test_older_tracker_is_only_noted(capsys, tmp_path):
    save(tmp_path, 3)
    save(tmp_path, 6)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    assert tool.main([str(tmp_path)]) == 0
    assert re.search("note: .*3.*--ckpt-step 6", capsys.readouterr().out)


def test_leftover_directories_are_only_noted(capsys, tmp_path):
    save(tmp_path)
    for name in (".iter_0000004.incomplete", ".iter_0000002.replaced"):
        (tmp_path / name).mkdir()
    assert tool.main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "note: .iter_0000004.incomplete: " in text
    assert "note: .iter_0000002.replaced: " in text


def test_selected_checkpoints_are_verified(capsys, tmp_path):
    flip(save(tmp_path, 3) / "common.pt")
    save(tmp_path, 6)
    damage = ["common.pt"]
    assert verify(capsys, tmp_path) == (0, [])
    assert named(verify(capsys, tmp_path, "--iteration", "3")) == (1, damage)
    assert named(verify(capsys, tmp_path, "--all", "--workers", "1")) == (1, damage)
    assert named(verify(capsys, tmp_path / "iter_0000006", tmp_path / "iter_0000003")) == (1, damage)
    code, (missing,) = verify(capsys, tmp_path, "--iteration", "5")
    assert code == 1 and re.findall(r"\d", missing) == ["5", "3", "6"]


def test_directory_without_checkpoints_is_a_problem(capsys, tmp_path):
    found = code, (problem,) = verify(capsys, tmp_path)
    assert code == 1 and "checkpoint" in problem and verify(capsys, tmp_path, "--all") == found


@each_row(
    "argv",
    [
        [],
        ["nowhere"],
        [".", "--workers", "0"],
        [".", "--all", "--iteration", "3"],
        ["iter_0000003", "--all"],
        ["iter_0000003", "--iteration", "3"],
    ],
    ids=str,
)
def test_usage_error_exits_with_code_2(tmp_path, monkeypatch, argv):
    save(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        tool.main(argv)
    assert ended.value.code == 2


@pytest.mark.parametrize("tool", ["verify_checkpoint", "inspect_checkpoint"])
def test_tools_do_not_import_torch(tmp_path, tool):
    save(tmp_path)
    program = f"import sys, {tool}; {tool}.main([{str(tmp_path)!r}]); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(REPOSITORY / "tools")}, capture_output=True, text=True
    )
    assert done.stdout.endswith("False\n"), done.stderr


def test_coverage_requires_each_element_exactly_once():
    """Compared with counting elements, for random boxes of small tensors."""
    rng, whole = random.Random(4), 0
    for _ in range(3000):
        shape = tuple(rng.randint(1, 3) for _ in range(rng.randint(0, 3)))
        boxes, counts = [], numpy.zeros(shape, dtype=int)
        while counts.min() == 0 and len(boxes) < 30:
            offset = tuple(rng.randrange(size) for size in shape)
            part = tuple(rng.randint(1, size - at) for size, at in zip(shape, offset, strict=True))
            here = tuple(slice(at, at + size) for at, size in zip(offset, part, strict=True))
            if rng.random() < 0.02 or not counts[here].any():
                counts[here] += 1
                boxes.append(StoredBox("file", "w", "master", shape, Region(offset, part), 0))
        problems = list(coverage._problems_of_tensor("w", {"master": boxes}))
        assert bool(problems) == bool((counts != 1).any())
        whole += not problems
    assert whole > 100


@each_row("reach", [lambda n, many: (2 * many - n, 1), lambda n, many: (2 * many, 1), lambda *_: (1, 1)])
def test_coverage_check_runs_in_linear_time(reach):
    def seconds(many):
        regions = [Region((n, n), reach(n, many)) for n in range(many)]
        boxes = [StoredBox("file", "w", "master", (4 * many, 4 * many), region, 0) for region in regions]
        began = time.process_time()
        assert list(coverage._problems_of_tensor("w", {"master": boxes}))
        return time.process_time() - began

    assert seconds(100_000) < 25 * seconds(10_000)  # 100 times if every box were compared with every other
