"""Any layout loads what any other saved: the same losses, the very same samples."""

import pytest

from tests.integration.test_layouts import CLOSE
from tests.integration.tiny import DEEP, FOUR, train
from tests.shared import ALL

REPLICATED = dict(use_distributed_optimizer=False)
SMALL_MOMENTS = dict(exp_avg_dtype="fp8", exp_avg_sq_dtype="fp16")
MOVES = [  # from a layout with flags, to another with flags, losses as close as
    ("PP2xEP2", {}, "DP4", {}, CLOSE),
    ("EP4", {}, "1", {}, CLOSE),
    ("1", {}, "EP4", {}, CLOSE),
    ("TP2", {}, "PP2", {}, CLOSE),
    ("PP2", {}, "TP2xEP2", {}, CLOSE),
    ("EP2", {}, "DP2", REPLICATED, CLOSE),
    ("interleaved", {}, "PP2", DEEP, CLOSE),
    ("PP4", {}, "interleaved", {}, CLOSE),
    ("EP2", dict(bf16=True) | REPLICATED, "PP2", dict(bf16=True), 5e-3),
    ("EP2", SMALL_MOMENTS, "TP2xEP2", SMALL_MOMENTS | REPLICATED, 5e-3),
]
if ALL:  # the others have a layout, a precision or an optimizer of their own on one side
    MOVES += [
        ("PP2xEP2", {}, "EP2", {}, CLOSE),
        ("EP2", REPLICATED, "TP2xEP2", {}, CLOSE),
        ("PP2xEP2", dict(bf16=True), "1", dict(bf16=True), 5e-3),
    ]


def name(move):
    return f"{move[0]}{'' if move[1] == {} else '*'} to {move[2]}{'' if move[3] == {} else '*'}"


@pytest.fixture(scope="module")
def data(data):
    """Of the dataset, with batches that four workers can share."""
    return data | FOUR


@pytest.fixture(scope="module")
def saved(data, tmp_path_factory):
    """Trains six iterations in a layout, and saves after three; each once."""
    done = {}

    def save(layout, flags):
        key = (layout, *sorted(flags))
        if key not in done:
            directory = str(tmp_path_factory.mktemp("saved"))
            done[key] = directory, train(layout, data | flags | dict(save=directory, save_interval=3))
        return done[key]

    return save


@pytest.mark.parametrize("move", MOVES, ids=name)
def test_checkpoint_loads_in_another_layout(move, saved, data):
    layout, flags, other, other_flags, close = move
    directory, whole = saved(layout, flags)
    rest = train(other, data | other_flags | dict(load=directory, ckpt_step=3))
    assert rest.start == 3
    assert rest.losses == pytest.approx(whole.losses[3:], abs=close)
    assert rest.norms == pytest.approx(whole.norms[3:], abs=10 * close)
    assert rest.samples == {i: whole.samples[i] for i in (3, 4, 5)}


def test_differently_padded_vocabulary_is_loaded(data, tmp_path):
    padded = data | dict(make_vocab_size_divisible_by=150)  # 300 rows, 2 x 150 by tensor parallelism 300 too
    train("1", padded | dict(save=str(tmp_path), exit_interval=3, make_vocab_size_divisible_by=128))
    rest = train("TP2", padded | dict(load=str(tmp_path)))
    assert rest.start == 3 and rest.losses[-1] < rest.losses[0]
    back = train("1", data | dict(load=str(tmp_path)))
    assert rest.losses == pytest.approx(back.losses, abs=0.2)


def test_finetune_loads_only_weights(saved, data):
    directory, whole = saved("EP4", {})
    tuned = train("EP2", data | dict(load=directory, ckpt_step=3, finetune=True, lr=1e-3, train_iters=2))
    assert tuned.start == 0
    assert tuned.losses[0] < whole.losses[0]
    assert tuned.samples[0] == whole.samples[0]


def test_no_load_optim_resumes_with_fresh_moments(saved, data):
    directory, whole = saved("EP4", {})
    rest = train("EP2", data | dict(load=directory, ckpt_step=3, no_load_optim=True))
    assert rest.start == 3
    assert rest.losses[0] == pytest.approx(whole.losses[3], abs=CLOSE)
    assert rest.losses[2] != pytest.approx(whole.losses[5], abs=CLOSE)


def test_newest_checkpoint_is_loaded_by_default(saved, data):
    directory, whole = saved("EP4", {})
    after = train("EP2", data | dict(load=directory))
    assert after.start == 6 and after.records == []
