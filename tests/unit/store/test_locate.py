"""An address means a directory of this machine, or a place in object storage."""

import subprocess
import sys
from pathlib import Path

import pytest

from moc.store.errors import CheckpointError
from moc.store.locate import place_of
from moc.store.objects import ObjectPlace
from moc.store.storage import LocalPlace

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "address, root",
    [
        ("checkpoints/run", "checkpoints/run"),
        (Path("/data/run"), "/data/run"),
        ("file:///data/my%20run", "/data/my run"),
        ("file://localhost/data/run", "/data/run"),
        ("odd:name", "odd:name"),
    ],
)
def test_directories(address, root):
    place = place_of(address)
    assert isinstance(place, LocalPlace)
    assert place.root == Path(root)


def test_object_storage():
    place = place_of("memory://run/one/")
    assert isinstance(place, ObjectPlace)
    assert (place.name, place.path("a/b")) == ("memory://run/one", "memory://run/one/a/b")


@pytest.mark.parametrize(
    "address, remedy",
    [
        ("ftp://host/run", "give a directory, or s3://bucket/prefix, gs://bucket/prefix"),
        ("s3://", "give a directory, or s3://bucket/prefix, gs://bucket/prefix"),
        ("file://host/run", "write file:///path"),
        (Path("s3://bucket/run"), "a URL has two slashes"),
    ],
)
def test_what_means_no_place_is_refused(address, remedy):
    with pytest.raises(CheckpointError, match=remedy) as refused:
        place_of(address)
    assert str(address) in str(refused.value)


@pytest.mark.parametrize("address, library", [("s3://b/r", "s3fs"), ("gs://b/r", "gcsfs")])
def test_a_missing_library_is_named(address, library):
    without = (
        f"import sys; sys.modules[{library!r}] = None; from moc.store.locate import place_of; place_of({address!r})"
    )
    result = subprocess.run([sys.executable, "-c", without], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert f"CheckpointError: {address} needs a library that cannot be imported" in result.stderr
    assert result.stderr.endswith(f"pip install {library}\n")
