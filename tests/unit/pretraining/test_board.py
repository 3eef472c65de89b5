"""TensorBoard's files: what cannot be written is told once and counted, and ends nothing."""

import threading

import pytest

from megatron.pretraining.logging.board import Board


def test_files_that_cannot_be_written_for_a_while(tmp_path):
    pytest.importorskip("tensorboard")
    directory, said, lost, again = tmp_path / "board", [], [], threading.Event()
    directory.write_text("in its place")
    board = Board(str(directory), 10, said.append, lambda *told: (lost.append(told), again.set()))
    for step in range(5):
        board.add_scalars({"loss": 1.0, "norm": 2.0}, step)
    board.add_scalar("loss", 3.0, 5)
    while board._dropped < 11:
        assert len(said) <= 1
    assert len(said) == 1 and str(directory) in said[0]
    directory.unlink()
    while not again.wait(0.05):
        board.add_scalar("loss", 4.0, 6)
    board.close()
    assert lost[0][0] >= 11 and len(lost) == 1
    assert list(directory.glob("events.out.tfevents.*"))
