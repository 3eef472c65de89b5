"""Chains of gradients that are folded beside training: what a run resumes from has the bits that it had."""

from __future__ import annotations

import contextlib
import shutil
import time

import psutil
import pytest

from moc.errors import codes_in
from moc.recovery.expert_versions import operator_file_name
from moc.session.helpers import BackgroundOptimizer
from moc.state.operators import Detail
from moc.store.storage import LocalStorage
from moc.store.store import Store, checkpoint_name
from tests.host_memory import find_memory_storage
from tests.integration.launched import Launched
from tests.integration.snapshot_files import contents, events, node_memory, start, train
from tests.integration.test_gradients import CLIPPED, GRADIENTS, WAYS
from tests.integration.test_pec import saved
from tests.integration.test_peers import lose, memory_of
from tests.shared import ALL, once
from tests.unit.inspect.test_verify import flip
from tests.unit.recovery.test_folds import Run
from tests.unit.session.test_folds import go_on, renew

FOLDED = GRADIENTS | dict(selective_fold="peers")
FOLDED_FILE, LAST, LOWEST = ".folded.safetensors", 60, 19
FOLDER, PROGRAM = "fold", "tests/integration/folding_pretrain_gpt_moe.py"


def folders(job: Launched) -> list[psutil.Process]:
    """The processes of a job that fold."""
    found = []
    for launcher in job.launchers:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [p for p in psutil.Process(launcher.pid).children(recursive=True) if FOLDER in p.cmdline()]
    return found


def folded_until(job: Launched, iteration: int, seconds: float = 500) -> None:
    """Waits until experts were folded after an iteration."""
    deadline = time.monotonic() + seconds
    while not any(event["folded"] and event["iteration"] > iteration for event in job.events("fold")):
        assert job.process.poll() is None and time.monotonic() < deadline, job.console[-4000:]
        time.sleep(0.02)


@pytest.mark.recovery
@pytest.mark.parametrize("way", WAYS if ALL else ["fp16 EP2"])
def test_resume_from_folded_experts_is_bit_identical(way, data, tmp_path):
    layout, precision = WAYS[way]
    flags = data | CLIPPED | precision | dict(train_iters=30)
    with node_memory() as memory:
        snapshots = FOLDED | dict(ckpt_memory_dir=memory, ckpt_dir=str(tmp_path / "c"), log_dir=str(tmp_path / "log"))
        snapshots |= dict(selective_max_age=8)
        killed = start(layout, flags | snapshots, body="pec_bodies:die_after_folding", iteration=28)
        assert {result.exit for result in killed.wait()} == {-9}
        store = Store(find_memory_storage(memory, snapshots["ckpt_dir"]), allows_slack=True)
        there = {file for iteration in store.iterations() for file in store.read_manifest(iteration).files}
        assert any(file.endswith(FOLDED_FILE) for file in there)
        resumed = train(layout, flags | snapshots)
    told = events(flags | snapshots, "fold")
    assert sum(event["equal"] for event in told) >= 4 and not any(event["differing"] for event in told)
    (resume,), (lost,) = events(flags | snapshots, "resume"), events(flags | snapshots, "lost")
    whole = train(layout, flags)
    assert resume["iteration"] == resumed.start >= 27 and lost["plt"] == 0
    if "fp16" in way:
        assert sum(record["skipped"] for record in whole.records[1:27]) >= 1
    assert resumed.weights == whole.weights and resumed.losses == whole.losses[resumed.start :]


def test_killed_gradient_applier_restarts_and_ends_with_worker(tmp_path, monkeypatch):
    """What is planted in the working directory is not imported."""
    for name in ("glob", "json", "secrets", "runpy", "signal", "moc"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})")
    monkeypatch.chdir(tmp_path)
    run, folds = Run(tmp_path / "memory"), BackgroundOptimizer()
    run.train(e0=Detail.FULL, e1=Detail.FULL, e2=Detail.FULL)
    go_on(folds, run, 2)
    assert renew(folds, run)[0]["equal"] == 1
    (killed,) = folds.processes
    psutil.Process(killed).kill()
    go_on(folds, run, 1)
    before = run.comes_back()  # whatever it was doing: bit by bit
    assert go_on(folds, run, 6) and min(run.comes_back().values()) > max(4, min(before.values()))
    (last,) = folds.processes
    folds.close()
    assert last != killed and not psutil.pid_exists(last) and not (tmp_path / "ran").exists()


def servers(job: Launched) -> list[psutil.Process]:
    """The replica servers of a job."""
    nodes = range(len(job.launchers))
    return [psutil.Process(pid) for node in nodes for pid in job.children("moc.runtime.replica_server", node)]


def stop_while_it_folds(job: Launched) -> list[psutil.Process]:
    """Stops all folders, and waits until one has an order: then snapshots wait for it, and training for them."""
    stopped = folders(job)
    for process in stopped:
        while process.nice() != LOWEST:  # earlier, it would not end with its worker
            time.sleep(0.02)
        process.suspend()
    seen, since = job.iteration, time.monotonic()
    while time.monotonic() < since + 2:
        if job.iteration > seen:
            seen, since = job.iteration, time.monotonic()
        time.sleep(0.02)
    return stopped


