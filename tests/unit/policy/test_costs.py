"""What policies make of flags, and what a checkpoint of theirs is priced at."""

import dataclasses
from types import SimpleNamespace

import pytest

from moc.policy import POLICIES, Every, IntervalTuner, parse_interval, policy_named, registered_policy
from moc.policy.costs import Machine, Price, SnapshotSizes
from moc.policy.flags import JobShape, number_or_auto
from moc.policy.pec_selection import PLT_LIMIT
from moc.policy.windows import OperatorBytes
from tests.cases import each_row
from tests.errors import raises
from tests.model_shape import ModelShape, model_operators

ONE, FOUR = OperatorBytes(12.0, 2.0), [OperatorBytes(12.0, 2.0)] * 4
SMALL = [OperatorBytes(6.0, 1.0)] * 6


def machine(ks=(1, 2, 4, 16), stages=(FOUR, SMALL), hidden_s=1.0, rate=31.0) -> Machine:
    return Machine(
        3, SnapshotSizes(48.0, 144.0), lambda k: SnapshotSizes(10.0 * k, 30.0 * k), stages, hidden_s, rate, ks
    )


def test_dense_checkpoint_is_priced_with_all_state():
    full = registered_policy("full")
    assert list(full.costs.candidates(machine())) == [{}] and full.costs.describe({}) == ""
    assert full.costs.price(machine(), {}) == Price(SnapshotSizes(48.0, 144.0), (), None, 1)


def test_partial_checkpoint_is_priced_with_k_experts():
    pec = registered_policy("pec")
    assert list(pec.costs.candidates(machine())) == [{"k": 1}, {"k": 2}, {"k": 4}]
    assert pec.costs.price(machine(), {"k": 4}) == Price(SnapshotSizes(40.0, 120.0), k=4)
    assert pec.costs.price(machine(), {}) == Price(SnapshotSizes(20.0, 60.0), k=2)  # one in eight
    assert pec.costs.price(machine(ks=(1, 2, 3)), {}).k == pec.costs.price(machine(ks=(1, 2, 3)), {"k": 0}).k == 1
    assert pec.costs.price(machine(ks=()), {}) == Price(SnapshotSizes(48.0, 144.0))
    assert (pec.costs.describe({"k": 4}), pec.costs.describe({})) == ("K 4", "")
    assert (machine().num_experts, machine(ks=()).num_experts) == (16, 0)


def test_window_candidates_end_after_first_hidden_length():
    """At 31 bytes in an iteration, two of four operators fit beside the compute weights of the others (28 bytes).

    2 N - 1 buffers are kept for a window of N snapshots: those of the complete window, and all but one of the next.
    """
    sparse = registered_policy("sparse")
    assert list(sparse.costs.candidates(machine())) == [{"window": 1}, {"window": 2}, {"window": 3}]
    snapshots = [2 * 12.0 + 2 * 2.0, 2 * 12.0]
    price = sparse.costs.price(machine(), {})
    assert price == Price(
        SnapshotSizes(52.0, 156.0), snapshots, window_length=2, snapshots_in_memory=3
    ) and price == sparse.costs.price(machine(), {"window": 2})
    assert sparse.costs.price(machine(), {"window": 4}) == Price(
        SnapshotSizes(60.0, 180.0), [18.0, 16.0, 14.0, 12.0], window_length=4, snapshots_in_memory=7
    )
    longer = sparse.costs.price(
        machine(stages=(FOUR[:1], SMALL)), {"window": 3}
    )  # of the first, all is in one snapshot
    assert longer.window_length == 3 and longer.size == SnapshotSizes(42.0, 126.0)
    assert longer.snapshots == [2 * 6.0 + 4.0, 2 * 6.0 + 2.0, 2 * 6.0]
    assert sparse.costs.describe({"window": 2}) == "window 2"


ASKED = dict(
    ckpt_policy="pec", ckpt_tier="memory", snapshot_interval="4", persist_interval=None, mtbf_s=3600.0, pec_k="2",
    pec_k_snapshot=None, pec_k_persist=None, pec_selection="sequential", pec_target="both", pec_dynamic_k=False,
    pec_plt_limit=PLT_LIMIT, sparse_window="auto", sparse_order="popularity",
)  # fmt: skip


def asked(**flags) -> SimpleNamespace:
    return SimpleNamespace(**ASKED | flags)


def settings(name="pec", **flags) -> dict:
    return POLICIES[name].settings(asked(**flags), JobShape(ep=2, stages=(0, 0, 1)))


def test_policy_settings_follow_from_flags_and_job():
    found = settings()
    assert found == dict(
        k=2, k_persist=2, selection="sequential", target="both", ep=2, plt_limit=0.0, persist_every=1,
    )  # fmt: skip
    operators = model_operators(ModelShape((1, 1), 8, 16, 8, 8, 4, 100, num_experts=4, expert_ffn_hidden_size=8))
    assert policy_named("pec")(operators, Every(4), **found).k_to_persist == 2
    more = settings(pec_k_snapshot=4, pec_k_persist=1, pec_dynamic_k=True, pec_plt_limit=0.01, ckpt_tier="disk")
    assert (more["k"], more["k_persist"], more["plt_limit"]) == (4, 1, 0.01)
    assert settings("sparse", sparse_order="index") == dict(window=0, order="index", ep=2, stages=(0, 0, 1))
    assert settings("sparse", sparse_window="7")["window"] == 7
    assert settings("full") == {}


