"""Runs the training loop: iterate, evaluate, save, report, stop."""

from __future__ import annotations

import time

import torch

from megatron.pretraining.config import Config
from megatron.pretraining.config.deterministic import deterministic_if_exact
from megatron.pretraining.duties import Duties, duties_after
from megatron.pretraining.engine.step import NonFiniteError
from megatron.pretraining.parts import MembersChange, Program, TrainingRun
from megatron.pretraining.process.initialize import inject_faults, shut_down
from megatron.pretraining.process.paths import check_outputs
from megatron.pretraining.process.phases import Phases
from megatron.pretraining.process.stopping import EXIT_DONE, EXIT_REQUEUE, StopRequested, StopRequests
from megatron.pretraining.session import flush
from megatron.pretraining.setup import start
from moc.cli_output import print_lines
from moc.errors import cause_of, codes_in, warning
from moc.fault_points import reach
from moc.runtime.managed_job import join_job
from moc.runtime.progress import progress
from moc.session.auto import PolicySwitched
from moc.session.resume.point import NoRecoveryPoint
from moc.session.saving.pipeline import LAST_TRIES_S
from moc.state.record import StepRecord
from moc.state.undo_log import UntrackedChangeError
from moc.store.errors import CheckpointError
from moc.store.host_memory import memory_path_of_run


def pretrain(config: Config, program: Program) -> int:
    """Trains until all iterations are done or a stop is requested, recovering from lost workers.

    A worker is built once.  When another worker is lost, it keeps its live state if the recovery plan allows it.
    Otherwise it resumes from a snapshot (:mod:`moc.recovery.plan`).  New nodes join between iterations.

    Returns:
        The exit code: 0 when done or at an ``--exit-*`` limit, 75 after a signal (state is saved; restart to resume).
    """
    config = deterministic_if_exact(config, torch.cuda.is_available())
    stop, phases, job, parts = StopRequests(config), Phases(), join_job(), None
    inject_faults(config, job)
    phases.done("import")
    try:
        while True:
            try:
                if parts is None:
                    check_outputs(config, job)
                    parts = program.build(config, program.connect(config, job), stop, phases)
                parts.adopt_generation(job.report_ready())
                progress("setup")
                code = train(start(parts, stop, phases), stop)
                parts.log.close()
                shut_down(job)
                return code
            except StopRequested as request:
                if job.rank == 0:
                    print_lines(f" {request}", flush=True)
                return EXIT_REQUEUE
            except NoRecoveryPoint:
                job.start_over()
            except PolicySwitched:
                interruption = None
            except MembersChange as change:
                interruption = job.change_members(change.has_handed_over)
            except Exception as error:
                interruption = job.rejoin_after(error)  # re-raises, unless a worker was lost and replaced
            assert parts is not None  # a loss before the worker is built is fatal
            try:
                parts.reset_after(interruption)
            except UntrackedChangeError as error:
                print_lines(f"worker {job.rank}: {error}", flush=True)
                job.start_over()
    finally:
        for stream in parts.streams.values() if parts is not None else ():
            if stream is not None:
                stream.close()


def train(run: TrainingRun, stop: StopRequests) -> int:
    """Runs the remaining iterations; returns the exit code."""
    try:
        return train_iterations_left(run, stop)
    except NonFiniteError:  # all workers raise together; pending saves precede this iteration and are valid
        run.session.finish()
        run.checkpoints.finish()
        raise


def train_iterations_left(run: TrainingRun, stop: StopRequests) -> int:
    """Iterates, evaluates and saves until the last iteration or a stop request."""
    prepare(run)
    run.log.skip_time()
    last_iteration = run.position.iteration if run.config.training.skip_train else run.train_iters
    if run.stop_requested and run.position.iteration < last_iteration:
        save(run)
        return leave(run, stop)
    is_over = False if run.config.training.skip_train else follow(run, stop, run.missed)
    while not is_over and run.position.iteration < last_iteration:
        record = iterate(run, stop)
        is_over = follow(run, stop, duties_after(run.config, record.iteration, record.stop))
        if not is_over and run.position.iteration < run.train_iters:
            for callback in run.callbacks:
                callback.between_iterations(run)
    return leave(run, stop) if is_over else finish(run, stop)


def prepare(run: TrainingRun) -> None:
    """Runs the callbacks before the first iteration of a generation."""
    for callback in run.callbacks:
        callback.before_training(run)


