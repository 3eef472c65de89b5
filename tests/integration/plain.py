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
from moc import CheckpointError, Session, Settings, StepRecord, join_job, sum_over_workers
from moc.errors import with_code
from moc.store.manifest import compute_digest

_SETTINGS = dict(
    ckpt_dir="directory",
    ckpt_policy="policy",
    snapshot_interval="snapshot_interval",
    ckpt_overhead_budget="overhead_budget",
    ckpt_tier="tier",
    ckpt_memory_dir="memory_dir",
    node_of_rank="node_of_rank",
    ckpt_blocking="blocking",
    max_snapshot_lag="max_snapshot_lag",
    ckpt_keep="keep",
    persist_interval="persist_interval",
    ckpt_step="step",
)


def train(flags: dict) -> dict:
    """Trains; what ``bodies.train`` returns but the local parameters and the samples."""
    job = join_job()
    job.connect("gloo", timedelta(minutes=5), torch.device("cpu"))
    engine, told = Engine(job), {"records": [], "samples": {}}
    log = Log(job.rank, flags.get("log_dir"))
    settings = {name: flags[flag] for flag, name in _SETTINGS.items() if flag in flags}
    session = Session(engine, Settings(**{"directory": "", "train_iters": flags["train_iters"]} | settings), log)
    try:
        told["start"] = _train(engine, session, log, told["records"], flags)
        session.close()
    except CheckpointError as error:
        print(f"plain.py: error (worker {job.rank}): {with_code(error)}", file=sys.stderr, flush=True)
        sys.exit(1)
    told["weights"] = {
        name: compute_digest(p.detach().numpy().tobytes()) for name, p in engine.model.named_parameters()
    }
    job.leave()
    return told | {"code": 0}


def _train(engine: Engine, session: Session, log: Log, records: list[dict], flags: dict) -> int:
    """Trains until ``exit_interval`` or the end; where it began."""
    position = session.resume()
    began = position.iteration
    job, parameters = engine.world.job, sum(p.numel() for p in engine.model.parameters())
    told = dict(run=session.run, job=job.id, term=job.term, world_size=job.size, parameters=parameters, startup_s={})
    log.events.write("start", iteration=began, **told)
    while position.iteration < flags["train_iters"]:
        begun = time.perf_counter()
        sums = {"loss": engine.gradients(position.iteration), **session.contribution()}
        totals = sum_over_workers(sums, engine.world)
        batch = BATCH * engine.world.size
        loss, tokens = totals["loss"] / engine.world.size, batch * (SEQUENCE - 2)
        record = StepRecord(position.iteration + 1, loss, 0.0, 1.0, False, tokens, 1e-3, batch)
        session.on_totals(totals)
        engine.apply(record)
        position = session.completed(record, begun)
        session.take()
        records.append(dataclasses.asdict(record))
        elapsed = dict(consumed_samples=position.consumed_samples, elapsed_s=time.perf_counter() - begun)
        log.events.write("iteration", **records[-1], **elapsed)
        if position.iteration % flags.get("exit_interval", flags["train_iters"]) == 0:
            break
    session.flush()
    return began
