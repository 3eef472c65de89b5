"""Storage that is slower than its interval, fails in turns or hangs: what a run has after the loss of all memory."""

import itertools
import os
import shutil
from pathlib import Path

import pytest

from moc.policy import Capability, Every, policy_named
from moc.recovery.inventory import Persisted, Promise, in_storage, list_checkpoints, overdue
from moc.session.saving.storage import ALL_REDUCES
from moc.store.storage import LocalStorage
from moc.store.store import Store
from tests.integration.snapshot_files import events, node_memory, start, train
from tests.integration.test_atomic_save import wait_for
from tests.model_shape import ModelShape, model_operators
from tests.shared import ALL

EVERY = 2
POLICIES = {
    "full": (dict(ckpt_policy="full"), dict()),
    "sparse": (dict(ckpt_policy="sparse", sparse_window="2"), dict(window=2)),
    "gradient": (dict(ckpt_policy="gradient", gradient_window="2"), dict(window=2)),
    "pec": (dict(ckpt_policy="pec", pec_k="1"), dict(k=1)),
    "selective": (dict(ckpt_policy="selective", selective_experts=1), dict(experts=1)),
    "selective, states": (
        dict(ckpt_policy="selective", selective_experts=1, selective_gradients="off"),
        dict(experts=1),
    ),
}
STORAGE = {
    "slow": dict(lag=3 * EVERY),
    "failing": dict(fails_every=3),
    "hanging": dict(hangs_from=24),
}
WRITTEN = {"slow": 10, "failing": 10, "hanging": 4}
"""Snapshots to wait for; before those that hang, storage is as fast as it can be."""


PAIRS = list(itertools.product(POLICIES, STORAGE))


@pytest.mark.recovery
@pytest.mark.parametrize(("policy", "storage"), PAIRS if ALL else PAIRS[::4])
def test_slow_storage_is_as_new_as_promised_after_memory_loss(policy, storage, data, tmp_path):
    flags, settings = POLICIES[policy]
    with node_memory() as memory:
        places = dict(ckpt_dir=str(tmp_path / "snapshots"), ckpt_memory_dir=memory, log_dir=str(tmp_path / "log"))
        interval = {} if flags["ckpt_policy"] in ("sparse", "gradient") else dict(snapshot_interval="1")
        flags = data | flags | places | interval
        flags |= dict(ckpt_tier="memory", persist_interval=EVERY, train_iters=100_000, ckpt_keep=99)
        world = start("1", flags, "storage_bodies:train", **STORAGE[storage])

        def enough() -> bool:
            reported = storage != "hanging" or any(e.get("storage_overdue") for e in events(flags, "iteration"))
            return len(events(flags, "persist")) >= WRITTEN[storage] and reported

        wait_for(lambda: enough() or world.ended())
        assert not world.ended()
        world.kill()
        world.wait()
        shutil.rmtree(memory)
        os.makedirs(memory)
        at = events(flags, "iteration")[-1]["iteration"]

        shape = ModelShape((1, 1), 32, 48, 32, 32, 16, 256, num_experts=4, expert_ffn_hidden_size=48)
        model = policy_named(flags["ckpt_policy"])(model_operators(shape), Every(1), **settings)
        held = in_storage(list_checkpoints(Store(LocalStorage(Path(flags["ckpt_dir"]))))[0])
        left = Persisted.of(held, model)
        published = [0, *(event["iteration"] for event in events(flags, "persist")), at]
        gap = max(b - a for a, b in itertools.pairwise(published))
        promise = Promise.of(model, gap + model.schedule.window_length, outstanding=1, commits=ALL_REDUCES)
        assert left.iteration > 0 and not overdue(left, promise, model.operators, at, since=1)

        ended = train("1", flags | dict(exit_interval=left.iteration + 1))
        assert ended.start == left.iteration
    if storage == "slow":
        assert any(event["storage_overdue"] for event in events(flags, "iteration") if "storage_overdue" in event)
    has_windows = Capability.WINDOWS in model.requires
    if storage == "failing":  # what others of a window depend on is written again
        assert bool(events(flags, "save_retried")) == has_windows != bool(events(flags, "save_failed"))
