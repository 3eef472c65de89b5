"""Descriptions of boxes in file headers; the texts are cached, because successive snapshots have the same boxes."""

from __future__ import annotations

import json
from functools import cached_property
from typing import NamedTuple

from moc.state.region import Region


class Texts(NamedTuple):
    """Parts of a header's JSON.

    Attributes:
        named: the row of the index up to the hash, escaped, since the index is a string in the header.
        kind: dtype and shape, as safetensors has them.
    """

    named: str
    kind: str


class Described:
    """Base class of boxes, which makes their header texts from the attributes below."""

    name: str
    slot: str
    global_shape: tuple[int, ...]
    region: Region
    stored_as: str

    @property
    def texts(self) -> Texts:
        """The box's parts of a header."""
        return self._texts

    @cached_property
    def _texts(self) -> Texts:
        row = json.dumps([self.name, self.slot, self.global_shape, self.region.offset])
        kind = json.dumps({"dtype": self.stored_as, "shape": self.region.shape})
        return Texts(json.dumps(row[:-1])[1:-1], kind[1:-1])
