"""Functions of a test's workers: they inspect loaded state, are slow, or die."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import Future, wait

from megatron.pretraining import loop
from megatron.pretraining.engine.schedule import Schedule
from megatron.pretraining.engine.state import MegatronState
from moc.session.session import Session
from moc.snapshot import device_copy
from moc.state.operators import Detail
from moc.store.shard_file import compute_digest, tensor_bytes
from tests.integration import bodies
from tests.integration.bodies import with_run
from tests.integration.folding_pretrain_gpt_moe import wait_for_folders


def loaded(flags: dict) -> dict:
    """Sets up what the flags say; ``start``, and of what this worker holds first the hash of each fragment, by name."""

    def use(run) -> dict:
        state = MegatronState(run.stepper.chunks, run.stepper.optimizer.core, run.stepper.modules)
        held = (f for f in state.fragments(state.operators(), Detail.FULL) if f.first_copy)
        hashes = {
            f"{f.name} {f.slot} {f.region.offset} {f.region.shape}": compute_digest(tensor_bytes(f.view)) for f in held
        }
        return {"start": run.position.iteration, "hashes": hashes}

    return with_run(flags, use)


def train_with_slow_copies(flags: dict, bytes_per_s: float, forward_s: float = 0.0, waits_from: int = 1 << 30) -> dict:
    """As ``bodies.train``, where snapshots get no more than this bandwidth, and each forward takes longer.

    From an iteration on, workers wait for their parts in storage, however slow it is.
    """
    slow_down_copies(bytes_per_s)
    iterate = loop.iterate

    def patient(run, stop):
        record = iterate(run, stop)
        if record.iteration >= waits_from:
            wait(under_way(run.session), timeout=60)
        return record

    loop.iterate = patient
    forward_backward = Schedule.forward_backward
    Schedule.forward_backward = lambda *args: (time.sleep(forward_s), forward_backward(*args))[1]
    return bodies.train(flags)


def die_after_slow_copies(flags: dict, iteration: int, bytes_per_s: float) -> None:
    """As :func:`die_after`, where snapshots get no more than this bandwidth."""
    slow_down_copies(bytes_per_s)
    die_after(flags, iteration)


def slow_down_copies(bytes_per_s: float) -> None:
    """Gives the copies of this process's snapshots no more than this bandwidth."""
    copy = device_copy._copy_all

    def slow(copies, **how) -> None:
        time.sleep(sum(one.source.nbytes for one in copies) / bytes_per_s)
        copy(copies, **how)

    device_copy._copy_all = slow


def die_after(flags: dict, iteration: int) -> None:
    """As ``bodies.train``; all workers are killed right after an iteration and its snapshot.

    The last ones wait for what this worker copies and writes beside them, so that the next vote tells of it, however
    busy the machine is.
    """
    iterate = loop.iterate

    def mortal(run, stop):
        record = iterate(run, stop)
        if record.iteration > iteration - 8:
            wait(under_way(run.session), timeout=60)
        if record.iteration == iteration:
            os.kill(os.getpid(), signal.SIGKILL)
        return record

    loop.iterate = mortal
    bodies.train(flags)


def under_way(session: Session) -> list[Future]:
    """Returns this worker's background work for snapshots that are not durable yet."""
    assert session._running is not None
    stages = session._running[1]._stages
    moving = (stages.copying, stages.replicating, stages.writing, stages.committing)
    return [stage.work(snapshot) for stage in moving for snapshot in stage.queue]


def die_after_folding(flags: dict, iteration: int) -> None:
    """As :func:`die_after`, where snapshots wait for the folder, so that it folds whatever it may."""
    wait_for_folders()
    die_after(flags, iteration)
