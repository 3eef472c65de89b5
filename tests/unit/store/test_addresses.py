"""An address means a directory of this machine, or a place in object storage."""

import subprocess
import sys
from pathlib import Path

import pytest

from moc.store.object_storage import ObjectStorage
from moc.store.storage import LocalStorage
from moc.store.store import storage_at
from tests.cases import each_row
from tests.errors import only_code, raises

ROOT = Path(__file__).parents[3]


@each_row(
    "address, root",
    [
        ("checkpoints/run", "checkpoints/run"),
        (Path("/data/run"), "/data/run"),
        ("file:///data/my%20run", "/data/my run"),
        ("file://localhost/data/run", "/data/run"),
        ("odd:name", "odd:name"),
    ],
)
def test_path_means_local_directory(address, root):
    place = storage_at(address)
    assert isinstance(place, LocalStorage)
    assert place.root == Path(root)


def test_url_means_object_storage():
    place = storage_at("memory://run/one/")
    assert isinstance(place, ObjectStorage)
    assert (place.name, place.display_path("a/b")) == ("memory://run/one", "memory://run/one/a/b")


@each_row(
    "address, remedy",
    [
        ("ftp://host/run", "s3://bucket/prefix, gs://bucket/prefix"),
        ("s3://", "s3://bucket/prefix, gs://bucket/prefix"),
        ("file://host/run", "file:///path"),
        (Path("s3://bucket/run"), "s3://bucket/prefix"),
    ],
)
def test_invalid_address_is_refused(address, remedy):
    with raises("address-invalid", str(address), remedy):
        storage_at(address)


@pytest.mark.parametrize("address, library", [("s3://b/r", "s3fs"), ("gs://b/r", "gcsfs")])
def test_missing_library_is_named(address, library):
    without = (
        f"import sys; sys.modules[{library!r}] = None; from moc.store.store import storage_at\n"
        f"from moc.cli_output import refused\ntry:\n    storage_at({address!r})\nexcept Exception as error:\n"
        "    refused('it', error)"
    )
    result = subprocess.run([sys.executable, "-c", without], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert only_code(result.stderr) == "library-missing"
    assert address in result.stderr and f"pip install {library} [" in result.stderr
