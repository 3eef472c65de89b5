"""From what runs tell to what selective checkpoints cost, and to what each technique leaves of their bytes."""

import pytest

from benchmarks import selective_ablation as ablation
from benchmarks import selective_overhead as overhead
from benchmarks.live.nodes import bytes_in
from benchmarks.overhead.methods import parameters
from megatron.pretraining.entry.offline import config_of_words
from tests.cases import each_row


def events():
    """Snapshots in every second iteration from the 20th on; iterations of 1 s, or 1.02 s, of which 0.01 s stalls."""
    for iteration in range(1, 41):
        saves = iteration >= 20 and iteration % 2 == 0
        gauges = {"selective_experts": 4.0, "selective_gradients": 3.0 * (iteration > 20), "mlt": 0.5}
        took = 1.02 if iteration > 20 else 1.0
        yield {"type": "iteration", "iteration": iteration, "elapsed_s": took, **(gauges if saves else {})}
        if iteration > 20:
            yield {"type": "stall", "iteration": iteration, "seconds": 0.0102}
        if saves:
            yield {"type": "snapshot", "iteration": iteration, "bytes": 100, "copy_s": 0.4, "hash_s": 0.1}


def test_figures_of_a_job():
    told = list(events())
    assert overhead.undisturbed_s(told, 15) == 1.02
    found = overhead.figures(told, 21, 1.0)
    assert (found["longer"], found["mean_longer"]) == pytest.approx((0.02, 0.02))
    assert (found["stall"], found["mean_stall"]) == pytest.approx((0.01, 0.01))
    assert (found["snapshots"], found["between"], found["bytes"], found["gradients"]) == (0.5, 2.0, 100, 1.0)
    assert overhead.wasted_s(found, 2.0) == pytest.approx(0.5 + 2.0 + 2 / 2 * 1.02)


@each_row(
    ("own", "gemini", "held"),
    [
        (dict(longer=0.03, gradients=0.9, stall=0.01), 0.31, [True] * 3),
        (dict(longer=0.031, gradients=0.89, stall=0.011), 0.31, [False] * 3),
        (dict(longer=0.0, gradients=1.0, stall=0.5), 0.3, [True] * 2),
    ],
)
def test_goals_of_a_bandwidth(own, gemini, held):
    found = {overhead.SELECTIVE: own, overhead.GEMINI: {"mean_stall": gemini}}
    assert list(overhead.verdicts(5.0, found).values()) == held


@each_row("way", overhead.WAYS)
def test_the_program_understands_the_flags_of_a_way(way):
    flags = overhead.WAYS[way].split()
    config_of_words([*overhead.MODEL, *flags, *(["--ckpt-dir", "d"] if flags else [])], None)


def step(network, copies=5.0, memory=1.0):
    return {"network": [network], "copies": [copies], "memory": memory, "predicted_memory": 1.0}


def told(*network, **changes):
    return {name: step(sent, **changes) for name, sent in zip(ablation.steps(), network, strict=False)}


def test_network_bytes_never_rise_and_gradients_have_as_many_experts():
    names, sent = list(ablation.steps()), [100.0, 40.0, 40.0, 30.0, 20.0]
    found = told(*sent[: len(names)])
    found[ablation.GRADIENTS] = step(20.0)
    assert all(ablation.verdicts(found).values())
    found[ablation.BUBBLES] = step(41.0)
    assert list(ablation.verdicts(found).values()).count(False) == 1
    found.pop(ablation.PLACEMENT, None)
    found[ablation.BUBBLES], found[ablation.GRADIENTS] = step(40.0), step(21.0, copies=4.9, memory=1.06)
    assert list(ablation.verdicts(found).values()).count(False) == 2
    found[ablation.PLACEMENT] = step(30.0)
    assert [held for what, held in ablation.verdicts(found).items() if "all together" in what] == [False]


@each_row("name", ablation.steps())
def test_the_program_understands_the_flags_of_a_step(name):
    config_of_words([*ablation.MODEL, *ablation.PEERS, *ablation.steps()[name], "--ckpt-dir", "d"], None)


def test_memory_is_predicted_with_the_longest_chains():
    """Eight buffers of everything, four of them copies; carried experts, E + 2 K of a node and E + 2 K of its copies
    (docs/how-to/choose-a-policy.md), with 4 and 2 of 16 experts in a snapshot; and gradients for 32 iterations.
    """
    counts = parameters(ablation.MODEL)
    everything, selective, *_, gradients = (ablation.predicted_memory(of) for of in ablation.steps().values())
    assert everything == pytest.approx(8 * 12 * sum((counts["experts"], counts["others"])) / 4, rel=0.03)
    experts = 12 * counts["experts"] / 4
    assert selective - everything == pytest.approx(2 * (1 + 2 * 4 / 16) * experts, rel=0.01)
    cost = 1 / 3 + (2 / 3) / 33
    chained = 2 / cost * 4 * counts["experts"] / counts["num_experts"] / 4
    fewer = 2 * 2 * (4 - 2) / 16 * experts
    assert gradients - selective == pytest.approx(2 * 32 * chained - fewer, rel=0.01)


def test_bytes_in_a_directory(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(b"x" * 8192)
    (tmp_path / "same").hardlink_to(tmp_path / "a" / "file")
    assert bytes_in(tmp_path) == 8192