@each_row(("persist", "snapshot", "every"), [(12, "4", 3), (4, "4", 1), (None, "4", 1), (12, "auto", 1), (13, "4", 3)])
def test_persist_interval_sets_snapshots_per_stored_snapshot(persist, snapshot, every):
    assert settings(persist_interval=persist, snapshot_interval=snapshot)["persist_every"] == every


@each_row(
    ("flags", "sentences"),
    [
        ({}, []),
        (dict(pec_k="auto"), []),
        (dict(pec_k="auto", pec_k_snapshot=2, pec_k_persist=2), ["--pec-k auto"]),
        (dict(pec_k="auto", persist_interval=4), ["--pec-k auto"]),
        (dict(pec_k="auto", pec_k_persist=2), ["--pec-k auto", "--pec-k-persist 2"]),
        (dict(pec_k_snapshot=3), []),
        (dict(pec_k_persist=3), ["--pec-k-persist 3"]),
        (dict(pec_k_snapshot=3, ckpt_tier="disk"), ["--ckpt-tier disk"]),
        (dict(ckpt_tier="disk"), []),
        (dict(pec_dynamic_k=True), []),
        (dict(pec_target="optimizer"), []),
        (dict(pec_dynamic_k=True, pec_target="optimizer"), ["--pec-target optimizer"]),
        (dict(pec_plt_limit=0.01), ["--pec-plt-limit"]),
        (dict(pec_plt_limit=0.01, pec_dynamic_k=True), []),
        (dict(pec_plt_limit=0.01, pec_k="auto"), []),
        (dict(pec_plt_limit=0.01, ckpt_policy="auto"), []),
    ],
    ids=str,
)
def test_conflicting_flags_are_refused(flags, sentences):
    found = list(map(str, POLICIES["pec"].flags.conflicts_in(asked(**flags))))
    assert len(found) == len(sentences) and all(map(str.__contains__, found, sentences))


def test_sparse_windows_require_snapshot_in_every_iteration():
    refusals = POLICIES["sparse"].flags.conflicts_in
    assert [list(refusals(asked(snapshot_interval=every))) for every in ("auto", "1")] == [[], []]
    assert "4th" in str(next(refusals(asked())))


def test_number_or_auto_is_parsed():
    assert [number_or_auto(text) for text in ("auto", "1", 12)] == ["auto", "1", "12"]
    for wrong in ("0", "-1", "1.5", "", "all"):
        with raises("value-unreadable", repr(wrong)):
            number_or_auto(wrong)
    assert isinstance(parse_interval("auto"), IntervalTuner) and parse_interval("auto").budget == 0.03


def test_gradients_are_priced_with_snapshot_each_iteration():
    selective = registered_policy("selective")
    full = dataclasses.replace(
        machine(), full_snapshot=SnapshotSizes(160.0, 480.0), with_experts=lambda k: SnapshotSizes(10 * k, 30 * k)
    )
    plain = selective.costs.price(full, {"experts": 2})
    assert plain == Price(SnapshotSizes(20, 60), k=2) and not plain.repeated_updates
    price = selective.costs.price(dataclasses.replace(full, gradient_ratio=1 / 3), {"bytes": 60})
    assert price.size == plain.size and price.tokens_at_risk == (16 / 2 - 1) / 2  # equally busy: no better than in turn
    cost = 1 / 3 + (2 / 3) / 33  # states every 33rd time, since 4 times 8 snapshots would save all in turn
    share = 2 / (16 * cost)
    assert price.repeated_updates == pytest.approx(share * 32 / 2) and price.chained_bytes == pytest.approx(
        share / 3 * 32 * 480
    )
    assert price.interval == 1 and plain.interval is None
    assert (
        selective.costs.price(dataclasses.replace(full, gradient_ratio=1 / 3), {"experts": 2, "gradients": "off"})
        == plain
    )
    assert selective.costs.price(dataclasses.replace(full, gradient_ratio=1 / 3), {"experts": 2}) == plain
    most = selective.costs.price(dataclasses.replace(full, gradient_ratio=1 / 3), {"bytes": 16 * 30})
    assert (
        most.tokens_at_risk == 0.0 and most.size.busiest == 10 * 8 and most.repeated_updates == 2
    )  # 16 x (1/3 + 2/15), rounded up
    counted = dataclasses.replace(full, gradient_ratio=1 / 3, tokens_at_risk=lambda share, always: share * always)
    assert selective.costs.price(counted, {"bytes": 60}).tokens_at_risk == pytest.approx(cost / 8)
