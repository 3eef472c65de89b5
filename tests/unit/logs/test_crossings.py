"""What crosses stages in which order, by hand and by what must hold."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from moc.logs.log import Crossing, Direction, Pipeline
from tests.cases import each_row

F, B = Direction.FORWARD, Direction.BACKWARD
PLAIN = Pipeline(3, ((0, 0), (1, 0)))
INTERLEAVED = Pipeline(2, ((0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)))


def test_1f1b_stages_send_micro_batches_in_order():
    assert PLAIN.chunks == 1
    assert PLAIN.sent_by(0, F) == PLAIN.sent_by(1, F) == [Crossing(F, 0, 0), Crossing(F, 0, 1)]
    assert PLAIN.sent_by(2, B) == PLAIN.sent_by(1, B) == [Crossing(B, 0, 0), Crossing(B, 0, 1)]
    assert PLAIN.sent_by(2, F) == PLAIN.sent_by(0, B) == PLAIN.received_by(0, F) == PLAIN.received_by(2, B) == []


def test_interleaved_chunks_wrap_around_stages():
    def pairs(crossings):
        return [(c.micro_batch, c.chunk) for c in crossings]

    assert pairs(INTERLEAVED.sent_by(0, F)) == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]
    assert pairs(INTERLEAVED.sent_by(1, F)) == [(0, 0), (1, 0), (2, 0), (3, 0)]  # the last chunk's output is the loss
    assert pairs(INTERLEAVED.sent_by(1, B)) == [(0, 1), (1, 1), (0, 0), (1, 0), (2, 1), (3, 1), (2, 0), (3, 0)]
    assert pairs(INTERLEAVED.sent_by(0, B)) == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert INTERLEAVED.received_by(0, F) == INTERLEAVED.sent_by(1, F)


@each_row("direction", Direction)
@given(stages=st.integers(2, 5), chunks=st.integers(1, 4), micro_batches=st.integers(1, 6))
def test_each_boundary_is_crossed_once_by_each_micro_batch(direction, stages, chunks, micro_batches):
    turns = tuple((i, chunk) for chunk, i in product(range(chunks), range(micro_batches)))
    pipeline = Pipeline(stages, turns)
    parts = [
        (c.chunk * stages + stage, c.micro_batch) for stage in range(stages) for c in pipeline.sent_by(stage, direction)
    ]
    ends = stages * chunks - 1 if direction is F else 0  # of which nothing goes on
    boundaries = set(range(stages * chunks)) - {ends}
    assert sorted(parts) == sorted(product(boundaries, range(micro_batches)))
    received = [c for stage in range(stages) for c in pipeline.received_by(stage, direction)]
    assert len(received) == len(parts)
