"""For all tests."""

import os

from hypothesis import settings

if not os.environ.get("CI"):  # there, hypothesis' own profile does it, and takes the same examples each time
    settings.register_profile("patient", deadline=None)  # a busy machine is no defect
    settings.load_profile("patient")
