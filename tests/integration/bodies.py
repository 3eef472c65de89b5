"""Functions that workers of a test's world execute: see :mod:`tests.worlds`."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy
import torch
import torch.distributed as dist
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.distributed import param_and_grad_buffer as buffers

from megatron.pretraining import errors, loop
from megatron.pretraining.checkpoint import writer
from megatron.pretraining.engine.step import NonFiniteError
from megatron.pretraining.entry import gpt
from megatron.pretraining.entry.log import StockLog
from megatron.pretraining.entry.program import StockProgram
from megatron.pretraining.entry.stock import get_args, replaced
from megatron.pretraining.logging import writers
from megatron.pretraining.model.parameters import unpartitioned_parameters, unwrap
from megatron.pretraining.process import stopping
from megatron.pretraining.process import topology as first_worker
from moc.session.saving import pipeline
from moc.store.errors import CheckpointError
from tests.integration import plain
from tests.integration.own_program import program_of

first_worker.PATIENCE = 0.0  # there is no launcher that would end the others
loop.LAST_TRIES_S = pipeline.LAST_TRIES_S = (0.1, 0.2, 0.4)  # storage that a test has filled stays full


def train(flags: dict) -> dict:
    """Runs the program.

    Returns:
        ``code``: its exit code;
        ``start``: iteration that it resumed from;
        ``records``: step records;
        ``weights``: digest of each box of the unpartitioned parameters that this worker holds;
        ``parameters``: digest of each local parameter of the bare model;
        ``samples``: digest of each training sample that it read, by iteration.
    """
    if "engine" in flags:
        return plain.train(flags)
    told = {"code": None, "start": None, "records": [], "weights": None, "samples": {}}
    _watch(told)

    def forward_step(batches, model):
        iteration = str((told["start"] or 0) + len(told["records"]))
        watching = model.training and batches is not None
        seen = told["samples"].setdefault(iteration, []) if watching else []
        return gpt.forward_step(_noting(batches, seen), model)

    with errors.reported():
        config, program = program_of(flags)
        told["code"] = loop.pretrain(config, dataclasses.replace(program, forward_step=forward_step))
    return told


def train_unchecked(flags: dict) -> dict:
    """As :func:`train`, where directories cannot be written any more after they were checked."""
    with mock.patch.object(loop, "check_outputs"):
        return train(flags)


def train_with_services(flags: dict, record: str) -> dict:
    """Trains as :func:`train` with a W&B that hangs, and an MLflow that writes to a file."""
    sys.path.insert(0, str(Path(__file__).with_name("services")))
    os.environ["MLFLOW_TRACKING_URI"] = record
    writers._CLOSING_S = 0.2
    return train(flags)


def _watch(told: dict) -> None:
    run_loop, tell = loop.train, StockLog.iteration

    def watched_loop(run, stop):
        told["start"] = run.position.iteration
        code = run_loop(run, stop)
        told["weights"] = weights_of(run.stepper.chunks)
        told["parameters"] = {n: digest(p) for c in run.stepper.chunks for n, p in unwrap(c).named_parameters()}
        return code

    def watched_log(log, record, consumed_samples, gauges):
        if told["start"] is not None:  # else another process has computed it, and could not report it any more
            told["records"].append(dataclasses.asdict(record))
        tell(log, record, consumed_samples, gauges)

    loop.train, StockLog.iteration = watched_loop, watched_log


def _noting(batches, seen: list):
    for batch in batches or ():
        if batch["loss_mask"].any():  # else it is a ghost
            seen += [digest(tokens) for tokens in batch["tokens"]]
        yield batch


def weights_of(chunks) -> dict[str, str]:
    """Digest of each box of the unpartitioned parameters that this worker holds."""
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:  # else updated weights arrive with the next forward pass
            chunk.start_param_sync(force_sync=True)
    pieces = [p for chunk in chunks for ps in unpartitioned_parameters(unwrap(chunk)).values() for p in ps]
    return {f"{p.name} {p.region.offset} {p.region.shape}": digest(p.view) for p in pieces}


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's values, shortened."""
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def write_corpus(prefix: str, documents: int, seed: int, vocab_size: int) -> None:
    """Makes ``prefix.bin`` and ``prefix.idx``: documents of a simple language, with megatron-core's writer."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_idx_path

    generator = torch.Generator().manual_seed(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for _ in range(documents):
        length = int(torch.randint(20, 200, (1,), generator=generator))
        steps = torch.randint(1, 4, (length,), generator=generator)
        builder.add_document((steps.cumsum(0) + seed) % (vocab_size - 1), [length])
    builder.finalize(get_idx_path(prefix))


def with_run(flags: dict, use):
    """Sets up a run by flags, calls ``use`` with it in place of the training loop, and returns the result."""
    answers = []
    loop.train = lambda run, stop: answers.append(use(run)) or 0
    loop.pretrain(*program_of(flags))
    return answers[0]


def steps(flags: dict, poison: str | None = None, poisoned_step: int = 0) -> list[dict]:
    """Computes the iterations one by one, and looks closely.

    Args:
        flags: the flags; ``train_iters`` steps are computed.
        poison: value that is not a number on the last worker in one step: ``weight`` or ``loss``.
        poisoned_step: number of that step.

    Returns:
        For each step ``collectives`` between reduced gradients and apply, ``apply_collectives`` and
        ``gather_collectives``, each with its number of workers; how many ``buckets`` weights are gathered in;
        ``weights``, ``biases`` (of routers) and ``gradients`` as they were, by moment;
        ``record``, or ``refused`` with the sentence.
    """

    def use(run) -> list[dict]:
        return [_step(run, poison if i == poisoned_step else None) for i in range(run.train_iters)]

    return with_run(flags, use)


def _step(run, poison: str | None) -> dict:
    seen = {"collectives": [], "apply_collectives": [], "gather_collectives": [], "gradients": {}}
    seen |= {"record": None, "refused": None, "buckets": _buckets(run)}
    seen["weights"], seen["biases"] = {"before": weights_of(run.stepper.chunks)}, {"before": _biases(run)}
    stepper, optimizer = run.stepper, run.stepper.optimizer
    reduce, apply = stepper.boundaries.reduce, optimizer.apply
    window = contextlib.ExitStack()

    def watched_reduce(*arguments):
        reduce(*arguments)
        seen["gradients"]["reduced"] = _gradients(run)
        window.enter_context(_noting_collectives(seen["collectives"]))

    def watched_apply(square_norm):
        window.close()
        with _noting_collectives(seen["apply_collectives"]):
            apply(square_norm)

    stepper.boundaries.reduce, optimizer.apply = watched_reduce, watched_apply
    last = run.world.rank == run.world.size - 1
    with _poisoned(stepper, poison if last else None):
        try:
            batches = run.batches("train", run.position.consumed_samples)
            record = stepper.step(run.position.iteration, batches)
            seen["record"] = dataclasses.asdict(record)
            run.session.completed(record, 0.0)
            with _noting_collectives(seen["gather_collectives"]):
                stepper.gather_weights()
        except NonFiniteError as error:
            seen["refused"] = str(error)
            window.close()
    seen["gradients"]["after"] = _gradients(run)
    seen["weights"]["after"], seen["biases"]["after"] = weights_of(stepper.chunks), _biases(run)
    stepper.boundaries.reduce, optimizer.apply = reduce, apply
    return seen


@contextlib.contextmanager
def _poisoned(stepper, poison: str | None):
    if poison == "weight":
        weight = next(stepper.chunks[-1].parameters()).data.view(-1)
        healthy = weight[0].item()
        weight[0] = float("nan")
        yield
        weight[0] = healthy
    elif poison == "loss":
        healthy = stepper.schedule._forward_step
        stepper.schedule._forward_step = lambda *arguments: _poisoned_output(*healthy(*arguments))
        yield
        stepper.schedule._forward_step = healthy
    else:
        yield


def _poisoned_output(output, loss):
    return output * float("nan"), loss


_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # before torch 2.13
_COLLECTIVES = ("all_reduce", "reduce_scatter_tensor", _GATHER, "broadcast", "all_gather_object",
                "broadcast_object_list", "all_to_all_single", "barrier", "send", "recv", "isend", "irecv",
                "batch_isend_irecv", "all_gather", "reduce", "gather", "scatter", "_all_gather_base",
                "_reduce_scatter_base")  # fmt: skip


@contextlib.contextmanager
def _noting_collectives(calls: list):
    """Notes the name and the number of workers of every collective."""

    def noting(name, function):
        def noted(*args, **kwargs):
            noted_name = "all_gather_into_tensor" if name == _GATHER else name
            calls.append([noted_name, dist.get_world_size(kwargs.get("group"))])
            return function(*args, **kwargs)

        return noted

    with contextlib.ExitStack() as patches:
        for name in _COLLECTIVES:
            patches.enter_context(mock.patch.object(dist, name, noting(name, getattr(dist, name))))
        name = "dist_all_gather_func"  # what megatron-core calls one of them; it was looked up at import
        patches.enter_context(mock.patch.object(buffers, name, noting(name, getattr(buffers, name))))
        yield


def _buckets(run) -> int:
    groups = [
        group for chunk in run.stepper.chunks for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups
    ]
    return sum(len(group.buckets) for group in groups)


def _biases(run) -> list:
    modules = [m for chunk in run.stepper.chunks for m in chunk.modules()]
    return [m.expert_bias.tolist() for m in modules if getattr(m, "expert_bias", None) is not None]


def _gradients(run) -> dict[str, str]:
    named = [item for chunk in run.stepper.chunks for item in chunk.named_parameters()]
    return {f"{i} {name}": digest(p.main_grad) for i, (name, p) in enumerate(named)}


def refusals(flags: dict, damages: list[dict]) -> list[str | None]:
    """Returns the errors of loading, without damage to a file and then with each.

    Args:
        flags: with ``load``; fitting the checkpoint.
        damages: ``{"path", "kind"}``; kind is ``missing``, ``truncated`` or ``flipped``.

    Returns:
        The errors; None if loaded. Weights never change.
    """

    def use(run) -> list:
        found = [_load(run, load)]
        for damage in damages:
            with _damaged(run.world, **damage):
                found.append(_load(run, load))
        return found

    load = flags.pop("load")  # not while setting up
    return with_run(flags, use)


def _load(run, load: str) -> str | None:
    before = weights_of(run.stepper.chunks)
    try:
        with replaced(get_args(), load=load):
            run.checkpoints.load()
    except CheckpointError as error:
        assert weights_of(run.stepper.chunks) == before, f"weights changed, although: {error}"
        return str(error)
    return None


@contextlib.contextmanager
def _damaged(world, path: str, kind: str):
    path, aside = Path(path), Path(f"{path}.aside")
    if world.rank == 0:
        path.rename(aside)
        content = bytearray(aside.read_bytes())
        content[len(content) // 2] ^= 1
        if kind != "missing":
            path.write_bytes(content if kind == "flipped" else content[: len(content) // 2])
    dist.barrier()
    yield
    dist.barrier()
    if world.rank == 0:
        aside.replace(path)
    dist.barrier()


def train_with_small_files(flags: dict, limit: int) -> dict:
    """As :func:`train`, where no file may grow beyond ``limit`` bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    return train(flags)