def let_go_on(stopped: list[psutil.Process]) -> None:
    """Those that are not lost."""
    for process in stopped:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def flags_of(data, tmp_path, memory: str) -> dict:
    """Of a job whose nodes fold each other's experts."""
    flags = data | CLIPPED | FOLDED | dict(ckpt_tier="peers", ckpt_memory_dir=memory, ckpt_dir=str(tmp_path / "c"))
    return flags | dict(selective_max_age=8, max_snapshot_lag=1, train_iters=LAST)


def undisturbed(data, directory) -> dict[str, str]:
    """What a run that folds nothing, and loses nobody, ends with; each worker of the tests has the same data."""
    plain = dict(ckpt_policy="full", snapshot_interval=LAST, ckpt_dir=str(directory), train_iters=LAST)

    def compute() -> dict[str, str]:
        assert set(train("EP2", data | CLIPPED | plain).codes) == {0}
        return contents(Store(LocalStorage(directory)), LAST)

    return once(["nothing is folded", LAST], compute)


def assert_nobody_can_tell(job: Launched, data, tmp_path) -> None:
    assert job.wait() == 0, job.console[-4000:]
    assert {event["plt"] for event in job.events("lost")} == {0} and job.events("resume")
    assert not any(event["differing"] for event in job.events("fold")) and job.left() == []
    assert contents(Store(LocalStorage(tmp_path / "c")), LAST) == undisturbed(data, tmp_path / "plain")


@pytest.mark.recovery
def test_lost_workers_appliers_and_servers_keep_bits(data, tmp_path):
    """A worker dies with gradients copied, one with copies that nobody knows of, one while it repeats updates."""
    points = {"gradient_staged": 5, "peers_committed": 9, "folding": 0}
    kills = [f"kill rank=1 iteration={iteration} point={point}" for point, iteration in points.items()]
    with node_memory() as memory:
        flags = flags_of(data, tmp_path, memory) | dict(inject=kills)
        with Launched("EP2", flags, tmp_path / "job", nodes=2, spares=1, program=PROGRAM) as job:
            folded_until(job, 0)
            for process in [*folders(job), *servers(job)]:
                process.kill()
            folded_until(job, job.iteration)
            stopped = stop_while_it_folds(job)
            lose(job, 1, memory_of(flags, "1"))
            let_go_on(stopped)
            assert_nobody_can_tell(job, data, tmp_path)
        assert {event["point"] for event in job.events("inject")} == set(points)


@pytest.mark.recovery
@pytest.mark.skipif(not ALL, reason="MOC_TESTS_ALL=1 loses all workers while they fold")
def test_loss_of_all_workers_during_apply_is_bit_identical(data, tmp_path):
    with node_memory() as memory:
        flags = flags_of(data, tmp_path, memory)
        with Launched("EP2", flags, tmp_path / "job", nodes=2, program=PROGRAM) as job:
            folded_until(job, 0)
            stop_while_it_folds(job)
            for node in (0, 1):
                job.lose(node)
            shutil.rmtree(memory_of(flags, "1"))
            for node in (0, 1):
                job.start(node)
            assert_nobody_can_tell(job, data, tmp_path)
        assert {tier for event in job.events("resume") for _, tier in event["sources"]} == {"memory"}


@pytest.mark.recovery
@pytest.mark.skipif(not ALL, reason="MOC_TESTS_ALL=1 damages gradients behind folded ones")
def test_damaged_gradient_is_named_and_ends_its_chain(data, tmp_path):
    flags, last = data | CLIPPED | dict(train_iters=30), 28
    everything = dict(ckpt_policy="full", snapshot_interval=1, ckpt_keep=99, ckpt_dir=str(tmp_path / "full"))
    assert set(train("EP2", flags | everything | dict(exit_interval=last)).codes) == {0}
    states = saved(Store(LocalStorage(tmp_path / "full")))
    with node_memory() as memory:
        flags |= FOLDED | dict(ckpt_memory_dir=memory, ckpt_dir=str(tmp_path / "c"), selective_max_age=8)
        killed = start("EP2", flags, body="pec_bodies:die_after_folding", iteration=last)
        assert {result.exit for result in killed.wait()} == {-9}
        place = find_memory_storage(memory, flags["ckpt_dir"])
        there = {
            iteration: Store(place, allows_slack=True).read_manifest(iteration).files
            for iteration in Store(place).iterations()
        }
        bases = {file: i for i, files in sorted(there.items()) for file in files if file.endswith(FOLDED_FILE)}
        folded, base = min(bases.items(), key=lambda item: item[1])
        expert = folded.removesuffix(FOLDED_FILE)
        assert operator_file_name(expert) in there[base + 1] and operator_file_name(expert) in there[base + 2]
        flip(place.root / checkpoint_name(base + 2) / operator_file_name(expert), position=-8 * 16)
        resumed = start("EP2", flags, body="pec_bodies:loaded").wait()
    begun = resumed[0].value["start"]
    assert begun >= last - 1 and any(
        f"iter_{base + 2:07d}" in result.output and "checkpoint-damaged" in codes_in(result.output)
        for result in resumed
    )
    _, layer, _, number = expert.split(".")
    for result in resumed:
        for fragment, digest in result.value["hashes"].items():
            is_damaged = fragment.startswith(f"decoder.layers.{layer}.mlp.experts.experts.{number}.")
            assert digest == states[fragment][base + 1 if is_damaged else begun], fragment
