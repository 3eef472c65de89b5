"""Runs cells: prepares the dataset, starts the processes, injects the faults and reads the events."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.accuracy.cells import Cell, Plan
from benchmarks.live.job import ROOT, SHARED, free_ports
from moc.files.event_log import read_events
from moc.store.host_memory import find_memory_storage

ARTICLE = r"^ = [^=]+ = $"  # first line of a WikiText article
FEWEST_ARTICLES = 20  # with fewer, the tenth for validation is too small
VOCABULARY = 1024
TIMEOUT = 1800  # seconds for one start of the program; long, for busy machines
_GRACE = 60  # seconds for the other workers to end after the first one
_TAIL = 3000  # characters of output in an error message
_KILLED = -9


class RunFailed(RuntimeError):
    """A program failed."""


@dataclass(frozen=True)
class Dataset:
    """Dataset of the training program."""

    prefix: Path  # path prefix of the ``.bin`` and ``.idx`` files
    tokenizer: Path  # SentencePiece model

    @property
    def tokenizer_flags(self) -> list[str]:
        """Tokenizer flags of all programs."""
        return ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(self.tokenizer)]


def prepare(text: Path, directory: Path) -> Dataset:
    """Trains a tokenizer and builds a dataset with one document per article, as the quickstart does.

    Raises:
        RunFailed: the text is missing, or has too few articles.
    """
    try:
        articles = len(re.findall(ARTICLE, text.read_text(encoding="utf-8"), re.MULTILINE))
    except (OSError, UnicodeDecodeError) as error:
        raise RunFailed(f"--text {text} cannot be read ({error}): give a file of WikiText") from None
    if articles < FEWEST_ARTICLES:
        raise RunFailed(
            f"--text {text} has {articles} articles, which begin with a line such as ' = Title = ': give a file of "
            f"WikiText with {FEWEST_ARTICLES} or more"
        )
    dataset = Dataset(directory / "data_text_document", directory / "tokenizer.model")
    made = ["--output", str(directory / "tokenizer"), "--vocab-size", str(VOCABULARY)]
    _tool("train_tokenizer", ["--input", str(text), *made])
    written = ["--output-prefix", str(directory / "data"), "--split-on-regex", ARTICLE, "--append-eod"]
    _tool("preprocess_data", ["--input", str(text), *written, *dataset.tokenizer_flags])
    return dataset


def unigram_entropy(prefix: Path) -> float:
    """Returns the loss, in nats per token, of a model that knows only the token frequencies (16-bit tokens)."""
    import numpy

    counts = numpy.bincount(numpy.fromfile(f"{prefix}.bin", dtype=numpy.uint16))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * numpy.log(shares)).sum())


def run(cell: Cell, plan: Plan, dataset: Dataset, scratch: Path) -> dict:
    """Trains a cell to its end, over all faults; returns its fields and the result of :func:`told`.

    Raises:
        RunFailed: a start ended in another way than by its fault, or the last start failed.
    """
    directory = Path(tempfile.mkdtemp(dir=scratch))
    with tempfile.TemporaryDirectory(prefix="pec_accuracy-", dir=SHARED) as memory:
        data = ["--data-path", str(dataset.prefix), *dataset.tokenizer_flags]
        flags = [*data, *cell.flags(plan, directory, Path(memory))]
        for number, fault in enumerate(cell.faults):
            start(cell, flags, directory, fault)
            for node in cell.lost_nodes(number):
                shutil.rmtree(find_memory_storage(memory, str(directory / "checkpoints"), str(node)).name)
        start(cell, flags, directory, None)
    result = asdict(cell) | told(read_events(directory / "log"), cell, plan)
    shutil.rmtree(directory)
    return result


def start(cell: Cell, flags: list[str], directory: Path, dies_after: int | None) -> None:
    """Starts all workers and waits until they are killed after an iteration, or finish.

    Raises:
        RunFailed: a worker ended in another way; contains the end of its output.
    """
    common = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    common |= {"WORLD_SIZE": str(cell.workers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    common |= {} if dies_after is None else {"DIES_AFTER": str(dies_after)}
    command = [sys.executable, "-m", "benchmarks.accuracy.mortal", *flags]
    outputs = [directory / f"output-{rank}" for rank in range(cell.workers)]
    processes = []
    try:
        for rank, path in enumerate(outputs):
            environment = os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with open(path, "ab") as output:
                started = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
            processes.append(started)
        codes = _ended(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    wanted = 0 if dies_after is None else _KILLED
    for code, path in zip(codes, outputs, strict=True):
        if code != wanted:
            said = path.read_text(encoding="utf-8", errors="replace")[-_TAIL:]
            raise RunFailed(f"{cell.name}, seed {cell.seed}: exit code {code}, not {wanted}\n{said}")


def told(events: list[dict], cell: Cell, plan: Plan) -> dict:
    """Returns the results in a run's events.

    Returns:
        ``loss``: final validation loss, nats per token; ``plt``: lost tokens of all faults as a share of the
        training's tokens (eq. 7); an event has the share of the tokens so far; ``resumed``: iteration, tier and sources
        of each recovery; if ``traced``, also ``evaluations`` ([iteration, loss]), and for each iteration
        ``train_losses`` and, if experts compensate lost tokens, ``owed``, the remaining tokens.

    Raises:
        RunFailed: a recovery or the final loss is missing.
    """
    resumed = [{name: e.get(name) for name in ("iteration", "tier", "sources")} for e in _of(events, "resume")]
    evaluations = {e["iteration"]: e["loss"] for e in _of(events, "evaluation") if e["split"] == "valid"}
    if len(resumed) != len(cell.faults) or plan.iterations not in evaluations:
        raise RunFailed(f"{cell.name}, seed {cell.seed}: {len(resumed)} recoveries, no loss at the end, or both")
    lost = _of(events, "lost")
    share = lost[-1]["iteration"] / plan.iterations if lost else 0.0  # every iteration routes the same number of tokens
    plt = lost[-1]["plt"] * share if lost else 0.0
    result = {"loss": evaluations[plan.iterations], "plt": plt, "resumed": resumed}
    if cell.traced:
        iterations = {e["iteration"]: e for e in _of(events, "iteration")}
        result["evaluations"] = sorted(evaluations.items())
        result["train_losses"] = [round(iterations[i]["loss"], 4) for i in sorted(iterations)]
        if any("tokens_owed" in e for e in iterations.values()):
            result["owed"] = [iterations[i].get("tokens_owed", 0) for i in sorted(iterations)]
    return result


def _of(events: list[dict], kind: str) -> list[dict]:
    return [event for event in events if event["type"] == kind]


def _ended(processes: list[subprocess.Popen]) -> list[int | None]:
    """Returns the exit codes after all processes ended; None for processes still running after the timeout."""
    deadline = time.monotonic() + TIMEOUT
    while None in (codes := [process.poll() for process in processes]) and time.monotonic() < deadline:
        if any(code is not None for code in codes):
            deadline = min(deadline, time.monotonic() + _GRACE)
        time.sleep(0.05)
    return codes


def _tool(name: str, flags: list[str]) -> None:
    command = [sys.executable, str(ROOT / "tools" / f"{name}.py"), "--overwrite", *flags]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if ended.returncode != 0:
        raise RunFailed(f"tools/{name}.py ended with exit code {ended.returncode}\n{ended.stderr[-_TAIL:]}")