def die_while_writing(flags: dict) -> None:
    """Is killed shortly after the forked writer has started, which would run for ten minutes."""

    def die(run):
        real = writer.write_shard_file
        writer.write_shard_file = lambda *args: (time.sleep(600), real(*args))
        run.checkpoints.save(run.position)
        while not any(Path(flags["save"]).glob(".iter_*/optimizer")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    with_run(flags | dict(async_save=True), die)


def leave_a_process() -> None:
    """Ends before a process that it started."""
    subprocess.Popen(["sleep", "60"])


def train_counting_reads(flags: dict) -> dict:
    """As :func:`train`; with ``reads``, the samples that were asked for, and ``pieces``, what was read of files."""
    reads, read, pieces, get = [], GPTDataset.__getitem__, [], IndexedDataset.get
    GPTDataset.__getitem__ = lambda dataset, index: reads.append(index) or read(dataset, index)
    IndexedDataset.get = lambda dataset, index, offset=0, length=None: (
        pieces.append(f"{index} {offset} {length}") or get(dataset, index, offset, length)
    )
    return train(flags) | {"reads": reads, "pieces": pieces}


def train_and_report_finetune(flags: dict) -> dict:
    """As :func:`train`; with ``finetune``, the option after it."""
    return train(flags) | {"finetune": get_args().finetune}


def train_when_time_flies(flags: dict, calls: int) -> dict:
    """As :func:`train`; on the last worker an hour passes after so many looks at the clock."""
    looks = iter(range(calls))
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + (0.0 if next(looks, None) is not None else 3600.0))
    if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
        stopping.time = clock
    return train(flags)


def train_signalled_in_set_up(flags: dict) -> dict:
    """As :func:`train`; the last worker gets SIGTERM while the model is built."""
    build = StockProgram._set_up

    def signalled(*args):
        if dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return build(*args)

    StockProgram._set_up = signalled
    return train(flags)


def add_ranks() -> float:
    """The sum of the workers' ranks, by an all-reduce."""
    dist.init_process_group("gloo")
    ranks = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(ranks)
    return ranks.item()


def divide_by_rank() -> float:
    """Fails on the first worker."""
    return 1 / int(os.environ["RANK"])


def hang() -> None:
    """Does nothing for a long time."""
    time.sleep(600)
