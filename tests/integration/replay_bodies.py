"""What workers of a test's world do while iterations are computed again."""

from __future__ import annotations

import re

from moc.recovery.plan import StagePlan
from moc.recovery.sources import MASTER, STORAGE, AvailableCheckpoint, RecoveryPath, ReplayPoint
from moc.session.resume import replay
from moc.session.resume.rebuilding import Rebuilder
from moc.session.resume.replay import Replayer, ReplayState
from moc.state.operators import Detail
from moc.state.record import Records
from tests.integration.bodies import with_run
from tests.integration.state_bodies import _copies, _steps, _told, label


class _CalledAway(Exception):
    pass


def complete_late(flags: dict, pattern: str) -> dict:
    """From one state, an iteration is computed again while some operators are frozen: ``at once``, and ``late``.

    Late is that this worker is called away when gradients are reduced, forgets what was frozen, and completes the
    iteration afterwards.

    Returns:
        For each way digests and steps, the schedule, and ``told``, how far it has come; also ``called away``, the same
        in between; and ``frozen``, the operators.
    """

    def use(run) -> dict:
        engine = run.session._engine
        state = engine.state
        _steps(run, 1)
        position, kept, steps = run.position, _copies(state), state.steps()
        schedule = run.stepper.scheduler.state_dict()
        (record,) = _steps(run, 1)
        frozen = [name for name in state.operators() if re.fullmatch(pattern, name)]
        answers = {"frozen": frozen}
        for way, go in (("at once", _at_once), ("late", _late)):
            for fragment in state.fragments(state.operators(), Detail.FULL):
                state.load(fragment, kept[label(fragment)])
            state.gather_weights()
            state.set_steps(steps)
            run.stepper.scheduler.num_steps = 0
            run.stepper.scheduler.load_state_dict(schedule)
            replayer = Replayer(engine)
            replayer.progress.move_to(ReplayState(position))
            answers |= go(run, state, replayer, record, frozen) or {}
            told = replayer.progress.interrupted
            answers[way] = _told(state) | {
                "schedule": run.stepper.scheduler.state_dict(),
                "told": [told.iteration, sorted(told.frozen), told.reduced],
            }
        return answers

    return with_run(flags, use)


def apply_again(flags: dict) -> dict:
    """From one state, an iteration is computed, and ``applied`` from its reduced gradients alone, which were kept.

    Returns:
        For each way digests and steps, schedule and loss scale; ``before``, the same of the state before; and
        ``alone``, digests if it is applied to the first expert of each layer alone.
    """

    def use(run) -> dict:
        engine = run.session._engine
        state = engine.state
        _steps(run, 1)
        position, before, steps, scalars = run.position, _copies(state), state.steps(), engine.scalars(run.position)
        answers = {"before": _told(state)}
        (record,) = _steps(run, 1)
        answers["computed"] = _told(state) | {"scalars": engine.scalars(run.position)}
        gradients = {label(f): f.view.clone() for f in state.fragments(state.operators(), Detail.GRAD)}
        after = _copies(state)

        def apply(operators=None) -> None:
            for chunk in run.stepper.chunks:
                for parameter in chunk.parameters():
                    parameter.main_grad.fill_(float("nan"))
            for fragment in state.fragments(state.operators(), Detail.FULL):
                state.load(fragment, before[label(fragment)])
            state.gather_weights()
            state.set_steps(steps)
            engine.load_scalars(scalars, "the state before")
            engine.apply(record, lambda fragment: gradients[label(fragment)], operators)

        apply([name for name in state.operators() if name.endswith("expert.0")])
        state.gather_weights()
        answers["alone"] = _told(state)
        apply()
        for fragment in state.fragments(state.operators(), Detail.MASTER):
            if fragment.slot == "param":  # biases of routers, which move without gradients, have stood still
                assert fragment.view.equal(before[label(fragment)])
                state.load(fragment, after[label(fragment)])
        state.gather_weights()
        answers["applied"] = _told(state) | {"scalars": engine.scalars(position.after(record))}
        return answers

    return with_run(flags, use)


def _at_once(run, state, replayer, record, frozen) -> None:
    state.freeze(frozen)
    replayer.compute(replayer.progress.state.position, record, frozen, ())
    state.activate(frozen)


def _late(run, state, replayer, record, frozen) -> dict:
    def called_away(engine) -> None:
        raise _CalledAway

    waits, replay.wait_for_stage = replay.wait_for_stage, called_away
    state.freeze(frozen)
    try:
        replayer.compute(replayer.progress.state.position, record, frozen, ())
    except _CalledAway:
        told = replayer.progress.interrupted
    finally:
        replay.wait_for_stage = waits
        state.activate(frozen)
    records = Records()
    records.add(record)
    parts = replayer.engine, None, replayer, records, None, None, run.log
    whole = AvailableCheckpoint(record.iteration, STORAGE, dict.fromkeys(frozen, "full"))
    way = RecoveryPath((ReplayPoint(record.iteration, {(name, MASTER): whole for name in frozen}),))
    behind = frozenset(range(run.world.size))
    Rebuilder(*parts)._complete(StagePlan(record.iteration, way, is_resumed=True, behind=behind))
    state.activate(frozen)
    state.gather_weights()
    return {"called away": [told.iteration, sorted(told.frozen), told.reduced]}
