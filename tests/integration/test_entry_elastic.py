"""Elastic training of Megatron-LM's models under mocrun; ``test_elastic_members.py`` has jobs that lose nodes."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.integration.entry_jobs import MOE, OWN_PROGRAM, SCRIPTS, ZERO1, needs_scripts, run

ELASTIC = f"{MOE} --elastic --elastic-slots 4 --elastic-min-replicas 1 --calculate-per-token-loss --micro-batch-size 1"


def losses(ended) -> list:
    assert ended.code == 0, ended.output[-4000:]
    return [loss for loss, _ in ended.losses.values()]


@needs_scripts
def test_losses_do_not_depend_on_number_of_workers(tmp_path):
    """Three workers have 3, 3 and 2 of the 8 micro batches."""
    flags = f"{ELASTIC} --elastic-rebalance-interval 3 --tensorboard-dir board"
    found = [run(tmp_path / str(workers), SCRIPTS / "pretrain_gpt.py", workers, flags) for workers in (1, 3)]
    assert losses(found[0]) == pytest.approx(losses(found[1]), abs=5e-6)
    one, three = (ended.of("evaluation") for ended in found)
    assert [event["loss"] for event in one] == pytest.approx([event["loss"] for event in three], abs=5e-6)
    board = EventAccumulator(str(tmp_path / "3" / "board")).Reload()
    assert [point.value for point in board.Scalars("lm loss validation")] == pytest.approx(
        [event["loss"] for event in three]
    )


@pytest.mark.parametrize("zero", ["", ZERO1])
def test_checkpoint_loads_with_other_worker_count(zero, tmp_path):
    flags = f"{ELASTIC} {zero} --save saved --save-interval 4"
    whole = losses(run(tmp_path / "whole", OWN_PROGRAM, 2, flags))
    losses(run(tmp_path, OWN_PROGRAM, 2, f"{flags} --exit-interval 4"))
    again = run(tmp_path, OWN_PROGRAM, 3, f"{flags} --load saved", log="again")
    assert losses(again) == pytest.approx(whole[4:], abs=5e-6)
