"""What the training loop does beside training."""

import ctypes

import psutil
import pytest

from megatron.pretraining.process import cpu

BLOCK, BLOCKS = 32 << 10, 2000  # small enough to lie in the heap


def test_what_is_free_in_the_heap_goes_back_to_the_system():
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
