"""What has been written is on disk when the call returns: contents before the name, and then the name."""

import os
import re
from pathlib import Path

import pytest

from moc.files import tree
from moc.files.tree import Tree, temporary_name
from moc.store.durable import write_durably
from moc.store.storage import LocalPlace


@pytest.fixture
def synced(tmp_path, monkeypatch):
    """By name below ``tmp_path``, in the order of syncs: the bytes of a file, or the names in a directory, by then."""
    seen, fsync = [], os.fsync

    def watched(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        held = sorted(os.listdir(path)) if path.is_dir() else path.read_bytes()
        seen.append((str(path.relative_to(tmp_path)), held))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    return seen


def test_contents_are_durable_before_the_name(tmp_path, synced):
    write_durably(tmp_path / "file", "hello")
    Tree(tmp_path).write("parts", [b"he", memoryview(b"llo")], name_too=False, tag="job-1-2")
    (temporary, hello), (there, names), (tagged, again) = synced
    assert (hello, there, names, again) == (b"hello", ".", ["file"], b"hello")
    assert temporary.startswith(".file.") and tagged.startswith(".parts.job-1-2.")
    assert (tmp_path / "file").read_bytes() == (tmp_path / "parts").read_bytes() == b"hello"


def test_a_temporary_file_is_hidden_and_its_name_cannot_be_foreseen():
    for tag, begin in (("", r"\.file\."), ("job-1-2", r"\.file\.job-1-2\.")):
        names = {temporary_name("file", tag) for _ in range(100)}
        assert len(names) == 100 and all(re.fullmatch(rf"{begin}[0-9a-f]{{16}}\.tmp", name) for name in names)


def test_nothing_is_written_through_a_planted_link(tmp_path, monkeypatch):
    (tmp_path / "precious").write_text("precious")
    monkeypatch.setattr(tree, "temporary_name", lambda name, tag: "foreseen")
    for link in (os.symlink, os.link):
        link(tmp_path / "precious", tmp_path / "foreseen")
        with pytest.raises(FileExistsError):
            write_durably(tmp_path / "file", "text")
        (tmp_path / "foreseen").unlink(missing_ok=True)
    os.symlink(tmp_path / "precious", tmp_path / "file")  # under the final name: the link is replaced
    monkeypatch.undo()
    write_durably(tmp_path / "file", "text")
    assert (tmp_path / "precious").read_text() == "precious" and not (tmp_path / "file").is_symlink()


def test_what_the_check_refuses_gets_no_name(tmp_path):
    (tmp_path / "file").write_text("before")

    def superseded():
        (temporary,) = tmp_path.glob(".file.job.*.tmp")
        assert temporary.read_text() == "after"  # all is written by then
        raise RuntimeError("superseded")

    with pytest.raises(RuntimeError, match="superseded"):
        Tree(tmp_path).write("file", [b"after"], tag="job", check=superseded)
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "before"


def test_a_place_makes_new_directories_durable_too(tmp_path, synced):
    place = LocalPlace(tmp_path / "place", in_memory=True)
    place.write("iter/part", [b"x"], final=False)
    place.write("iter/manifest", [b"y"])
    place.write("run", [b"z"])
    assert [where for where, _ in synced if ".tmp" not in where] == [".", "place/iter", "place", "place"]
    assert synced[3] == ("place/iter", ["manifest", "part"])
    del synced[:]
    assert place.create("one", [b"1"]) and not place.create("one", [b"2"]) and place.read("one") == b"1"
    assert ("place", ["iter", "one", "run"]) in synced
    del synced[:]
    place.remove("iter")
    assert synced == [("place", ["one", "run"])]
    place.remove("iter")
    assert len(synced) == 1  # it was not there
