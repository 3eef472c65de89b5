"""What storage alone could bring back, and what of it is older than promised."""

from types import SimpleNamespace

from moc.policy import Every, policy_named
from moc.recovery.inventory import Persisted, Promise, newest_full, overdue
from moc.recovery.sources import MEMORY, STORAGE, AvailableCheckpoint
from tests.cases import each_row
from tests.model_shape import ModelShape, model_operators

OPERATORS = model_operators(ModelShape((1,), 8, 16, 8, 8, 4, 100, num_experts=2, expert_ffn_hidden_size=16))
NAMES = [one.name for one in OPERATORS]
EXPERT = "layers.0.expert.1"


def held(iteration, names, tier=STORAGE, detail="full"):
    return AvailableCheckpoint(iteration, tier, dict.fromkeys(names, detail))


def made(name="pec", **settings):
    return policy_named(name)(OPERATORS, Every(settings.pop("interval", 1)), **settings)


def test_only_experts_in_storage_may_be_older():
    later = [name for name in NAMES if name != EXPERT]
    found = Persisted.of([held(3, NAMES), held(5, later), held(9, NAMES, MEMORY)], made())
    assert found.iteration == 5
    assert found.learned == dict.fromkeys(NAMES, 5) | {EXPERT: 3}
    assert Persisted.of([held(5, later)], made()) == Persisted(0, {})


def test_window_counts_once_it_is_complete():
    policy = made("sparse", window=2)
    first, second = held(3, NAMES[:2]), held(4, NAMES[2:])
    first = AvailableCheckpoint(3, STORAGE, first.operators | dict.fromkeys(NAMES[2:], "compute"))
    assert Persisted.of([first], policy).iteration == 0
    found = Persisted.of([first, second], policy)
    assert found.iteration == 4 and set(found.learned.values()) == {4}


def test_newest_full_versions_are_found():
    assert newest_full([held(3, NAMES), held(5, [EXPERT]), held(7, [EXPERT], detail="grad")]) == dict.fromkeys(
        NAMES, 3
    ) | {EXPERT: 5}


@each_row(
    ("settings", "every", "outstanding", "promise"),
    [
        (dict(name="full"), 10, 1, Promise(25, 25)),
        (dict(name="full", interval=4), 10, 1, Promise(29, 29)),  # every 12th iteration has a snapshot that is due
        (dict(name="full"), 1, 4, Promise(10, 10)),
        (dict(name="pec"), 10, 1, Promise(25, 55)),  # two experts, each in every second snapshot; twice that
        (dict(name="pec", selection="load_aware"), 10, 1, Promise(25, None)),
        (dict(name="selective", experts=1), 10, 1, Promise(25, 135)),
        (dict(name="selective", experts=1, rule="proportional"), 10, 1, Promise(25, None)),
    ],
)
def test_storage_promise_follows_from_policy(settings, every, outstanding, promise):
    assert Promise.of(made(**settings), every, outstanding, commits=3) == promise


def test_state_older_than_promised_is_overdue():
    persisted, promise = Persisted(10, dict.fromkeys(NAMES, 10) | {EXPERT: 4}), Promise(5, 12)
    assert overdue(persisted, promise, OPERATORS, 15, since=1) == []
    assert EXPERT not in overdue(persisted, promise, OPERATORS, 16, since=1)
    assert EXPERT in overdue(persisted, promise, OPERATORS, 17, since=1)
    assert overdue(persisted, promise, OPERATORS, 17, since=15) == []
    assert EXPERT not in overdue(persisted, Promise(5, None), OPERATORS, 99, since=1)
    assert overdue(Persisted(), promise, [SimpleNamespace(name="new", expert_id=None)], 8, since=2) == ["new"]
