"""Whatever a signed manifest has in its state: the run resumes from it if it can be, and else from an older one."""

import shutil

import pytest

from moc.store.store import Store
from tests.integration.snapshot_files import node_memory, start, stores, train
from tests.integration.test_atomic_save import wait_for
from tests.integration.tiny import FLAGS
from tests.mutated_snapshots import OF_SNAPSHOT
from tests.shared import ALL
from tests.worlds import run_world

pytestmark = pytest.mark.timeout(3600)  # a case resumes up to 250 times

BATCHES, EACH = (4, 250) if ALL else (1, 30)
EVERY = dict(snapshot_interval=1, exit_interval=8)
LONG = dict(exit_interval=120, ckpt_keep=4)  # until several snapshots are taken
MEMORY = dict(snapshot_interval=1, ckpt_tier="memory", persist_interval=2)


def newest(store: Store) -> int:
    """The newest iteration in a store; 0 if there is none."""
    return max(store.iterations(), default=0)


CASES = {
    "full": EVERY | dict(ckpt_policy="full"),
    "full in memory": MEMORY | dict(ckpt_policy="full"),
    "full, interval chosen": LONG | dict(ckpt_policy="full", snapshot_interval="auto"),
    "pec": EVERY | dict(ckpt_policy="pec", pec_k=2, pec_selection="load_aware"),
    "pec, chosen": LONG | dict(ckpt_policy="pec", pec_k="auto", snapshot_interval="auto"),
    "sparse": EVERY | dict(ckpt_policy="sparse", sparse_window=3),
    "gradient": MEMORY | dict(ckpt_policy="gradient", gradient_window=2),
    "selective": EVERY | dict(ckpt_policy="selective", selective_experts=2),
    "auto": LONG | dict(ckpt_policy="auto"),
}


@pytest.mark.parametrize("batch", range(BATCHES))
@pytest.mark.parametrize("name", CASES if ALL else [*CASES][2:-1])
def test_changed_manifest_loses_at_most_its_snapshot(name, batch, data, tmp_path):
    with node_memory() as memory:
        places = dict(ckpt_dir=f"{memory}/snapshots", log_dir=str(tmp_path / "log"), ckpt_memory_dir=memory)
        flags = FLAGS | data | places | dict(ckpt_keep=99, train_iters=1000) | CASES[name]
        if "ckpt_tier" in flags:  # a run that ends by itself leaves nothing in memory
            world = start("1", flags)
            wait_for(lambda: world.ended() or ("memory" in stores(flags) and newest(stores(flags)["memory"]) > 8))
            world.kill()
            world.wait()
        else:
            train("1", flags)
        kept = {store.storage.name: str(tmp_path / tier) for tier, store in stores(flags).items()}
        for directory, copy in kept.items():
            shutil.copytree(directory, copy)
        body = "tests.integration.mutation_bodies:resume_each"
        then = dict(flags=flags | dict(exit_interval=1), kept=kept, seed=100 * batch + len(name), number=EACH)
        (told,) = run_world(1, body, timeout=3600, **then)
    assert not told["failed"], "\n".join(f"{where!a}\n{error!a}" for where, error in told["failed"][:20])
    assert sum(told["starts"].values()) == EACH and "0" not in told["starts"], told["starts"]
    assert str(told["older"]) in told["starts"] and len(told["starts"]) > 1, told
    print(name, batch, told["starts"], "trained:", told["trained"], "older:", told["older"])


PLAIN_BATCHES, PLAIN_EACH = (10, 100) if ALL else (1, 30)


@pytest.mark.parametrize("batch", range(PLAIN_BATCHES))
@pytest.mark.parametrize("what", [*OF_SNAPSHOT, "fence", "run"])  # a directory on disk has no lease
def test_changed_file_loses_at_most_its_snapshot(what, batch, tmp_path):
    with node_memory() as memory:
        flags = dict(ckpt_dir=f"{memory}/snapshots", ckpt_policy="full", train_iters=4, ckpt_keep=99)
        train("plain", flags)
        shutil.copytree(flags["ckpt_dir"], tmp_path / "kept")
        then = dict(flags=flags, kept=str(tmp_path / "kept"), what=what, seed=batch, number=PLAIN_EACH)
        (told,) = run_world(1, "tests.integration.mutation_bodies:resume_plain", timeout=3600, **then)
    assert not told["failed"], "\n".join(f"{where!a}\n{error!a}" for where, error in told["failed"][:20])
    assert set(told["starts"]) == ({"3", "4"} if what in OF_SNAPSHOT else {"4"}), told["starts"]
    print(what, batch, told["starts"])
