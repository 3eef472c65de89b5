"""What --explain-selective says of budgets, experts and tokens at risk."""

import json

import numpy
import pytest

from megatron.pretraining.planning import sizes
from megatron.pretraining.planning.selective_choice import read_routing
from moc.cli_output import ToolError
from tests.cases import each_row
from tests.errors import only_code
from tests.unit.conftest import REPOSITORY
from tests.unit.policy.routing import RECORDED

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --num-experts 4 --disable-bias-linear "
    "--vocab-size 1000 --explain-selective --iteration-s 2 --forward-backward-s 1"
).split()


def plan(capsys, *argv):
    assert sizes.main([*map(str, argv), "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def nbytes(capsys):
    """Of the dense operators and of one of the 8 experts, on a single rank: 12 a parameter."""
    count = plan(capsys, *MODEL, "--tier", "memory", "--snapshot-gbs", 1)["parameters"]
    return 12 * count["others"], 12 * count["experts"] // 8


@pytest.fixture
def budget(nbytes):
    """Flags of GB/s with which a second takes the dense operators and so many experts."""
    dense, expert = nbytes
    return lambda flag, experts: [flag, (dense + (experts + 0.1) * expert) / 1e9]


def write(path, tokens, name="tokens"):
    numpy.savez(path, **{name: tokens})
    return path


def test_snapshot_experts_and_bytes_follow_budget(capsys, nbytes, budget):
    dense, expert = nbytes
    found = plan(capsys, *MODEL, "--tier", "memory", *budget("--snapshot-gbs", 4))["explain_selective"]
    assert found["local"] == {"nbytes": pytest.approx(dense + 4.1 * expert), "experts": 2.0}
    assert (found["remote"], found["experts"], found["interval"], found["stall_s"]) == (None, 2.0, 1, 0.0)
    assert (found["dense_bytes"], found["expert_bytes"]) == (dense, expert)
    assert (found["snapshot_bytes"], found["full_bytes"]) == (dense + 4 * expert, dense + 8 * expert)
    assert found["max_age"] == 4 * 2 and found["routing"] is None
    assert found["equally_busy"] == pytest.approx((2 - 1) / 2)  # each in every second iteration


def test_smaller_budget_limits_experts(capsys, nbytes, budget):
    dense, expert = nbytes
    on_disk = [*MODEL, *budget("--snapshot-gbs", 6), "--tier", "disk"]
    found = plan(capsys, *on_disk, "--persist-gbs", (dense + 2 * expert) / 2e9)["explain_selective"]  # of 2 s
    assert (found["local"]["experts"], found["remote"]["experts"], found["experts"]) == (3.0, 1.0, 1.0)
    peers = [*MODEL, "--world", 2, "--ep", 2, "--tier", "peers", "--nodes", 2, "--snapshot-gbs", 1]
    fast = plan(capsys, *peers, "--replicate-gbs", 1)["explain_selective"]
    assert (fast["replicas"], fast["experts"]) == (1, 4.0)
    least = fast["dense_bytes"] + fast["expert_bytes"]
    slow = plan(capsys, *peers, "--replicate-gbs", 1.001 * least / 2e9)["explain_selective"]
    assert slow["remote"] == {"nbytes": pytest.approx(1.001 * least), "experts": 1.0}  # one of 2 nodes, 2 layers
    assert (slow["local"]["experts"], slow["experts"], slow["interval"]) == (4.0, 1.0, 1)


def test_interval_grows_if_no_expert_overlaps(capsys, nbytes):
    dense, expert = nbytes
    slow = [*MODEL, "--tier", "memory", "--snapshot-gbs", (dense + expert) / 2e9]
    found = plan(capsys, *slow)["explain_selective"]
    assert found["interval"] == 2 * 17  # one expert: 1 s, of at most 3 % of 17 times 2 s
    assert 1.0 < found["stall_s"] < 0.031 * 2 * 34 and found["experts"] > 0.5
    assert sizes.main(list(map(str, slow))) == 0
    text = capsys.readouterr().out
    assert "of 4 experts of each layer, every 34 iterations" in text
    assert "Not even one expert hides in an iteration: a snapshot every 34 iterations" in text
    assert f"training waits {found['stall_s']:.3g} s" in text


def test_recorded_loads_are_replayed(capsys, tmp_path, budget):
    """Two experts of four an iteration, whose loads are equal; without the first ten iterations."""
    file = write(tmp_path / "loads.npz", numpy.full((40, 2, 4), 5, dtype=numpy.int32))
    argv = [*MODEL, "--tier", "memory", *budget("--snapshot-gbs", 4), "--routing", file]
    found = plan(capsys, *argv)["explain_selective"]["routing"]
    assert (found["shape"], found["experts"], found["scaled"]) == ([40, 2, 4], 2.0, False)
    for risk in found["rules"].values():  # half of the experts lack an iteration
        assert risk == {"mlt": pytest.approx(1.0), "mlt_per_layer": pytest.approx(0.5), "oldest": 2}
    assert found["steady_risk"] == pytest.approx(0.5) and len(found["rules"]) == 5
    assert sizes.main(list(map(str, argv))) == 0
    text = capsys.readouterr().out
    assert "proportional (Algorithm 1)                 0.500         1.00       2\n" in text
    assert "another shape" not in text


def test_recording_of_other_shape_scales_expert_share(capsys, tmp_path, budget):
    file = write(tmp_path / "loads.npz", numpy.full((40, 3, 16), 5, dtype=numpy.int32))
    argv = [*MODEL, "--tier", "memory", *budget("--snapshot-gbs", 2), "--routing", file]  # 1 of 4
    found = plan(capsys, *argv)["explain_selective"]["routing"]
    assert found["scaled"] and found["experts"] == 4.0
    assert found["rules"]["in turn"] == {"mlt": pytest.approx(4.5), "mlt_per_layer": pytest.approx(1.5), "oldest": 4}
    assert sizes.main(list(map(str, argv))) == 0
    assert "the model has another shape: S is the same share" in capsys.readouterr().out


def test_recorded_loads_risk_fewer_tokens_than_algorithm_1(capsys, budget):
    if not RECORDED.exists():
        pytest.skip("the recorded loads are not at hand")
    eight = [*MODEL, "--num-experts", 8, "--tier", "memory", "--routing", RECORDED]
    found = plan(capsys, *eight, *budget("--snapshot-gbs", 2))["explain_selective"]["routing"]  # 1 of 8
    assert (found["shape"], found["experts"]) == ([334, 24, 32], 4.0)
    risks = {name: risk["mlt_per_layer"] for name, risk in found["rules"].items()}
    assert found["skipped"] == 167
    best = risks["per-byte, tokens-age, any age"]
    assert best == pytest.approx(0.971, rel=0.01) and best < risks["per-byte, tokens-age"] < 1.05 * best
    assert risks["per-byte, tokens-age"] < 0.6 * risks["proportional (Algorithm 1)"] < risks["in turn"]
    assert found["rules"]["per-byte, tokens-age"]["oldest"] == 65  # 8 times 8 snapshots
    assert found["rules"]["in turn"]["mlt"] == pytest.approx(24 * risks["in turn"])


def test_gradients_replace_states_if_flags_and_job_allow(capsys, nbytes, budget):
    dense, expert = nbytes
    memory, fast = [*MODEL, "--tier", "memory"], budget("--snapshot-gbs", 4)
    found = plan(capsys, *memory, *fast)["explain_selective"]
    assert found["gradient"] == pytest.approx(1 / 3) and found["no_gradients"] is None
    off = plan(capsys, *memory, *fast, *OFF)["explain_selective"]
    assert (off["gradient"], off["no_gradients"]) == (None, None)
    disk = plan(capsys, *MODEL, "--tier", "disk", *fast, "--persist-gbs", 1)["explain_selective"]
    assert disk["gradient"] is None and "add --ckpt-tier memory" in disk["no_gradients"]
    slow = [*memory, "--snapshot-gbs", (dense + expert) / 2e9]
    assert plan(capsys, *slow)["explain_selective"]["gradient"] is None  # a snapshot every 17 iterations
    assert sizes.main(list(map(str, slow))) == 0
    assert "States only: --selective-gradients on needs a snapshot in each iteration." in capsys.readouterr().out


def test_report_gives_copy_share_hidden_by_bubbles(capsys, nbytes):
    """Two stages and 4 micro batches: a stage waits for 1 of 5; it saves half of the layers."""
    dense, expert = nbytes
    assert plan(capsys, *MODEL, "--tier", "memory", "--snapshot-gbs", 1)["explain_selective"]["bubbles"] is None
    staged = [*MODEL, "--tier", "memory", "--pp", 2, "--world", 2, "--global-batch", 8, "--micro-batch", 2]
    fast = plan(capsys, *staged, "--snapshot-gbs", 1)["explain_selective"]["bubbles"]
    assert fast == {"share": pytest.approx(0.2), "seconds": pytest.approx(0.2), "of_copy": 1.0}
    staged += ["--snapshot-gbs", 0.9 * (dense + 8 * expert) / 2e9]  # not quite a stage
    slow = plan(capsys, *staged)["explain_selective"]
    assert slow["experts"] < 4 and slow["interval"] == 1
    assert slow["bubbles"]["of_copy"] == pytest.approx(0.2)  # as many experts as hide behind forward and backward
    assert sizes.main(list(map(str, staged))) == 0
    text = "Bubbles are 20.0 % of forward and backward, 0.2 s: 20 % of a snapshot's copy passes in them"
    assert text in capsys.readouterr().out


def test_recorded_loads_are_replayed_with_gradients(capsys, tmp_path, budget):
    """The states of one expert of four, or the gradients of three; one of these is saved in full again now and then."""
    tokens = numpy.tile(numpy.array([90, 6, 3, 1], dtype=numpy.int32), (40, 2, 1))
    file = write(tmp_path / "loads.npz", tokens)
    argv = [*MODEL, "--tier", "memory", *budget("--snapshot-gbs", 2), "--routing", file]
    found = plan(capsys, *argv)["explain_selective"]["routing"]
    chained = found["gradients"]
    assert found["experts"] == 1.0 < 2.0 <= chained["experts"] <= 3.0 and 0.8 <= chained["gradients"] < 1
    assert chained["risk"]["mlt_per_layer"] < 0.5 * found["rules"]["per-byte, tokens-age"]["mlt_per_layer"]
    assert sizes.main(list(map(str, argv))) == 0
    text = capsys.readouterr().out
    assert f"with gradients                 {chained['risk']['mlt_per_layer']:17.3f}" in text
    share = f"{100 * chained['gradients']:.0f} % by their gradients"
    assert f"With gradients, S is {chained['experts']:.3g} experts in the same bytes, {share}." in text
    states = plan(capsys, *argv, *OFF)["explain_selective"]["routing"]
    assert states["gradients"] is None and states["rules"] == found["rules"]


def test_gradient_risk_equals_policy_on_recorded_loads(capsys, budget):
    if not RECORDED.exists():
        pytest.skip("the recorded loads are not at hand")
    argv = [*MODEL, "--num-experts", 8, "--tier", "memory", "--routing", RECORDED, *budget("--snapshot-gbs", 2)]
    found = plan(capsys, *argv)["explain_selective"]["routing"]["gradients"]  # 4 of 32, of the recording
    assert found["risk"]["mlt_per_layer"] == pytest.approx(0.493, rel=0.02)
    assert (found["experts"], found["gradients"]) == (pytest.approx(8.5, abs=0.2), pytest.approx(0.79, abs=0.02))


OFF = "--ckpt-policy selective --ckpt-dir . --selective-gradients off".split()

COUNTS = numpy.ones((20, 2, 4), dtype=numpy.int32)


@each_row(
    ("tokens", "name", "sentence"),
    [
        (COUNTS, "loads", "has no array called tokens"),
        (COUNTS[0], "tokens", "2x4 of int32"),
        (COUNTS / 2, "tokens", "tokens is 20x2x4 of float64"),
        (COUNTS[:, :0], "tokens", "tokens is 20x0x4"),
        (-COUNTS, "tokens", "tokens has negative numbers"),
        (COUNTS[:10], "tokens", "has 10 iterations"),
        (numpy.array([None]), "tokens", "holds no numbers"),
    ],
)
def test_unusable_recording_is_refused_in_one_line(capsys, tmp_path, tokens, name, sentence):
    file = write(tmp_path / "loads.npz", tokens, name)
    assert sizes.main([*MODEL, "--tier", "memory", "--snapshot-gbs", "1", "--routing", str(file)]) == 1
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


@each_row("shape", [(1 << 22, 1, 1), (1 << 20, 1, 1), (12, 1 << 20, 1), (12, 1, 1 << 22)])
def test_compressed_recording_of_many_numbers_is_refused(tmp_path, shape):
    numpy.savez_compressed(tmp_path / "loads.npz", tokens=numpy.zeros(shape, "u1"))
    with pytest.raises(ToolError):
        read_routing(str(tmp_path / "loads.npz"))


def test_large_recording_is_read(tmp_path):
    numpy.savez(tmp_path / "loads.npz", tokens=numpy.ones((20_000, 4, 2), "i8"))
    assert len(read_routing(str(tmp_path / "loads.npz"))) == 20_000


@each_row("content", [None, b"", b"no archive", b"PK\x03\x04 torn"])
def test_invalid_recording_file_is_refused_in_one_line(capsys, tmp_path, content):
    file = tmp_path / "loads.npz"
    if content is not None:
        file.write_bytes(content)
    assert sizes.main([*MODEL, "--tier", "memory", "--snapshot-gbs", "1", "--routing", str(file)]) == 1
    error = capsys.readouterr().err
    assert f"--routing {file}" in error and error.count("\n") == 1
    array = tmp_path / "loads.npy"
    numpy.save(array, COUNTS)
    assert sizes.main([*MODEL, "--tier", "memory", "--snapshot-gbs", "1", "--routing", str(array)]) == 1
    assert only_code(capsys.readouterr().err) == "routing-malformed"


PEERS = [*MODEL, "--snapshot-gbs", "1", "--tier", "peers", "--replicate-gbs", "1"]


@each_row(
    ("argv", "sentence"),
    [
        (MODEL, "--explain-selective needs --snapshot-gbs, or a --cluster"),
        ([*MODEL, "--snapshot-gbs", "1"], "--explain-selective needs --persist-gbs, or a --cluster"),
        ([*PEERS[:-2], "--world", "2", "--nodes", "2"], "--explain-selective needs --replicate-gbs, or a --cluster"),
        (PEERS, "--tier peers needs 2 nodes or more"),
        ([*PEERS, "--world", "2", "--nodes", "2", "--replicas", "2"], "--replicas is 2"),
        ([*MODEL, "--replicas", "1"], "add --tier peers, or drop them"),
        ([*MODEL, "--tier", "memory", "--persist-gbs", "1"], "--persist-gbs is a budget only with --tier disk"),
        ([*MODEL, "--keep-master"], "--keep-master"),
        ([*MODEL, "--tier", "memory", "--snapshot-gbs", "0"], "[value-out-of-range]"),
        ([*MODEL, "--tier", "memory", "--snapshot-gbs", "1", "--iteration-s", "0.5"], "[value-out-of-range]"),
        (["--case", "1", "--routing", "loads.npz"], "[flag-has-no-effect]"),
        ([*MODEL[:8], *MODEL[10:]], "take a model that has some"),
    ],
)
def test_contradicting_flags_are_refused_together(capsys, argv, sentence):
    assert sizes.main(argv) == 1
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


def test_documented_command_prints_documented_output(capsys):
    page = (REPOSITORY / "docs" / "how-to" / "choose-a-policy.md").read_text(encoding="utf-8")
    command, said = page.split("    python tools/plan_checkpoint.py ")[-1].split("\n\nprints, among others\n\n")
    assert sizes.main(command.replace("\\\n", " ").split()) == 0
    choice = capsys.readouterr().out.splitlines()
    shown = said.split("\n\n")[0].splitlines()
    assert shown and set(map(str.strip, shown)) <= set(choice)
