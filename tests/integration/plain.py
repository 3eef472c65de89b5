"""The engine of examples/pure_torch.py, trained as :func:`tests.integration.bodies.train` trains Megatron's.

Sessions, resume and failures of storage need no model of Megatron's: a world of this one starts in a tenth of the time.
The layouts ``plain`` and ``plain DP2`` of :mod:`tests.integration.tiny` select it.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from datetime import timedelta

import torch

from examples.pure_torch import BATCH, SEQUENCE, Engine, Log
from moc.policy import interval_named, policy_named
from moc.runtime.agreement import sum_over_workers
from moc.runtime.job import join_job
from moc.session.begin import begin
from moc.session.resume.survivors import LocalRemains
from moc.session.settings import Settings
from moc.state.record import Position, StepRecord
from moc.store.digest import digest_of
from moc.store.errors import CheckpointError

_SETTINGS = dict(ckpt_dir="directory", train_iters="train_iters", ckpt_tier="tier", ckpt_memory_dir="memory_directory",
                 node_of_rank="nodes", ckpt_blocking="blocking", ckpt_keep="keep", persist_interval="persist_interval",
                 ckpt_step="begin_at")  # fmt: skip


def train(flags: dict) -> dict:
    """Trains; what ``bodies.train`` returns but the local parameters."""
    job = join_job()
    job.connect("gloo", timedelta(minutes=5), torch.device("cpu"))
    engine, told = Engine(job), {"records": [], "samples": {}}
    log = Log(job.rank, flags.get("log_dir"))
    try:
        told["start"] = _train(engine, flags, log, told["records"])
    except CheckpointError as error:
        print(f"plain.py: error (worker {job.rank}): {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    told["weights"] = {name: _digest(p) for name, p in engine.model.named_parameters()}
    job.leave()
    return told | {"code": 0}


def _train(engine: Engine, flags: dict, log: Log, records: list[dict]) -> int:
    """Trains until ``exit_interval`` or the end; where it began."""
    position, snapshots, settings = (
        Position(),
        None,
        {ours: flags[name] for name, ours in _SETTINGS.items() if name in flags},
    )
    if "ckpt_policy" in flags:
        policy = policy_named(flags["ckpt_policy"])(
            engine.operators, interval_named(flags["snapshot_interval"], flags.get("ckpt_overhead_budget"))
        )
        position, snapshots = begin(engine, Settings(**settings), policy, log, LocalRemains())
    began = position.iteration
    log.events.write("start", iteration=began)
    while position.iteration < flags["train_iters"]:
        begun = time.perf_counter()
        sums = {"loss": engine.gradients(position.iteration)} | (snapshots.ballot() if snapshots else {})
        vote = sum_over_workers(sums, engine.world)
        batch = BATCH * engine.world.size
        loss, tokens = vote["loss"] / engine.world.size, batch * (SEQUENCE - 2)
        record = StepRecord(position.iteration + 1, loss, 0.0, 1.0, False, tokens, 1e-3, batch)
        if snapshots:
            snapshots.on_vote(vote)
        engine.optimizer.step()
        position = position.after(record)
        if snapshots:
            snapshots.completed(position, record, begun)
            snapshots.take()
        records.append(dataclasses.asdict(record))
        log.events.write("iteration", iteration=record.iteration, loss=loss)
        if position.iteration % flags.get("exit_interval", flags["train_iters"]) == 0:
            break
    if snapshots:
        snapshots.secure(position)
        snapshots.close()
    return began


def _digest(parameter: torch.nn.Parameter) -> str:
    return digest_of(parameter.detach().numpy().tobytes())
