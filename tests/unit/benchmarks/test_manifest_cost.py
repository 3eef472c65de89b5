"""The benchmark of manifests reads what a program writes, and divides by the parser's time."""

from benchmarks.manifest_cost import manifest_of, measured, ratios, ways
from moc.store.manifest import Manifest


def test_all_ways_read_the_same_manifest():
    manifest = manifest_of(64)
    actions = ways(manifest.to_json().encode())
    parsed = actions["json.loads"]()
    assert actions["keys compared"]() == parsed and actions["complete"]() == manifest
    assert actions["hash and keys compared"]().keys() == parsed.keys() - {"xxh3_128", "format"}
    assert isinstance(actions["complete"](), Manifest) and len(manifest.operators) == 64


def test_every_way_is_measured_equally_often():
    called = []
    found = measured({name: lambda name=name: called.append(name) for name in ("json.loads", "other")}, 3)
    assert {name: len(times) for name, times in found.items()} == {"json.loads": 3, "other": 3}
    assert called.count("other") == called.count("json.loads") == 4


def test_ratios_are_of_the_best_times():
    assert ratios({"json.loads": [2.0, 1.0], "complete": [3.0, 5.0]}) == {"json.loads": 1.0, "complete": 3.0}
