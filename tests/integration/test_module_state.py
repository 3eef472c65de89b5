"""A discarded iteration leaves no trace in modules, and values that modules keep survive the loss of a worker."""

from __future__ import annotations

import itertools

import pytest

from moc.store.storage import LocalStorage
from moc.store.store import Store
from tests.integration.launched import Launched
from tests.integration.snapshot_files import contents, node_memory
from tests.integration.tiny import EXPERT_BIAS
from tests.shared import ALL

LAST = 14
USERS = "tests/integration/stateful_pretrain_gpt_moe.py"
KILLS = (
    # the other stage has routed tokens by then; the first snapshot may be of iteration 3
    "kill rank=3 iteration=5 point=forward_backward",
    "kill rank=2 iteration=7 point=after_reduce",
    "kill rank=0 iteration=9 point=after_commit",
    "kill rank=1 iteration=11 point=before_commit",
)
LOSSY = {
    "pec": dict(ckpt_policy="pec", pec_k="1", snapshot_interval=1),
    "selective": dict(ckpt_policy="selective", selective_experts=1, snapshot_interval=1, selective_gradients="off"),
}
POLICIES = {
    "full": dict(ckpt_policy="full", snapshot_interval=1),
    "full every third iteration": dict(ckpt_policy="full", snapshot_interval=3),
    "gradient": dict(ckpt_policy="gradient", gradient_window="3"),
    "sparse": dict(ckpt_policy="sparse", sparse_window="3"),
    "sparse, by stage": dict(ckpt_policy="sparse", sparse_window="3", upstream_logging=True),
    "selective": dict(ckpt_policy="selective", selective_experts=4, snapshot_interval=1, selective_max_age=99),
}
ROUTERS = {
    "aux_loss": dict(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.1),
    "seq_aux_loss": dict(moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=0.1),
    "global_aux_loss": dict(moe_router_load_balancing_type="global_aux_loss", moe_aux_loss_coeff=0.1),
    "sinkhorn": dict(moe_router_load_balancing_type="sinkhorn", moe_aux_loss_coeff=0.0),
    "quantile_balancing": dict(
        moe_router_load_balancing_type="quantile_balancing",
        moe_router_quantile_balancing_ema=0.5,
        moe_aux_loss_coeff=0.0,
    ),
    "expert bias": dict(moe_router_load_balancing_type="none") | EXPERT_BIAS,
    "z loss": dict(moe_router_load_balancing_type="none", moe_z_loss_coeff=0.1),
}
OF_USERS = POLICIES if ALL else ["gradient"]
WITH_STATE = {"global_aux_loss": "selective", "quantile_balancing": "sparse, by stage", "expert bias": "selective"}
"""Routers that keep values from one iteration to the next, each with a policy."""
PAIRS = [*(itertools.product(ROUTERS, POLICIES) if ALL else WITH_STATE.items())]


def end_of(directory, memory: str, layout: str, flags: dict, **options) -> tuple[dict, list]:
    """Contents of the last snapshot of a job, and its losses and gradient norms."""
    snapshots = dict(ckpt_tier="memory", ckpt_memory_dir=memory, ckpt_dir=str(directory / "snapshots"))
    with Launched(layout, snapshots | flags, directory, **options) as job:
        assert job.wait() == 0, job.console[-4000:]
        killed = [event for event in job.events("generation") if "signal 9" in event["reason"]]
        assert len(killed) == len(flags.get("inject", ()))
        assert "starts over" not in job.console
        return contents(Store(LocalStorage(directory / "snapshots")), LAST), job.records()


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory):
    """The end of a run with user modules and without a fault, by layout; evaluations change nothing."""
    known = {}

    def of(layout: str) -> tuple[dict, list]:
        if layout not in known:
            flags = data | dict(train_iters=LAST, ckpt_policy="full", snapshot_interval=LAST)
            with node_memory() as memory:
                known[layout] = end_of(tmp_path_factory.mktemp("plain"), memory, layout, flags, program=USERS)
        return known[layout]

    return of


@pytest.mark.recovery
@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", OF_USERS)
@pytest.mark.parametrize("layout", ["PP2xEP2"])
def test_user_modules_survive_lost_workers(policy, layout, data, undisturbed, tmp_path):
    flags = data | POLICIES[policy] | dict(train_iters=LAST, inject=KILLS, eval_interval=4, eval_iters=1)
    with node_memory() as memory:
        assert end_of(tmp_path, memory, layout, flags, program=USERS) == undisturbed(layout)


@pytest.mark.recovery
@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", LOSSY if ALL else ["selective"])
def test_lossy_policies_restore_values_with_their_experts(policy, data, tmp_path):
    flags = data | LOSSY[policy] | dict(train_iters=LAST, inject=KILLS, ckpt_dir=str(tmp_path / "snapshots"))
    with node_memory() as memory:
        flags |= dict(ckpt_tier="memory", ckpt_memory_dir=memory)
        with Launched("PP2xEP2", flags, tmp_path, program=USERS) as job:
            assert job.wait() == 0, job.console[-4000:]
            assert len(job.records()) == LAST and job.events("lost")


def test_values_of_user_modules_survive_layout_change(data, tmp_path):
    flags = data | dict(ckpt_policy="full", snapshot_interval=4, ckpt_dir=str(tmp_path / "snapshots"), train_iters=8)
    losses = {}
    for layout, exit_interval in (("PP2xEP2", 4), ("EP2", 8)):
        with Launched(layout, flags | dict(exit_interval=exit_interval), tmp_path / layout, program=USERS) as job:
            assert job.wait() == 0, job.console[-4000:]
            losses |= {iteration: loss for iteration, loss, _ in job.records()}
    with Launched("PP2xEP2", flags | dict(ckpt_dir=str(tmp_path / "other")), tmp_path / "other", program=USERS) as job:
        assert job.wait() == 0, job.console[-4000:]
        # each worker has values of its own, so other workers have others
        assert losses == pytest.approx({iteration: loss for iteration, loss, _ in job.records()}, rel=2e-2)


def test_elastic_job_refuses_user_modules_with_values(data, tmp_path):
    flags = dict(elastic=True, elastic_slots=3, use_distributed_optimizer=False, calculate_per_token_loss=True)
    with Launched("DP2", data | flags, tmp_path, program=USERS) as job:
        assert job.wait() == 2 and "--elastic" in job.console and "Traceback" not in job.console


@pytest.mark.recovery
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "policy"), PAIRS)
def test_router_state_survives_lost_workers(kind, policy, data, tmp_path):
    # several micro batches: an average over one does not change if that is counted twice
    flags = data | ROUTERS[kind] | dict(train_iters=LAST, global_batch_size=8)
    with node_memory() as memory:
        undisturbed = dict(ckpt_policy="full", snapshot_interval=LAST)
        plain = end_of(tmp_path / "plain", memory, "PP2xEP2", flags | undisturbed)
        flags |= POLICIES[policy] | dict(inject=KILLS)
        assert end_of(tmp_path / "killed", memory, "PP2xEP2", flags) == plain
