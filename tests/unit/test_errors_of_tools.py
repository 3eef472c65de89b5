"""Every refusal of a tool: one line with a code and a remedy, an exit code that is not 0, and no traceback."""

import json

from megatron.pretraining.convert import program as convert
from megatron.pretraining.planning import simulate
from moc.inspect import memory, summary, verify
from moc.report import loss
from moc.report import report as report
from tests.cases import each_row
from tests.errors import only_code
from tests.unit.inspect.checkpoints import save
from tests.unit.inspect.test_verify import flip
from tests.unit.pretraining.convert.test_program import dense, edited, snapshot

SIMULATED = ["--model", "micro", "--cluster", "a100-80gb:16", "--ep", "4", "--hours", "3", "--mtbf", "1h"]
START = {"type": "start", "time": 1.0, "iteration": 0}


def renamed(root):
    snapshot(root).rename(root / "checkpoint")


def foreign(root):
    directory = dense(root)
    for name in ("manifest.json", "training_state.json"):
        (directory / name).unlink()


def unknown(root):
    root.mkdir()
    (root / "config.json").write_text(json.dumps({"model_type": "llama"}))


def untyped(root):
    root.mkdir()
    (root / "config.json").write_text("{}")


def damaged(root):
    flip(snapshot(root) / "rank_00001.safetensors", 800)


def of_one_node(root):
    edited(snapshot(root), writers=3)


def under_way(root):
    snapshot(root)
    (root.parent / "out" / ".iter_0000009.incomplete").mkdir(parents=True)


def published(root):
    snapshot(root)
    snapshot(root.parent / "out")


def not_whole(root):
    (save(root) / "common.pt").unlink()


def empty(root):
    root.mkdir()


def events(*written):
    def make(root):
        root.mkdir()
        (root / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in written))

    return make


def trace(text):
    def make(root):
        root.mkdir()
        (root / "trace").write_text(text)

    return make


@each_row(
    ("main", "make", "argv", "status", "code"),
    [
        (convert.main, None, ["in"], 2, "flag-invalid"),
        (convert.main, None, ["in", "out"], 2, "not-a-directory"),
        (convert.main, snapshot, ["in/iter_0000003", "out", "--iteration", "3"], 2, "directory-is-one-checkpoint"),
        (convert.main, snapshot, ["in", "out", "--writers", "0"], 2, "value-out-of-range"),
        (convert.main, snapshot, ["in", "out", "--nproc-per-node", "2"], 2, "flag-needs-another"),
        (convert.main, empty, ["in", "out"], 1, "checkpoint-missing"),
        (convert.main, snapshot, ["in", "out", "--iteration", "7"], 1, "checkpoint-missing"),
        (convert.main, renamed, ["in/checkpoint", "out"], 1, "checkpoint-renamed"),
        (convert.main, foreign, ["in", "out"], 1, "manifest-missing"),
        (convert.main, damaged, ["in", "out"], 1, "checkpoint-damaged"),
        (convert.main, of_one_node, ["in", "out"], 1, "snapshot-parts-missing"),
        (convert.main, under_way, ["in", "out"], 1, "save-in-progress"),
        (convert.main, published, ["in", "out", "--to", "snapshot"], 1, "output-exists"),
        (convert.main, dense, ["in", "out", "--dtype", "fp16"], 1, "dtype-conflict"),
        (convert.main, unknown, ["in", "out"], 1, "family-unknown"),
        (convert.main, untyped, ["in", "out"], 1, "config-key-missing"),
        (summary.main, None, ["in"], 2, "not-a-directory"),
        (summary.main, empty, ["in"], 1, "checkpoint-missing"),
        (summary.main, foreign, ["in/iter_0000003"], 1, "manifest-missing"),
        (verify.main, None, ["in"], 2, "not-a-directory"),
        (verify.main, save, ["in", "--workers", "0"], 2, "value-out-of-range"),
        (verify.main, not_whole, ["in"], 1, "checkpoint-not-whole"),
        (memory.main, empty, ["--memory-dir", "in", "--remove"], 2, "flag-needs-another"),
        (memory.main, empty, ["--memory-dir", "in", "--remove", "in/other"], 1, "memory-of-no-run"),
        (report.main, None, ["in"], 1, "file-missing"),
        (report.main, events(START), ["in"], 1, "run-too-short"),
        (loss.main, None, ["--output", "out.png"], 1, "input-missing"),
        (loss.main, None, ["in", "--output", "out.png"], 1, "file-missing"),
        (loss.main, events(START), ["in", "--output", "out.png"], 1, "run-too-short"),
        (simulate.main, None, [*SIMULATED, "--cluster", "b200"], 1, "cluster-unknown"),
        (simulate.main, None, [*SIMULATED, "--cluster", "a100-80gb:0"], 1, "value-out-of-range"),
        (simulate.main, None, [*SIMULATED, "--pp", "16", "--ep", "1"], 1, "stages-exceed-layers"),
        (simulate.main, None, [*SIMULATED, "--policy", "auto", "--host-memory-gb", "1e-9"], 1, "limits-too-strict"),
        (simulate.main, trace(""), [*SIMULATED[:-2], "--trace", "in/trace"], 1, "trace-invalid"),
        (simulate.main, trace("what?\n"), [*SIMULATED[:-2], "--trace", "in/trace"], 1, "trace-invalid"),
        (simulate.main, events(START), [*SIMULATED, "--profile", "in"], 1, "run-too-short"),
    ],
    ids=lambda value: value.__module__ if callable(value) else str(value),
)
def test_tool_refuses_with_code(main, make, argv, status, code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if make is not None:
        make(tmp_path / "in")
    capsys.readouterr()
    try:
        ended = main(argv)
    except SystemExit as end:
        ended = end.code
    printed = "".join(capsys.readouterr())
    assert ended == status and "Traceback" not in printed
    assert only_code(printed) == code and ". Fix: " in printed
