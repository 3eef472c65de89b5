"""Expert versions in another process behave as in this one; a process that has died is started again."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from moc.recovery.expert_versions import ExpertVersions
from moc.session.helpers import RemoteExpertVersions, RetentionClient
from moc.store.ownership import Claim
from moc.store.storage import LocalStorage
from moc.store.store import Store, checkpoint_name
from tests.errors import raises
from tests.unit.recovery.test_carrying import ONES, in_full, newest, take

PLANS = [in_full(*range(8)), in_full(0, 1), in_full(2, 3), in_full(1, 4), in_full(0, 5), in_full(6, 7)]


@pytest.fixture
def carriers():
    carriers = RetentionClient()
    yield carriers
    carriers.close()


def store_at(path, claim: Claim | None = None) -> Store:
    store = Store(LocalStorage(path, in_memory=True, claim=claim), allows_slack=True)
    store.take()
    return store


def contents(store: Store) -> dict[str, bytes]:
    """Every file of every snapshot."""
    directories = [checkpoint_name(iteration) for iteration in store.iterations()]
    return {
        f"{d}/{name}": store.storage.read(f"{d}/{name}") for d in directories for name in store.storage.list_names(d)
    }


def test_process_writes_same_files_as_thread(carriers, tmp_path):
    claim = Claim("job", (1, 2), "run")
    here, there = store_at(tmp_path / "here", claim), store_at(tmp_path / "there", claim)
    local, remote = ExpertVersions(here, ONES), RemoteExpertVersions(carriers, there, ONES)
    for iteration, plan in enumerate(PLANS, 1):
        assert take(here, local, iteration, plan) == take(there, remote, iteration, plan)
        assert contents(here) == contents(there)
    assert newest(there)["layers.0.expert.7"] == (6, 6)


def test_killed_server_restarts_and_loses_nothing(carriers, tmp_path):
    store = store_at(tmp_path / "memory")
    remote = RemoteExpertVersions(carriers, store, ONES)
    for iteration, plan in enumerate(PLANS[:3], 1):
        take(store, remote, iteration, plan)
    carriers._helper._process.kill()
    carriers._helper._process.wait()
    for iteration, plan in enumerate(PLANS[3:], 4):
        take(store, remote, iteration, plan)
    assert {name: at[0] for name, at in newest(store).items()} == {
        **{f"layers.0.expert.{e}": at for e, at in enumerate((5, 4, 3, 3, 4, 5, 6, 6))},
        "output": 6,
    }


def test_process_that_dies_during_call_is_named(carriers, tmp_path):
    store = store_at(tmp_path / "memory")
    remote = RemoteExpertVersions(carriers, store, ONES)
    take(store, remote, 1, PLANS[0])
    carriers._helper._process.stdin.close()  # as if it had died after it was looked at
    carriers._helper._process.stdin = open("/dev/full", "w")
    with raises("helper-lost", "has died"):
        remote.remove_outdated(1)
    take(store, remote, 2, PLANS[1])  # by another one


def test_error_in_process_is_raised_in_caller(carriers, tmp_path):
    older = store_at(tmp_path / "memory", Claim("job", (1, 1)))
    remote = RemoteExpertVersions(carriers, older, ONES)
    take(older, remote, 1, PLANS[0])
    take(older, remote, 2, PLANS[1])
    store_at(tmp_path / "memory", Claim("job", (1, 2)))
    with raises("directory-taken-over", "generation 1.2"):
        take(older, remote, 3, PLANS[2])


def test_nothing_is_retained_after_close(carriers, tmp_path):
    remote = RemoteExpertVersions(carriers, store_at(tmp_path / "memory"), ONES)
    carriers.start()
    process = carriers._helper._process
    carriers.close()
    assert process.poll() is not None
    with raises("helper-lost", "ended"):
        remote.remove_outdated(1)


def test_unstartable_process_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.executable", str(tmp_path / "gone"))
    remote = RemoteExpertVersions(RetentionClient(), store_at(tmp_path / "memory"), ONES)
    with raises("helper-lost", str(tmp_path / "gone")):
        remote.remove_outdated(1)


def test_training_does_not_wait_for_running_call(carriers, tmp_path):
    carriers.start()
    carriers._helper._process.send_signal(signal.SIGSTOP)  # a call takes as long as it likes
    remote = RemoteExpertVersions(carriers, store_at(tmp_path / "memory"), ONES)
    with ThreadPoolExecutor(1) as beside:
        call = beside.submit(remote.remove_outdated, 1)
        while not carriers._calling.locked():
            time.sleep(0.001)
        carriers.start()
        assert not call.done()
        carriers._helper._process.send_signal(signal.SIGCONT)
        call.result()


def test_stopped_process_is_killed_and_restarted(carriers, tmp_path):
    store = store_at(tmp_path / "memory")
    remote = RemoteExpertVersions(carriers, store, ONES)
    take(store, remote, 1, PLANS[0])
    carriers._helper._process.send_signal(signal.SIGSTOP)
    carriers._helper.timeout_s = 0.1
    with raises("helper-lost", "0.1 s"):
        remote.remove_outdated(1)
    carriers._helper.timeout_s = 60
    take(store, remote, 2, PLANS[1])


def test_process_shares_session_not_process_group(carriers, tmp_path):
    """Linux may share processors out between sessions first; a terminal signals a group."""
    assert carriers.processes == []
    store = store_at(tmp_path / "memory")
    take(store, RemoteExpertVersions(carriers, store, ONES), 1, PLANS[0])
    (carrier,) = carriers.processes
    assert os.getsid(carrier) == os.getsid(0)
    assert os.getpgid(carrier) == carrier != os.getpgid(0)
    carriers._helper._process.kill()
    carriers._helper._process.wait()
    assert carriers.processes == []
