"""16-bit training: it learns, and fp16 finds its loss scale."""

import pytest

from tests.integration.tiny import known, train

BF16 = dict(bf16=True)
FP16 = dict(fp16=True, initial_loss_scale=2.0**16)


@pytest.mark.parametrize("precision", [BF16, FP16, dict(fp16=True, loss_scale=128.0)], ids=["bf16", "fp16", "static"])
@pytest.mark.parametrize("layout", ["PP2xEP2", "TP2xEP2"])
def test_losses_in_16_bits_are_close_to_fp32(layout, precision, data):
    trained, exact = train(layout, data | precision), known("1", data)
    assert trained.losses == pytest.approx(exact.losses, abs=5e-3)
    assert trained.norms == pytest.approx(exact.norms, rel=5e-2)
    assert not any(r["skipped"] for r in trained.records)


def test_overflow_skips_update_and_halves_loss_scale(data):
    flags = dict(fp16=True, initial_loss_scale=2.0**40, hysteresis=1, train_iters=30, global_batch_size=8)
    trained = train("PP2", data | flags)
    skipped = [r["skipped"] for r in trained.records]
    last = skipped.index(False)
    assert last >= 10 and all(skipped[:last])
    scales = [r["loss_scale"] for r in trained.records]
    assert scales[: last + 1] == [2.0 ** (40 - i) for i in range(last + 1)]
    assert all(r["grad_norm"] == float("inf") for r in trained.records[:last])
    # nothing moved: the loss of fresh weights stays what it is, and the learning rate does not go on
    assert trained.losses[:last] == pytest.approx([trained.losses[0]] * last, abs=0.05)
    assert {r["learning_rate"] for r in trained.records[: last + 1]} == {trained.records[0]["learning_rate"]}
    assert trained.losses[-1] < trained.losses[0] - 0.1


def test_hysteresis_tolerates_one_overflow(data):
    trained = train("1", data | dict(fp16=True, initial_loss_scale=2.0**40, hysteresis=2, train_iters=3))
    assert [r["loss_scale"] for r in trained.records] == [2.0**40, 2.0**40, 2.0**39]


def test_loss_scale_grows_after_window_without_overflow(data):
    trained = train("1", data | dict(fp16=True, initial_loss_scale=2.0**8, loss_scale_window=2, train_iters=5))
    assert [r["loss_scale"] for r in trained.records] == [2.0**8, 2.0**8, 2.0**9, 2.0**9, 2.0**10]