def follow(run: TrainingRun, stop: StopRequests, duties: Duties) -> bool:
    """Evaluates and saves after the last completed iteration, if due; returns whether training ends with it."""
    stopping = duties.stops
    if duties.evaluates and not stopping:
        stopping = not report_loss(run, "valid", stop)
    if stopping or duties.ends or duties.saves or run.checkpoints.retry_is_due():
        save(run)
    return stopping or duties.ends


def iterate(run: TrainingRun, stop: StopRequests) -> StepRecord:
    """Computes, commits, snapshots and reports one iteration."""
    progress("step")
    for callback in run.callbacks:
        callback.before_iteration(run)
    started_at = time.perf_counter()
    batches = run.batches("train", run.position.consumed_samples)
    record = run.stepper.step(run.position.iteration, batches, stop.pending)
    run.session.completed(record, started_at)  # the commit: after it, a lost worker cannot undo the iteration
    reach("completed")
    run.stepper.gather_weights()
    progress("save")
    run.session.take()
    run.log.iteration(record, run.position.consumed_samples, run.session.gauges)
    run.checkpoints.poll()
    for callback in run.callbacks:
        callback.after_iteration(run)
    return record


def report_loss(run: TrainingRun, split: str, stop: StopRequests, final: bool = False) -> bool:
    """Evaluates a split, if it has data; returns False if a stop was requested meanwhile."""
    completed = run.program.evaluate(run, split, stop, final)
    run.log.skip_time()
    return completed


def save(run: TrainingRun) -> None:
    """Saves a dense checkpoint, unless ``--save`` is unset or this iteration is already saved."""
    if run.config.checkpoint.save is None or run.checkpoints.last_saved == run.position.iteration:
        return
    progress("save")
    reach("saving")
    started_at, iteration = time.perf_counter(), run.position.iteration
    run.checkpoints.save(run.position)
    if run.checkpoints.last_saved == iteration:
        run.log.events.write("save", iteration=iteration, elapsed_s=round(time.perf_counter() - started_at, 6))
    run.log.skip_time()


def secure(run: TrainingRun) -> None:
    """Writes the final state of this run to storage.

    Raises:
        CheckpointError: on all workers, if neither ``--ckpt-dir`` nor ``--save`` has it.
    """
    progress("save")
    for callback in run.callbacks:
        callback.before_last_snapshot(run)
    targets = run.config.snapshot.ckpt_policy is not None, run.config.checkpoint.save is not None
    problems = [flush(run), last_checkpoint(run)]
    failed = [problem for problem in problems if problem]
    if failed and len(failed) == sum(targets):
        raise CheckpointError(failed[0])
    if run.session.memory_is_free and not problems[0]:
        job, run_id = run.config.snapshot_dir, run.session.run
        assert job is not None and run_id is not None  # snapshots are in memory
        run.world.job.allow_memory_release(
            memory_path_of_run(run.config.snapshot.ckpt_memory_dir, job, run_id).absolute()
        )
    for problem in failed:
        sentence = f"{cause_of(problem)}; the last state is saved in the other place. Fix: resume from there"
        run.log.message(warning(sentence, code=codes_in(problem)[-1]))


def last_checkpoint(run: TrainingRun) -> str:
    """Ensures that ``--save``, if given, has a checkpoint of the last iteration; returns the problem, or empty."""
    run.checkpoints.finish()
    for pause in LAST_TRIES_S:
        if run.config.checkpoint.save is None or run.checkpoints.last_saved == run.position.iteration:
            return ""
        time.sleep(pause)
        save(run)
        run.checkpoints.finish()
    return "" if run.checkpoints.last_saved == run.position.iteration else run.checkpoints.problem


def leave(run: TrainingRun, stop: StopRequests) -> int:
    """Stops before the last iteration; returns the exit code."""
    secure(run)
    signalled = stop.any_signal(run.world)
    code = EXIT_REQUEUE if signalled else EXIT_DONE
    reason = "signal" if signalled else "limit"
    run.log.events.write("exit", iteration=run.position.iteration, reason=reason, code=code)
    continuation = ": the state of this iteration is saved, and the same command continues from it" if signalled else ""
    run.log.message(f"exiting at iteration {run.position.iteration} after a {reason} (exit code {code}){continuation}")
    return code


def finish(run: TrainingRun, stop: StopRequests) -> int:
    """Saves after the last iteration (or with ``--skip-train``), and reports the final losses."""
    save(run)
    secure(run)
    run.log.events.write("exit", iteration=run.position.iteration, reason="done", code=EXIT_DONE)
    run.log.message("training is skipped" if run.config.training.skip_train else "training is done")
    if report_loss(run, "valid", stop, final=True):
        report_loss(run, "test", stop, final=True)
    return EXIT_DONE
