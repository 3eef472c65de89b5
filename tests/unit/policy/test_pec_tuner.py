"""K and interval that are found while training: what is measured is what is chosen from."""

import json
from statistics import mode

from hypothesis import given, settings
from hypothesis import strategies as st

from moc.policy import Every, IntervalTuner, ObservedIteration, Transfer
from moc.policy.interval import PROFILE_BLOCKS, WARM_UP
from moc.policy.pec import Pec
from moc.policy.pec_tuner import PecLimits, PecMeasurements, choose_pec_settings
from moc.state.operators import Detail
from moc.state.shape import ModelShape, model_operators
from tests.errors import raises

EXPERTS, DAY = 8, 86400.0
OPERATORS = model_operators(ModelShape((0, 1), 8, 16, 8, 8, 4, 100, num_experts=EXPERTS, expert_ffn_hidden_size=16))


def busiest(operators) -> int:
    """A rank that saves 100 bytes, and 100 for each expert."""
    return 100 + 100 * sum(".expert." in name for name, detail in operators.items() if detail is Detail.FULL)


def machine(compute_s=3.0, iteration_s=4.0, copy=100.0, write=10.0) -> PecMeasurements:
    sizes = {k: 100 + 100 * k for k in range(1, EXPERTS + 1)}
    return PecMeasurements(sizes, compute_s, iteration_s, copy, write, 0.0, iteration_s / DAY)


def made(interval=None, **settings) -> Pec:
    policy = Pec(OPERATORS, interval or IntervalTuner(), auto=True, mtbf_s=DAY, **settings)
    policy.on_sizes(busiest)
    return policy


class Trainer:
    """Trains on a machine: snapshots take the time that it needs for them.

    Attributes:
        sizes: experts of each snapshot, by iteration.
    """

    def __init__(self, policy: Pec, at: PecMeasurements):
        self.policy, self.at, self.sizes = policy, at, {}
        self.iteration, self._seen, self._left_s = 0, ObservedIteration(at.iteration_s), 0.0

    def run(self, iterations: int) -> "Trainer":
        for _ in range(iterations):
            self._step()
        return self

    def _step(self) -> None:
        self.iteration += 1
        self.policy.interval.observe(self._seen)
        plan, at = self.policy.storage.plan(self.iteration), self.at
        stall_s, copied, written = 0.0, Transfer(), Transfer()
        if plan is not None:
            assert self._left_s <= 0, "a snapshot starts while one is on its way to storage"
            self.policy.on_snapshot(plan)
            part = self.policy.storage.part_of(plan)
            self.policy.storage.on_write_begun(part)
            self.policy.storage.on_write_ended(part, committed=True)
            k = self.sizes[self.iteration] = sum(".expert." in name for name in plan.operators)
            stall_s, copied = at.save_s(k), Transfer(at.busiest_rank_bytes[k], at.snapshot_s(k))
            to_storage = sum(".expert." in name for name in part.operators)
            self._left_s, written = (
                at.persist_s(to_storage),
                Transfer(at.busiest_rank_bytes[to_storage], at.persist_s(to_storage)),
            )
        seconds = at.iteration_s + stall_s
        self._left_s -= seconds
        self._seen = ObservedIteration(
            seconds, stall_s, plan is not None, self._left_s > 0, at.forward_backward_s, copied, written
        )


machines = st.builds(
    machine, st.floats(0.1, 9), st.floats(9, 20), st.floats(5, 1000), st.floats(5, 1000)
)  # forward and backward are the most of an iteration


@settings(deadline=None, max_examples=30)
@given(machines, st.booleans())
def test_the_choice_is_that_for_the_machine(at, one_level):
    trainer = Trainer(made(one_level=one_level, auto_plt_limit=1.0), at).run(300)
    choice = choose_pec_settings(at, PecLimits(1.0, one_level=one_level))
    iterations, sizes = list(trainer.sizes), list(trainer.sizes.values())
    assert sizes[0] == EXPERTS and iterations[0] > WARM_UP + PROFILE_BLOCKS
    assert set(sizes[1:]) <= {choice.k_snapshot} and trainer.policy.k_to_persist == choice.k_persist
    # now and then one waits for undisturbed iterations
    gaps = [b - a for a, b in zip(iterations[1:], iterations[2:], strict=False)]
    assert not gaps or mode(gaps) == choice.interval
    assert trainer.policy.report.gauges() == {
        "k_snapshot": choice.k_snapshot,
        "k_persist": choice.k_persist,
        "snapshot_interval": choice.interval,
    }
    assert trainer.policy.report.reason() == choice.reason


def test_what_hides_is_what_is_saved():
    """3 s of forward and backward hide 300 bytes at 100 a second: two experts."""
    trainer = Trainer(made(), machine()).run(400)
    assert trainer.policy.k_to_snapshot == 2 and "hides" in trainer.policy.report.reason()


def test_a_machine_that_changes_is_followed():
    trainer = Trainer(made(), machine()).run(400)
    trainer.at = machine(copy=200.0)
    assert trainer.run(400).policy.k_to_snapshot == 5
    trainer.at = machine(compute_s=9.0, iteration_s=12.0, copy=100.0)
    assert trainer.run(800).policy.k_to_snapshot == EXPERTS


def test_an_interval_that_is_given_stays():
    trainer = Trainer(made(Every(20)), machine(write=100.0)).run(400)
    starts = list(trainer.sizes)
    assert {b - a for a, b in zip(starts[1:], starts[2:], strict=False)} == {20}


def test_faults_are_heeded():
    policy = made(plt_limit=0.01)
    trainer = Trainer(policy, machine()).run(200)
    assert (policy.k_to_snapshot, policy.k_to_persist) == (2, 1)
    policy.recovery.on_recovery(0.006)
    assert policy.k_to_persist == 4 and policy.k_to_snapshot >= 4
    assert set(list(trainer.run(500).sizes.values())[-2:]) == {policy.k_to_snapshot}


def test_a_fault_that_loses_nothing_leaves_the_choice_free():
    policy = made(plt_limit=0.01)
    trainer = Trainer(policy, machine(write=1e6)).run(200)
    assert policy.k_to_persist > 1
    policy.recovery.on_recovery(0.0)
    trainer.at = machine()
    trainer.run(400)
    assert policy.k_to_persist == 1


def test_a_resumed_run_knows_what_was_measured():
    trainer = Trainer(made(), machine()).run(200)
    resumed = made()
    resumed.loading(json.loads(json.dumps(trainer.policy.state_dict())))()
    resumed.interval.load_state_dict(json.loads(json.dumps(trainer.policy.interval.state_dict())))
    before, after = trainer.policy.report, resumed.report
    assert (after.gauges(), after.reason()) == (before.gauges(), before.reason())
    with raises("saved-state-invalid"):
        resumed.interval.load_state_dict(trainer.policy.interval.state_dict() | {"copied": [1]})


def test_a_state_of_checkfreq_serves_as_far_as_it_goes():
    tuner = made().interval
    tuner.load_state_dict(IntervalTuner().state_dict())
    assert tuner.choice is None
