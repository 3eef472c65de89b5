"""Elastic jobs of MIN to MAX nodes for tests."""

from collections import Counter

import pytest

from tests.integration.launched import Launched
from tests.integration.test_layouts import CLOSE
from tests.integration.tiny import LAYOUTS, SHALLOW, known

ITERATIONS = 16
FLAGS = SHALLOW | dict(
    global_batch_size=10,
    micro_batch_size=1,
    calculate_per_token_loss=True,
    use_distributed_optimizer=False,
    elastic=True,
    elastic_slots=3,
    elastic_rebalance_interval=5,
    hidden_dropout=0.1,
    attention_dropout=0.1,
    train_iters=ITERATIONS,
)
ZERO = dict(use_distributed_optimizer=True)


PROGRAM = "tests/integration/losing_pretrain_gpt_moe.py"


def job_of(data, tmp_path, faults, least=2, candidates=1, layout="DP4", nodes=None, program=PROGRAM, own=(), **more):
    """A job of nodes, of a worker each unless they are fewer; an injected kill loses one as a whole."""
    saved = dict(ckpt_policy="full", ckpt_dir=str(tmp_path / "snapshots"))
    saved |= {} if "ckpt_policy" in more else dict(snapshot_interval=100)
    nodes = dict(nodes=nodes or LAYOUTS[layout][0], least=least, candidates=candidates)
    own = ["--silence-timeout", "20", "--grow-wait", "600", *own]
    flags = data | FLAGS | saved | more | dict(inject=faults)
    return Launched(layout, flags, tmp_path / "job", *own, **nodes, program=program)


def assert_as_of_fixed_members(job, data, again=False, layout="DP4", close=CLOSE, **more):
    """Losses are those of all workers throughout; no iteration was computed twice, unless ``again``.

    Copies of weights, masters and moments, and their numbers of updates, are equal.
    """
    held, whole = Counter(), {}
    for worker in job.states():
        held.update(worker.keys())
        for key, digest in worker.items():
            assert whole.setdefault(key, digest) == digest, f"copies of {key} differ"
    assert max(count for key, count in held.items() if "experts." in key) > 1 or len(job.states()) < 3
    expected = [record["loss"] for record in known(layout, data | FLAGS | more).records]
    assert [event["iteration"] for event in job.events("iteration")] == [*range(1, len(expected) + 1)] or again
    assert [record[1] for record in job.records()] == pytest.approx(expected, abs=close)
