"""Moments in 8 and 16 bits, and products in 8: smaller snapshots, and the same promises."""

import pytest
import torch

from megatron.pretraining.convert import program
from moc.store.shard_file import ShardReader
from moc.store.storage import LocalStorage
from moc.store.store import Store, checkpoint_name
from tests.errors import only_code
from tests.integration.launched import Launched
from tests.integration.snapshot_files import contents, events, start
from tests.integration.test_determinism import DROPOUT
from tests.integration.test_refusal import refused_by_program
from tests.integration.tiny import FLAGS, known, train
from tests.shared import ALL
from tests.worlds import start_world

BF16 = dict(bf16=True)
EIGHT = dict(exp_avg_dtype="fp8", exp_avg_sq_dtype="fp16")
PRODUCTS = dict(fp8_format="hybrid")
DENSE = dict(num_experts=None, moe_aux_loss_coeff=0.0, moe_token_dispatcher_type="allgather")
SMALL = dict(clip_grad=0.3, lr=1e-2)


@pytest.mark.parametrize(("layout", "moments"), [("PP2xEP2", EIGHT), *ALL * [("TP2xEP2", EIGHT)]])
def test_small_moments_train_as_fp32(layout, moments, data):
    trained, exact = train(layout, data | BF16 | moments), known("1", data)
    assert trained.losses == pytest.approx(exact.losses, abs=5e-3)
    assert trained.norms == pytest.approx(exact.norms, rel=5e-2)


@pytest.mark.parametrize(
    ("layout", "other"),
    [
        ("PP2xEP2", {}),
        *ALL * [("TP2xEP2", {})],
        ("TP2", DENSE | dict(sequence_parallel=False, ffn_hidden_size=64)),
    ],
)
def test_products_in_8_bits_train_as_others(layout, other, data):
    flags = data | dict(bf16=True) | other
    trained, exact = train(layout, flags | PRODUCTS), train(layout, flags)
    assert trained.losses != exact.losses
    assert trained.losses == pytest.approx(exact.losses, abs=1e-2)
    assert trained.norms == pytest.approx(exact.norms, rel=0.1)


def test_products_in_8_bits_require_multiples_of_16(data):
    flags = FLAGS | data | SMALL | PRODUCTS | dict(bf16=True, ffn_hidden_size=72)
    (result,) = start_world(1, "tests.integration.bodies:train", flags=flags).wait()
    assert result.exit == 2
    assert only_code(result.output) == "fp8-unsupported" and "linear_fc2 is 32 x 72" in result.output


ROWS = [  # of Table 7: flags, and formats of weight and moments
    (BF16 | PRODUCTS, (torch.float32, torch.float32, torch.float32)),
    (BF16 | PRODUCTS | EIGHT, (torch.float32, torch.float8_e4m3fn, torch.float16)),
]
WINDOWS = dict(ckpt_policy="sparse", sparse_window=3, ckpt_blocking=True)


def straight_to_the_end(data, precision, tmp_path):
    """Flags of a run, what it is without faults, and what a snapshot of its end holds."""
    flags = data | SMALL | DROPOUT | precision | dict(train_iters=14)
    dense = dict(ckpt_policy="full", snapshot_interval=14, ckpt_dir=str(tmp_path / "straight"))
    return flags, train("PP2", flags | dense), Store(LocalStorage(tmp_path / "straight"))


@pytest.mark.recovery
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("precision", "formats"), [ROWS[1]])
def test_one_stage_replays_window_bit_identically(precision, formats, data, tmp_path):
    flags, straight, end = straight_to_the_end(data, precision, tmp_path)
    places = dict(upstream_logging=True, ckpt_dir=str(tmp_path / "c"), ckpt_memory_dir=str(tmp_path))
    faults = dict(inject=["kill rank=1 iteration=7 point=after_commit", "kill rank=0 iteration=12 point=before_commit"])
    with Launched("PP2", flags | WINDOWS | places | faults, tmp_path / "job") as job:
        assert job.wait() == 0, job.console[-4000:]
    assert contents(Store(LocalStorage(tmp_path / "c")), 14) == contents(end, 14)
    assert job.records() == [(r["iteration"], r["loss"], r["grad_norm"]) for r in straight.records]
    assert [event["stages"] for event in job.events("resume")] == [[1], [0]]
    assert all(event["exact"] in (True, None) for event in job.events("replay"))
    assert formats_of(end, 14) == dict(zip(("master", "exp_avg", "exp_avg_sq"), formats, strict=True))


@pytest.mark.recovery
@pytest.mark.parametrize(("precision", "formats"), [ROWS[0]])
def test_all_stages_replay_window_bit_identically(precision, formats, data, tmp_path):
    flags, straight, end = straight_to_the_end(data, precision, tmp_path)
    places = dict(ckpt_dir=str(tmp_path / "c"), log_dir=str(tmp_path / "log"))
    killed = start("PP2", flags | WINDOWS | places, "pec_bodies:die_after", iteration=8).wait()
    assert {result.exit for result in killed} == {-9}, killed[0].output[-2000:]
    resumed = train("PP2", flags | WINDOWS | places)
    assert resumed.start == 7 and resumed.records == straight.records[7:]
    assert contents(Store(LocalStorage(tmp_path / "c")), 14) == contents(end, 14)
    assert [event["exact"] for event in events(places, "replay")] == [True, True]
    assert formats_of(end, 14) == dict(zip(("master", "exp_avg", "exp_avg_sq"), formats, strict=True))


def formats_of(store, iteration):
    names = store.read_manifest(iteration).files
    reader = ShardReader(store.storage.open_blob(f"{checkpoint_name(iteration)}/{name}") for name in names)
    found = {(source.box.slot, source.box.dtype) for source in reader.sources() if source.box.slot != "param"}
    formats = dict(found)
    assert len(formats) == len(found)
    return formats


def test_window_of_another_precision_is_refused(data, tmp_path):
    flags = data | SMALL | dict(bf16=True, train_iters=20)
    window = dict(ckpt_policy="sparse", sparse_window=3, ckpt_dir=str(tmp_path / "c"), ckpt_blocking=True)
    with Launched("1", flags | window, tmp_path / "job") as job:
        job.reach(9)
        job.lose(0)
    for other, format in (
        (dict(bf16=False), "fp32"),
        (PRODUCTS, "bf16 with tensorwise fp8 products (hybrid) of torch"),
    ):
        said = refused_by_program(flags | window | other)
        assert f"computes in bf16, and this run computes in {format}" in said


def test_conversion_keeps_small_moments(data, tmp_path):
    flags = data | SMALL | BF16 | EIGHT | dict(train_iters=5)
    straight = train("1", flags)
    saved = dict(ckpt_policy="full", snapshot_interval=3, ckpt_dir=str(tmp_path / "snapshots"), exit_interval=3)
    train("1", flags | saved)
    there = [str(tmp_path / "snapshots"), str(tmp_path / "dense")]
    back = [str(tmp_path / "dense" / "iter_0000003"), str(tmp_path / "back"), "--to", "snapshot"]
    for places in (there, back):
        assert program.main(places) == 0
    said = refused_by_program(flags | dict(load=there[1], exp_avg_dtype=None))
    assert only_code(said) == "optimizer-format-differs" and "pass --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16" in said
    for source in (dict(load=there[1]), dict(ckpt_policy="full", snapshot_interval=9, ckpt_dir=back[1])):
        resumed = train("1", flags | source)
        assert resumed.start == 3 and resumed.records == straight.records[3:]
