"""The tables add up, by whatever they are grouped, and say when something is missing."""

import json
import math
import re
from dataclasses import replace

import pytest

from moc.inspect import summary
from tests.cases import each_row
from tests.errors import only_code
from tests.unit.inspect.checkpoints import PARAMETERS, SLOTS, STATE, TENSORS, entries, save

KINDS = ["embedding", "attention", "mlp", "router", "expert", "output"]
OPERATORS = ["embedding", "layers.0.attention", "layers.0.mlp", "layers.0.router", "layers.0.expert.0"]
OPERATORS += ["layers.0.expert.1", "layers.1.attention", "layers.1.mlp", "output"]


def inspect(capsys, *argv) -> dict:
    assert summary.main([*map(str, argv), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@each_row(
    "by, names",
    [
        ("kind", KINDS),
        ("operator", OPERATORS),
        ("file", [f"optimizer/rank_0000{worker}.safetensors" for worker in (0, 1)]),
    ],
)
def test_rows_add_up_to_totals(capsys, tmp_path, by, names):
    save(tmp_path)
    rows = inspect(capsys, tmp_path, "--by", by)["rows"]
    assert [row["name"] for row in rows] == names
    assert sum(row["parameters"] for row in rows) == PARAMETERS
    for row in rows:
        assert row["slots"] == dict.fromkeys(SLOTS, 4 * row["parameters"])
        assert row["bytes"] == 12 * row["parameters"]


def test_operator_rows_count_their_tensors(capsys, tmp_path):
    save(tmp_path)
    rows = {row["name"]: row for row in inspect(capsys, tmp_path, "--by", "operator")["rows"]}
    assert [row["parameters"] for row in rows.values()] == [math.prod(shape) for shape in TENSORS.values()]
    kinds = {row["name"]: row["operators"] for row in inspect(capsys, tmp_path)["rows"]}
    assert kinds == {"embedding": 1, "attention": 2, "mlp": 2, "router": 1, "expert": 2, "output": 1}


def test_summary_lists_checkpoint_facts(capsys, tmp_path):
    directory = save(tmp_path)
    told = inspect(capsys, tmp_path)
    same = ("consumed_samples", "skipped_iterations", "optimizer", "optimizer_step", "shape")
    assert {name: told[name] for name in same} == {name: STATE[name] for name in same}
    assert (told["path"], told["iteration"], told["loss_scale"]) == (str(directory), 3, 65536.0)
    weights = sum((directory / f"__{worker}_0.distcp").stat().st_size for worker in (0, 1))
    assert told["weights"] == {"files": 2, "bytes": weights}
    assert told["optimizer_state"]["tensors"] == len(TENSORS) and told["optimizer_state"]["files"] == 2
    assert told["complete"] and told["problems"] == []


@each_row("scaler", [None, {}])
def test_missing_loss_scale_is_null(capsys, tmp_path, scaler):
    save(tmp_path, grad_scaler=scaler)
    assert inspect(capsys, tmp_path)["loss_scale"] is None


def test_layers_and_experts_are_in_numeric_order():
    names = ["layers.10.expert.2", "output", "layers.2.expert.10", "layers.2.expert.9", "layers.2.router", "embedding"]
    assert sorted(names, key=summary._operator_position) == [
        "embedding", "layers.2.router", "layers.2.expert.9", "layers.2.expert.10", "layers.10.expert.2", "output"
    ]  # fmt: skip


def test_table_shows_state_and_totals(capsys, tmp_path):
    save(tmp_path, optimizer_step=77)
    for by in ("kind", "operator", "file"):
        assert summary.main([str(tmp_path), "--by", by]) == 0
        text = capsys.readouterr().out
        lines = {line.split()[0]: re.findall(r"\d+", line) for line in text.splitlines() if line.strip()}
        assert lines["iteration"] == ["3", "24", "1"] and "65536" in text and re.search(r"adam, .*77", text)
        assert "num_layers 2" in text and re.search(r"^complete +yes", text, re.MULTILINE)
        total = next(line.split() for line in text.splitlines() if line.split()[:1] == ["total"])
        assert f"{PARAMETERS:,}" in total and total[-2:] == ["100.0", "%"]


def test_missing_file_is_named_and_rest_shown(capsys, tmp_path):
    directory = save(tmp_path)
    (directory / "optimizer" / "rank_00001.safetensors").unlink()
    assert summary.main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "no, 1 problem:" in text and "optimizer/rank_00001.safetensors: is missing" in text
    assert 0 < sum(row["parameters"] for row in inspect(capsys, tmp_path)["rows"]) < PARAMETERS


def test_hole_is_reported(capsys, tmp_path):
    workers = entries()
    save(tmp_path, workers=[workers[0][1:], workers[1]])
    told = inspect(capsys, tmp_path)
    assert not told["complete"] and "has a hole" in told["problems"][0]


def test_unsaved_optimizer_state_is_shown(capsys, tmp_path):
    save(tmp_path, workers=[], optimizer=None)
    assert summary.main([str(tmp_path)]) == 0
    assert "not saved" in capsys.readouterr().out
    assert inspect(capsys, tmp_path)["rows"] == []


def test_unknown_tensors_form_row_other(capsys, tmp_path):
    workers = entries()
    workers[0] += [
        replace(entry, name="decoder.adapter.weight", values=entry.values.clone()) for entry in workers[0][:1]
    ]
    save(tmp_path, workers=workers)
    assert [row["name"] for row in inspect(capsys, tmp_path)["rows"]] == [*KINDS, "other"]


def test_requested_or_tracked_checkpoint_is_selected(capsys, tmp_path):
    for iteration in (3, 6):
        save(tmp_path, iteration)
    assert inspect(capsys, tmp_path)["iteration"] == 6
    assert inspect(capsys, tmp_path, "--iteration", 3)["iteration"] == 3
    assert inspect(capsys, tmp_path / "iter_0000003")["iteration"] == 3
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    assert inspect(capsys, tmp_path)["iteration"] == 3


def test_missing_or_invalid_checkpoint_is_refused(capsys, tmp_path):
    assert summary.main([str(tmp_path)]) == 1
    assert only_code(capsys.readouterr().err) == "checkpoint-missing"
    (save(tmp_path) / "manifest.json").unlink()
    assert summary.main([str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "manifest.json is missing" in error and error.count("\n") == 1
    for argv in ([str(tmp_path / "nowhere")], [str(tmp_path / "iter_0000003"), "--iteration", "3"]):
        with pytest.raises(SystemExit) as ended:
            summary.main(argv)
        assert ended.value.code == 2
