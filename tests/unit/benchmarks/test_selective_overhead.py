"""From what runs tell to what selective checkpoints cost, and to what each technique leaves of their bytes."""

import pytest

from benchmarks import selective_ablation as ablation
from benchmarks import selective_overhead as overhead
from benchmarks.live.blocks import Blocks
from benchmarks.live.nodes import bytes_in
from benchmarks.overhead.methods import parameters
from megatron.pretraining.entry.offline import config_of_words

BLOCKS = Blocks(first=4, length=4)
COUNTS = {"experts": 800, "others": 100, "num_experts": 8}


def events(bytes_of):
    """Blocks from 4, 8, ... on, of which those from 4 and 12 save; in each snapshot are 4 experts, 3 as gradients."""
    for iteration in range(4, 24):
        saves = BLOCKS.saves(iteration)
        gauges = {"selective_experts": 4.0, "selective_gradients": 3.0} if saves else {}
        yield {"type": "iteration", "iteration": iteration, "elapsed_s": 1.02 if saves else 1.0, **gauges}
        away, code = (0.012, 0.004) if saves else (0.001, 0.001)
        clocks = {"wall_s": 1.4, "away_s": away, "code_s": code, "half_s": 0.6999 if saves else 0.7, "beside_s": code}
        yield {"type": "clocks", "iteration": iteration, **clocks}
        if saves:
            yield {"type": "snapshot", "iteration": iteration, "bytes": bytes_of(iteration)}
            yield {"type": "stall", "iteration": iteration, "seconds": 0.0051}


def test_what_a_job_tells_of_its_blocks():
    told = overhead.figures(list(events(lambda iteration: 10 * iteration)), BLOCKS)
    assert told["lost"] == pytest.approx([0.01]) and told["beside_s"] == pytest.approx([0.004, 0.001])
    assert told["paced"] == pytest.approx([0.7 / 0.6999 - 1])
    assert told["overheads"] == pytest.approx([0.02]) and told["stalls"] == pytest.approx(0.005)
    assert told["bytes"] == [10 * i for i in (*range(4, 8), *range(12, 16), *range(20, 24))]
    assert set(told["experts"]) == {4.0} and set(told["chained"]) == {3.0} and told["iteration_s"] == 1.0


def test_bytes_by_equation_5():
    """12 bytes of 100 dense parameters and of half of 800 in experts; gradients stand for 3 of 4 experts."""
    assert overhead.by_equation(4, 0, COUNTS) == (12 * 500, 0)
    assert overhead.by_equation(4, 3, COUNTS) == (12 * 200, 12 * 300)
    told = {"bytes": [6000, 6060], "experts": [4, 4], "chained": [0, 0]}
    assert overhead.judged(told, 4, COUNTS) == {"bytes_error": pytest.approx(0.01), "gradient": None}
    told = {"bytes": [2400 + 1200 + 6, 6006], "experts": [4, 4], "chained": [3, 0]}  # with headers
    assert overhead.judged(told, None, COUNTS) == {
        "bytes_error": pytest.approx(0.001),
        "gradient": pytest.approx(1 / 3),
    }


@pytest.mark.parametrize(
    ("found", "held"),
    [
        (dict(paced=[0.02], lost=[0.02], stalls=0.01, bytes_error=0.01, gradient=0.339), [True] * 5),
        (dict(paced=[0.021], lost=[0.021], stalls=0.011, bytes_error=0.011, gradient=0.35), [False] * 5),
        (dict(paced=[0.01] * 9 + [0.5], lost=[0.03, 0.0], stalls=0.0, bytes_error=None, gradient=None), [True] * 3),
        (dict(paced=[0.01, 0.5, 0.0], lost=[0.0], stalls=0.0, bytes_error=None, gradient=None), [False, True, True]),
    ],
)
def test_what_is_asked_for(found, held):
    assert list(overhead.verdicts("", found, core_left=True).values()) == held
    assert list(overhead.verdicts("", found, core_left=False).values()) == held[3:]


@pytest.mark.parametrize("way", overhead.WAYS)
def test_the_program_understands_the_flags_of_a_way(way):
    config_of_words([*overhead.MODEL, *overhead.SELECTIVE, *overhead.WAYS[way], "--ckpt-dir", "d"], None)


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


@pytest.mark.parametrize("name", ablation.steps())
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
