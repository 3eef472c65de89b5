"""One rank's part: captured, sealed, named in memory and written to storage, as Format v1 wants it."""

import errno
import os
import threading
import time
from concurrent.futures import Future, wait
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

from moc.background import GivenUpError
from moc.snapshot import device_copy, staging
from moc.snapshot.contents import share
from moc.snapshot.device_copy import Gate
from moc.snapshot.saver import Saver
from moc.state.operators import Detail, Fragment, Region
from moc.store.manifest import OperatorEntry
from moc.store.shard_file import LocalBlob, ShardReader, compute_digest, read_stored_boxes, tensor_bytes
from moc.store.storage import LocalStorage
from moc.store.store import Store
from tests.cases import each_row
from tests.errors import raises

CPU = torch.device("cpu")
OPERATORS = {"output": OperatorEntry("full", 3, {"master": 20})}


def fragment(name, slot, view, rows):
    """Some first rows of a tensor with two columns."""
    box = Region((0, 0), (view.numel() // 2, 2))
    return Fragment(name, slot, (rows, 2), box, view, True, False, view, 0, (0,), False)


def state_of(*sizes):
    """Some fragments that follow each other in one flat buffer, and a narrow one before them."""
    flat, fragments, start = torch.randn(sum(sizes)), [], 0
    fragments.append(fragment("output_layer.bias", "param", torch.randn(4).bfloat16(), 2))
    for number, size in enumerate(sizes):
        fragments.append(fragment(f"output_layer.{number}", "master", flat[start : start + size], size))
        start += size
    return fragments


@pytest.fixture
def storage(tmp_path):
    return Store(LocalStorage(tmp_path / "storage"))


@pytest.fixture
def memory(tmp_path):
    return Store(LocalStorage(tmp_path / "memory"))


def values(fragments):
    return [f.view.clone() for f in fragments]


def assert_holds(path, part, fragments, expected):
    """A file is what its part says, and holds some values, for us and for safetensors itself."""
    data = path.read_bytes()
    assert len(data) == part.file.bytes
    assert compute_digest(data[: part.file.header_bytes]) == part.file.header_xxh3_128
    assert part.file.header_bytes % 4096 == 0
    reader, sources = ShardReader([path], verifies=True), read_stored_boxes(LocalBlob(path))
    with safe_open(path, "pt") as file:
        stored = {(s.box.name, s.box.slot): (file.get_tensor(str(key)), s.digest) for key, s in enumerate(sources)}
    assert len(stored) == len(fragments)
    for f, value in zip(fragments, expected, strict=True):
        assert torch.equal(reader.read_region(f.name, f.slot, f.region), value.view(f.region.shape))
        tensor, digest = stored[f.name, f.slot]
        assert tensor.dtype == value.dtype and torch.equal(tensor, value.view(f.region.shape))
        assert digest == compute_digest(value.view(torch.uint8).numpy().data)


def test_snapshot_is_written_as_file_of_format(storage):
    fragments = state_of(6, 2, 12)
    expected = values(fragments)
    saver, begun = Saver(3, CPU, None, storage), time.perf_counter()
    snapshot = saver.take(0, 100, share(fragments), OPERATORS)
    assert (snapshot.persist_s, snapshot.persisted_bytes, snapshot.persisted) == (0, 0, None)
    snapshot.capture.wait()
    for f in fragments:
        f.view.zero_()  # the update
    saver.persist(snapshot)
    snapshot.persisted.result()
    path = storage.storage.root / "iter_0000100" / "rank_00003.safetensors"
    part = snapshot.finalized.result()
    assert 0 < snapshot.finalize_s <= time.perf_counter() - begun and snapshot.persisted_bytes == path.stat().st_size
    assert 0 < snapshot.persist_s <= time.perf_counter() - begun
    assert_holds(path, part, fragments, expected)
    assert part.name == path.name and storage.read_reports(100, [3]) == [part]
    assert part.operators == OPERATORS
    assert storage.iterations() == []  # to publish is somebody else's


def test_closed_gate_delays_snapshot_until_training_waits(storage):
    fragments, gate = state_of(6, 2), Gate()
    gate.close()
    snapshot = Saver(0, CPU, None, storage, gate).take(0, 1, share(fragments), OPERATORS)
    assert not wait([snapshot.finalized], timeout=0.05).done  # who seals it does not open the gate
    snapshot.capture.wait()
    for f in fragments:
        f.view.zero_()  # the update
    assert snapshot.finalized.result().file.bytes == snapshot.layout.nbytes
    assert snapshot.hashes[0] != compute_digest(bytes(24))


def test_shard_is_written_as_captured(storage):
    """What is written is what this rank has, whatever a rule would have given it, with the updates of that moment."""
    expert = "decoder.layers.0.mlp.experts.experts.{}.linear_fc1.weight"
    fragments = [
        fragment(expert.format(number), slot, torch.randn(6), 3)
        for number in (0, 1)
        for slot in ("master", "exp_avg", "exp_avg_sq")
    ]
    fragments.append(fragment("output_layer.weight", "master", torch.randn(8), 4))
    elsewhere, names = "layers.0.expert.7", ("layers.0.expert.0", "layers.0.expert.1", "output")
    taken = {name: OperatorEntry("full", 9, {}) for name in names}
    saver = Saver(2, CPU, None, storage)
    snapshot = saver.take(0, 5, share(fragments), taken)
    saver.persist(snapshot, {names[0]: Detail.MOMENTS, names[2]: Detail.FULL, elsewhere: Detail.FULL})
    snapshot.persisted.result()
    (part,) = storage.read_reports(5, [2])
    assert part.operators == {
        names[0]: OperatorEntry("moments", 9, {"exp_avg": 6, "exp_avg_sq": 6}),
        names[2]: OperatorEntry("full", 9, {"master": 8}),
    }
    chosen = [
        f for f in fragments if f.name == "output_layer.weight" or (f.operator == names[0] and f.slot != "master")
    ]
    path = storage.storage.root / "iter_0000005" / "rank_00002.safetensors"
    assert_holds(path, part, chosen, values(chosen))
    assert snapshot.persisted_bytes == path.stat().st_size


def test_buffer_of_memory_tier_is_checkpoint_file(storage, memory):
    fragments = state_of(6, 2)
    expected = values(fragments)
    saver = Saver(1, CPU, memory, storage)
    snapshot = saver.take(2, 7, share(fragments), OPERATORS)
    part = snapshot.finalized.result()
    path = memory.storage.root / "iter_0000007" / "rank_00001.safetensors"
    assert os.path.samefile(path, memory.storage.root / "slots" / "rank_00001.0")
    assert_holds(path, part, fragments, expected)
    assert memory.read_reports(7, [1]) == [part]
    assert not storage.storage.list_names()  # nobody asked for that

    snapshot.buffer.memory[part.file.header_bytes] ^= 1
    assert next(iter(read_stored_boxes(LocalBlob(path)))).find_damage()


def test_buffer_is_reused_if_it_fits_and_replaced_otherwise(storage, memory):
    saver = Saver(0, CPU, memory, storage)
    saver.reserve(0, share(state_of(6, 2)).layout.nbytes)
    slot = memory.storage.root / "slots" / "rank_00000.0"
    reserved = slot.stat().st_ino

    first = state_of(6, 2)
    one = saver.take(0, 1, share(first), OPERATORS)
    one.finalized.result()
    assert one.buffer.path == slot and slot.stat().st_ino == reserved

    second = state_of(4, 4)
    held = values(second)
    two = saver.take(0, 2, share(second), OPERATORS)
    part = two.finalized.result()
    assert two.buffer is one.buffer
    assert_holds(memory.storage.root / "iter_0000002" / "rank_00000.safetensors", part, second, held)

    third = state_of(6, 2, 4096)
    held = values(third)
    three = saver.take(0, 3, share(third), OPERATORS)
    part = three.finalized.result()
    assert three.buffer is not two.buffer and slot.stat().st_ino != reserved
    assert_holds(memory.storage.root / "iter_0000003" / "rank_00000.safetensors", part, third, held)
    # what the other buffer held is still there under the name that it had
    assert (memory.storage.root / "iter_0000002" / "rank_00000.safetensors").stat().st_ino == reserved


def test_shards_share_one_buffer_in_turn(storage):
    saver, windows = Saver(0, CPU, None, storage), [state_of(6, 2, 12), state_of(4), state_of(2, 2)]
    turns = [(fragments, share(fragments)) for fragments in windows]
    for iteration, (fragments, its) in enumerate(turns * 2):
        for f in fragments:
            f.view.copy_(torch.randn(f.view.shape))
        snapshot = saver.take(0, iteration, its, OPERATORS)
        saver.persist(snapshot)
        snapshot.persisted.result()
        path = storage.storage.root / f"iter_{iteration:07d}" / "rank_00000.safetensors"
        assert_holds(path, snapshot.finalized.result(), fragments, values(fragments))


def test_smallest_free_buffer_that_fits_is_taken(storage, memory):
    saver, sizes = Saver(0, CPU, memory, storage), (4096, 2, 1024)
    shares = [share(state_of(size)) for size in sizes]
    buffers = [saver.take(slot, slot + 1, shares[slot], OPERATORS).buffer for slot in range(3)]

    def taken(slot, number, others):
        return saver.take(slot, 4 + number, shares[number], OPERATORS, others).buffer

    assert taken(0, 1, [0, 1, 2]) is buffers[1] and taken(1, 2, [1, 2]) is buffers[2]
    assert taken(2, 0, [2]) is buffers[0]  # each is another's now
    assert taken(3, 2, []) not in buffers
    saver.trim(1)
    assert [path.name for path in (memory.storage.root / "slots").iterdir()] == [buffers[1].path.name]


def test_snapshot_is_finalized_after_its_prerequisite(storage):
    saver, after = Saver(0, CPU, None, storage), Future()
    first = saver.take(0, 7, share(state_of(6, 2)), OPERATORS, after=after)
    first.capture.wait()
    with pytest.raises(TimeoutError):
        first.finalized.result(timeout=0.05)
    after.set_result(None)
    assert first.finalized.result().name == "rank_00000.safetensors"
    failed = Future()
    failed.set_exception(RuntimeError("failed-before"))
    with pytest.raises(RuntimeError, match="failed-before"):
        saver.take(0, 8, share(state_of(6, 2)), OPERATORS, after=failed).finalized.result()


def test_buffer_is_shared_by_more_shards_than_cached(storage):
    saver, fragments = Saver(0, CPU, None, storage), [state_of(2) for _ in range(18)]
    turns = [share(some) for some in fragments]
    saver.reserve(0, turns[0].layout.nbytes)
    for iteration, (some, its) in enumerate([*zip(fragments, turns, strict=True)] * 2):
        snapshot = saver.take(0, iteration, its, OPERATORS)
        snapshot.finalized.result()
        data = [bytes(snapshot.buffer.memory[start:stop]) for start, stop in its.layout.spans]
        assert data == [tensor_bytes(view) for view in its.sources] and len(data) == len(some)


def test_snapshot_can_be_written_to_storage_only(storage, memory):
    fragments = state_of(6, 2)
    saver = Saver(0, CPU, memory, storage)
    snapshot = saver.take(0, 7, share(fragments), OPERATORS, in_memory=False)
    saver.persist(snapshot)
    snapshot.persisted.result()
    path = storage.storage.root / "iter_0000007" / "rank_00000.safetensors"
    assert_holds(path, snapshot.finalized.result(), fragments, values(fragments))
    assert memory.storage.list_names() == ["slots"]


def test_buffers_do_not_share_memory(storage):
    saver, fragments = Saver(0, CPU, None, storage), state_of(6, 2)
    taken, expected = [], []
    for slot in range(3):
        fragments[1].view.fill_(slot)
        expected.append(values(fragments))
        taken.append(saver.take(slot, slot + 1, share(fragments), OPERATORS))
        taken[-1].capture.wait()
    for snapshot in taken:
        saver.persist(snapshot)
    for snapshot, held in zip(taken, expected, strict=True):
        snapshot.persisted.result()
        path = storage.storage.root / f"iter_000000{snapshot.iteration}" / "rank_00000.safetensors"
        assert_holds(path, snapshot.finalized.result(), fragments, held)


def test_rank_without_state_has_file(storage):
    saver = Saver(5, CPU, None, storage)
    snapshot = saver.take(0, 1, share([]), {})
    saver.persist(snapshot)
    snapshot.persisted.result()
    path = storage.storage.root / "iter_0000001" / "rank_00005.safetensors"
    assert_holds(path, snapshot.finalized.result(), [], [])


def one_sentence(error):
    text = str(error)
    assert "\n" not in text and "Traceback" not in text
    return text


def test_storage_failure_is_reported_with_remedy(tmp_path):
    (tmp_path / "storage").write_text("a file where a directory should be")
    saver = Saver(0, CPU, None, Store(LocalStorage(tmp_path / "storage")))
    snapshot = saver.take(0, 40, share(state_of(6, 2)), OPERATORS)
    saver.persist(snapshot)
    with raises("storage-unwritable", "iteration 40", f"{tmp_path}/storage") as caught:
        snapshot.persisted.result()
    assert one_sentence(caught.value)


class Fails(LocalStorage):
    """A directory that the first writes to a file of tensors cannot write to."""

    def __init__(self, root, number):
        super().__init__(root)
        self.left = number

    def write(self, path, parts, is_durable=True):
        if path.endswith(".safetensors") and self.left:
            self.left -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().write(path, parts, is_durable)


@each_row("failures", [0, 1, 2])
def test_failed_write_is_retried_while_buffer_is_kept(failures, tmp_path):
    saver, fragments = Saver(0, CPU, None, Store(Fails(tmp_path / "storage", failures))), state_of(6, 2)
    snapshot = saver.take(0, 40, share(fragments), OPERATORS)
    saver.persist(snapshot, pauses_s=(0.0, 0.0))
    snapshot.persisted.result()
    path = tmp_path / "storage" / "iter_0000040" / "rank_00000.safetensors"
    assert_holds(path, snapshot.finalized.result(), fragments, values(fragments))
    assert snapshot.retries == failures


def test_failing_write_is_repeated_once_per_pause(tmp_path):
    place = Fails(tmp_path / "storage", 9)
    saver = Saver(0, CPU, None, Store(place))
    snapshot = saver.take(0, 40, share(state_of(6, 2)), OPERATORS)
    saver.persist(snapshot, pauses_s=(0.0, 0.0))
    with raises("storage-unwritable", "iteration 40"):
        snapshot.persisted.result()
    assert place.left == 6


def test_retry_pause_ends_when_write_is_cancelled(tmp_path):
    saver = Saver(0, CPU, None, Store(Fails(tmp_path / "storage", 1)))
    snapshot = saver.take(0, 40, share(state_of(6, 2)), OPERATORS)
    saver.persist(snapshot, pauses_s=(600.0,))
    snapshot.finalized.result()
    saver.close()
    if not snapshot.persisted.cancelled():  # it had not begun
        with pytest.raises(GivenUpError):
            snapshot.persisted.result()


class Full(LocalStorage):
    """A directory on a disk that is nearly full."""

    def free_bytes(self):
        return 100


def test_full_storage_is_named_before_writing(tmp_path):
    saver = Saver(2, CPU, None, Store(Full(tmp_path / "storage")))
    snapshot = saver.take(0, 40, share(state_of(6, 2)), OPERATORS)
    saver.persist(snapshot)
    with raises("disk-full", "100 bytes", "rank 2", "--ckpt-keep", "--ckpt-dir") as caught:
        snapshot.persisted.result()
    assert one_sentence(caught.value)
    assert not (tmp_path / "storage").exists()


def test_finalizing_error_fails_write(tmp_path, storage):
    memory = Store(LocalStorage(tmp_path / "memory"))
    saver = Saver(0, CPU, memory, storage)
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "iter_0000009").write_text("in the way")
    snapshot = saver.take(0, 9, share(state_of(6, 2)), OPERATORS)
    saver.persist(snapshot)
    for future in (snapshot.finalized, snapshot.persisted):
        with raises("storage-unwritable", "iteration 9", f"{tmp_path}/memory"):
            future.result()
    assert not storage.storage.list_names()


def test_close_finalizes_copies_and_drops_pending_writes(storage, memory, monkeypatch):
    seals = threading.Event()
    monkeypatch.setattr("moc.snapshot.saver.reach", lambda point: seals.wait() if point == "snapshot_copying" else None)
    fragments = state_of(6, 2)
    saver = Saver(1, CPU, memory, storage)
    taken = [saver.take(slot, iteration, share(fragments), OPERATORS) for slot, iteration in enumerate((5, 6, 7))]
    for snapshot in taken:
        snapshot.capture.wait()
        saver.persist(snapshot)
    while not taken[0].persisted.running():  # or it would be given up, too
        time.sleep(0.001)
    closing = threading.Thread(target=saver.close, args=(60,))
    closing.start()
    while not taken[2].persisted.cancelled():
        time.sleep(0.001)
    seals.set()
    closing.join()
    assert [memory.is_publishable(iteration, [1]) for iteration in (5, 6, 7)] == [True] * 3
    assert storage.is_publishable(5, [1]) and taken[1].persisted.cancelled() and not storage.is_publishable(7, [1])


def test_hanging_write_is_cancelled_and_never_reported(storage, memory, monkeypatch):
    """It keeps its memory; what the next generation writes of the same iteration comes after it, and is not mixed."""
    written, goes_on = threading.Event(), threading.Event()

    def hangs(point: str) -> None:
        if point == "persisting" and not goes_on.is_set():
            written.set()
            goes_on.wait()

    monkeypatch.setattr("moc.snapshot.saver.reach", hangs)
    first, second = state_of(6, 2), state_of(6, 2)
    lost = Saver(1, CPU, memory, storage)
    given_up = lost.take(0, 5, share(first), OPERATORS)
    lost.persist(given_up)
    written.wait()
    lost.close()  # returns although the write has not
    assert not given_up.persisted.done()
    saver = Saver(1, CPU, memory, storage)
    snapshot = saver.take(0, 5, share(second), OPERATORS)
    snapshot.finalized.result()
    saver.persist(snapshot)
    assert not storage.is_publishable(5, [1])
    goes_on.set()
    snapshot.persisted.result()
    assert isinstance(given_up.persisted.exception(), GivenUpError)
    (part,) = storage.read_reports(5, [1])
    path = storage.storage.root / "iter_0000005" / part.name
    assert_holds(path, part, second, values(second))
    assert {name.name for name in path.parent.iterdir()} == {path.name, ".rank_00001.json"}
    saver.close()


def test_cancelled_write_leaves_no_files(storage, monkeypatch):
    """Between two pieces of a file it notices; nothing of it is left."""
    begun, goes_on = threading.Event(), threading.Event()
    fragments, write = state_of(6, 2), storage.write_file

    def waits(*args) -> None:
        begun.set()
        goes_on.wait()
        write(*args)

    saver = Saver(1, CPU, None, storage)
    monkeypatch.setattr(storage, "write_file", waits)
    snapshot = saver.take(0, 5, share(fragments), OPERATORS)
    saver.persist(snapshot)
    begun.wait()
    saver.close()
    goes_on.set()
    assert isinstance(snapshot.persisted.exception(), GivenUpError)
    assert list((storage.storage.root / "iter_0000005").iterdir()) == []


def test_header_reveals_reused_snapshot_buffer(memory):
    """Before the first byte of its data is overwritten."""
    gate, state = Gate(), state_of(6, 8)
    saver = Saver(0, CPU, memory, None, gate)
    try:
        part = saver.take(0, 3, share(state), OPERATORS).finalized.result()
        assert memory.find_header_damage(3, part.name, part.file) is None
        gate.close()
        saver.take(0, 4, share(state), OPERATORS)
        assert memory.find_header_damage(3, part.name, part.file)
    finally:
        saver.close()


def recorded_copies(monkeypatch):
    """Returns the list that receives the addresses of the sources of each call that copies to host memory."""
    copy, copied = device_copy._copy_all, []

    def copy_all(copies, **how):
        copied.append({one.source.data_ptr() for one in copies})
        copy(copies, **how)

    monkeypatch.setattr(device_copy, "_copy_all", copy_all)
    return copied


def test_gradients_can_be_cleared_at_once_and_are_copied_last(memory, monkeypatch):
    """Also those of the next snapshot, which waits until the second buffer is free; the gate holds up all copies."""
    gate, state, copied = Gate(), state_of(6, 8), recorded_copies(monkeypatch)
    gradient = torch.randn(8)
    fragments = [*state, fragment("output_layer.0", "grad", gradient, 4)]
    saver = Saver(0, CPU, memory, None, gate)
    try:
        for slot, iteration in enumerate((3, 4)):
            gradient.copy_(torch.randn(8))
            expected = values(fragments)
            gate.close()
            snapshot = saver.take(slot, iteration, share(fragments), OPERATORS)
            assert snapshot.gradients is None and not snapshot.finalized.done()
            gradient.zero_()
            snapshot.state.wait()  # opens the gate
            part = snapshot.finalized.result()
            assert_holds(memory.storage.root / f"iter_{iteration:07d}" / part.name, part, fragments, expected)
            assert snapshot.delay() > 0 and gradient.data_ptr() not in set.union(*copied)
        assert state[1].view.data_ptr() in copied[0] | copied[1] and len(copied[-1]) == 1
        snapshot = saver.take(0, 5, share(fragments), OPERATORS)
        gradient.fill_(7)
        saver.take(1, 6, share(fragments), OPERATORS)
        part = snapshot.finalized.result()
        assert_holds(
            memory.storage.root / "iter_0000005" / part.name, part, fragments, values(state) + [torch.zeros(8)]
        )
    finally:
        saver.close()


def test_device_second_buffer_delay_is_stream_time(monkeypatch):
    """5 ms on the stream, and what the host took to enqueue the copy; also if it is read twice."""
    mark = SimpleNamespace(query=lambda: True, elapsed_time=lambda end: 5.0)
    monkeypatch.setattr(staging, "marker_of", lambda device: lambda: mark)
    source, target = torch.ones(4), torch.zeros(4)
    copies, delay = staging.GradientStaging(CPU).stage([device_copy.Copy(source, target)])
    assert copies[0].source.data_ptr() != source.data_ptr() and torch.equal(copies[0].source, source)
    assert 0.005 < delay() == delay()


def test_gradients_without_second_buffer_are_copied_first(memory, monkeypatch):
    """The device lacks memory, once; they may be cleared after a wait."""
    attempts = []

    def allocate(nbytes, device):
        attempts.append(nbytes)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(staging, "_allocate", allocate)
    state, gradient, copied = state_of(6, 8), torch.randn(8), recorded_copies(monkeypatch)
    fragments = [*state, fragment("output_layer.0", "grad", gradient, 4)]
    saver = Saver(0, CPU, memory, None)
    try:
        for slot, iteration in enumerate((3, 4)):
            expected = values(fragments)
            snapshot = saver.take(slot, iteration, share(fragments), OPERATORS)
            snapshot.gradients.wait()
            gradient.zero_()
            part = snapshot.finalized.result()
            assert_holds(memory.storage.root / f"iter_{iteration:07d}" / part.name, part, fragments, expected)
        assert copied[0] == {gradient.data_ptr()} and len(attempts) == 1
        assert saver.take(2, 5, share(state), OPERATORS).gradients is None
    finally:
        saver.close()
