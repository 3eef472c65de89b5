"""What the training loop does beside training."""

import ctypes
from types import SimpleNamespace

import psutil
import pytest

from megatron.pretraining.process import cpu
from tests.cases import each_row

BLOCK, BLOCKS = 32 << 10, 2000  # small enough to lie in the heap


def test_free_heap_memory_is_returned_to_system():
    cpu.install()
    from megatron.pretraining.setup import release_free_memory

    c = ctypes.CDLL(None)
    if not hasattr(c, "malloc_trim"):
        pytest.skip("this C library has no malloc_trim")
    c.malloc.restype, c.malloc.argtypes, c.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    blocks = [c.malloc(BLOCK) for _ in range(BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK)
    pins, holes = blocks[::50], [block for i, block in enumerate(blocks) if i % 50]
    for hole in holes:
        c.free(hole)
    before = psutil.Process().memory_info().rss
    release_free_memory()
    after = psutil.Process().memory_info().rss
    for pin in pins:
        c.free(pin)
    assert before - after > len(holes) * BLOCK / 2


@each_row(("saved", "misses"), [(3, True), (6, False)])
def test_newest_save_is_known_if_storage_does_not_answer(saved, misses, monkeypatch):
    cpu.install()
    from megatron.pretraining import setup

    monkeypatch.setattr(setup, "gather", lambda value: [value])
    monkeypatch.setattr(setup, "run_on_rank0", lambda action, problem: action())
    intervals = dict(
        validation=SimpleNamespace(eval_interval=None),
        checkpoint=SimpleNamespace(save_interval=3),
        training=SimpleNamespace(exit_interval=None),
    )
    parts = SimpleNamespace(
        config=SimpleNamespace(**intervals),
        log=SimpleNamespace(has=lambda iteration: True, was_evaluated=lambda iteration: False),
        world=SimpleNamespace(job=SimpleNamespace(id="job")),
        initial_iteration=0,
        saved=saved,
    )
    session = SimpleNamespace(position=SimpleNamespace(iteration=6), record=SimpleNamespace(stop=False))
    silent = SimpleNamespace(newest_saved=lambda seconds: None)
    assert setup._missed_duties(parts, session, silent, "job").saves == misses and parts.saved == saved
