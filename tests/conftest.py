"""For all tests."""

import os
import shutil
import tempfile

from hypothesis import settings

from tests import shared

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
