"""For all tests."""

import functools
import gc
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from tests import shared

gc.disable()  # until all tests are collected

# otherwise each worker of pytest, and each process that a test starts, compiles all modules anew
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# the processor of the machine decides the order of sums otherwise, and so the last bits: a router's tie may break
os.environ |= {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}

if not os.environ.get("CI"):  # there, hypothesis' own profile does it, and takes the same examples each time
    settings.register_profile("patient", deadline=None)  # a busy machine is no defect
    settings.load_profile("patient")


def pytest_configure(config):
    """Makes the directory that parallel workers share; they inherit its name."""
    if not hasattr(config, "workerinput"):
        os.environ[shared.VARIABLE] = tempfile.mkdtemp(prefix="tests-shared-")


def pytest_unconfigure(config):
    """Removes it."""
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(shared.VARIABLE))


def pytest_collection_finish():
    """What was imported and collected stays: garbage collection in tests need not walk through all of it each time."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Deselects the tests of ``left_out.txt``. Slow tests begin first, so that short ones keep all workers busy."""
    if not shared.ALL and not any("::" in argument for argument in config.args):
        left_out = {f"tests/{name}" for name in shared.left_out()}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With ``--dist loadfile``: a file of worlds or jobs goes to several workers, unless its tests share a fixture."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return nodeid if apart(file) else file

    @functools.cache
    def apart(file: str) -> bool:
        text = Path(config.rootpath, file).read_text()
        return file.startswith("tests/integration/") and not re.search(r'scope="module"\)\s+def (?!data\()', text)

    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # the order is that of pytest_collection_modifyitems
    return Scheduling(config, log)
