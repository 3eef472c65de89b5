"""Changes of one file in a directory of snapshots, whose hashes are right afterwards."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

from moc.store.manifest import MANIFEST_FILE as MANIFEST
from moc.store.manifest import FileEntry, compute_digest
from moc.store.ownership import NAME as FENCE
from moc.store.storage import LEASE_FILE as LEASE
from moc.store.storage import LocalStorage
from moc.store.store import RUN_FILE as RUN
from moc.store.store import Store, checkpoint_name
from tests.hostile_files import changed_index, file_of, header_of
from tests.mutations import changed, encoded, signed

OF_SNAPSHOT = ("manifest", "header")
"""Files of a snapshot, which may be lost with them."""

OF_DIRECTORY = {"fence": FENCE, "run": RUN, "lease": LEASE}
"""Files of a directory, with which no snapshot is lost."""


def mutate(rng: random.Random, root: Path, what: str) -> str:
    """Changes a file of a directory, of its newest snapshot if it is :data:`OF_SNAPSHOT`; returns the new content."""
    store = Store(LocalStorage(root))
    newest = max(store.iterations())
    if what == "header":
        return _mutate_header(rng, store, root, newest)
    path = root / OF_DIRECTORY.get(what, f"{checkpoint_name(newest)}/{MANIFEST}")
    value = changed(rng, json.loads(path.read_text()))
    text = signed(value) if isinstance(value, dict) else encoded(value)
    path.write_text(text)
    return text


def _mutate_header(rng: random.Random, store: Store, root: Path, newest: int) -> str:
    manifest = store.read_manifest(newest)
    name = rng.choice(sorted(manifest.files))
    path = root / checkpoint_name(newest) / name
    whole = path.read_bytes()
    data, text = whole[manifest.files[name].header_bytes :], encoded(changed_index(rng, header_of(whole)))
    made = file_of(text.encode(), 0)
    path.write_bytes(made + data)
    entry = FileEntry(len(made) + len(data), len(made), compute_digest(made))
    described = dataclasses.replace(manifest, files={**manifest.files, name: entry})
    (root / checkpoint_name(newest) / MANIFEST).write_text(described.to_json())
    return text
