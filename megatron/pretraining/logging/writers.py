"""Writes values to TensorBoard, W&B and MLflow in the background.

A service that fails or hangs neither ends nor delays training: values that it does not take are dropped and counted.
``events.jsonl`` has these values, too.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from moc.background import Trouble
from moc.errors import warning

PREFIX = "moc/"
"""Prefix of the names of our scalars, which distinguishes them from Megatron-LM's."""

_MAX_QUEUED = 10_000  # batches of values; reached only if a write hangs
_POLL_S = 0.2
_CLOSING_S = 10.0


@dataclass(frozen=True)
class Listeners:
    """Callbacks for a writer's failures; a writer calls them in its own thread, or when it closes.

    Attributes:
        message: prints a message.
        lost: records lost values: the service, their number, and the seconds since the first failure.
    """

    message: Callable[[str], None]
    lost: Callable[[str, int, float], None]


class BackgroundWriter(ABC):
    """Writes to one service in a thread of its own.

    Args:
        subject: the subject of a message, such as ``TensorBoard's files in log``.
        service: name of the service in ``log_failed`` events.
        connect: returns the object to write to; repeated after a failure.
        listeners: callbacks for failures.
    """

    def __init__(self, subject: str, service: str, connect: Callable[[], Any], listeners: Listeners):
        self._subject, self._service, self._connect, self._listeners = subject, service, connect, listeners
        self._thread = threading.Thread(target=self._work, name=service, daemon=True)
        self._trouble, self._target = Trouble(), None
        self._waiting: deque[tuple[Callable[[Any], object], int]] = deque()
        self._in_flight = self._dropped = 0
        self._counting, self._closing = threading.Lock(), threading.Event()
        self._dropped_at, self._hangs = 0.0, False

    def begin(self) -> None:
        """Connects to the service; returns immediately."""
        self._submit(lambda target: None, 0)
        self._thread.start()

    @abstractmethod
    def add_scalars(self, values: Mapping[str, float], step: int) -> None:
        """Adds several values of one step; returns immediately."""

    @abstractmethod
    def add_text(self, name: str, text: str, global_step: int) -> None:
        """Adds a text, such as the reason of a recovery; returns immediately."""

    @abstractmethod
    def _end(self, target: Any) -> None:
        """Ends the connection to the service."""

    def _target_is_removed(self) -> bool:
        """Returns whether the object to write to has become useless without an error."""
        return False

    def close(self) -> None:
        """Writes the remaining values, if the service takes them within ten seconds; reports the others as lost."""
        self._closing.set()
        self._thread.join(_CLOSING_S)
        unwritten = self._in_flight + sum(count for _, count in [*self._waiting])
        if unwritten or self._dropped:
            self._listeners.lost(self._service, unwritten + self._dropped, self._lasted_s())

    def _submit(self, write: Callable[[Any], object], count: int) -> None:
        """Queues a write of ``count`` values; drops them if too many writes wait.

        The thread polls the queue a few times a second, since waking it for each value would cost training more.
        """
        if len(self._waiting) < _MAX_QUEUED:
            self._waiting.append((write, count))
            return
        self._drop(count)
        if not self._hangs:
            self._hangs = True
            self._listeners.message(
                warning(
                    f"{self._subject} cannot be written, since a write hangs; training continues, and drops the "
                    "values. Fix: look at the service or its network",
                    code="log-unwritable",
                )
            )

    def _work(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(_POLL_S)
            while self._waiting:
                write, self._in_flight = self._waiting.popleft()
                self._write(write, self._in_flight)
                self._in_flight = 0
        with contextlib.suppress(Exception):
            if self._target is not None:
                self._end(self._target)

    def _drop(self, count: int) -> None:
        with self._counting:
            self._dropped_at = self._dropped_at if self._dropped else time.monotonic()
            self._dropped += count

    def _lasted_s(self) -> float:
        return time.monotonic() - self._dropped_at if self._dropped else 0.0

    def _write(self, write: Callable[[Any], object], count: int) -> None:
        if self._trouble.rests:
            self._drop(count)
            return
        try:
            if self._target is None or self._target_is_removed():
                self._target = self._connect()
            write(self._target)
        except Exception as error:  # a service may raise anything
            self._target = None
            self._drop(count)
            if self._trouble.failed():
                self._listeners.message(
                    warning(
                        f"{self._subject} cannot be written ({getattr(error, 'strerror', None) or error}); training "
                        "continues, and tries again. Fix: correct the permissions or the address, or make room",
                        code="log-unwritable",
                    )
                )
            return
        if self._trouble or self._dropped:
            self._hangs = False
            with self._counting:
                dropped, lasted_s, self._dropped = self._dropped, self._lasted_s(), 0
            self._trouble.over()
            self._listeners.lost(self._service, dropped, lasted_s)


class Board(BackgroundWriter):
    """Writes TensorBoard's files, with methods of TensorBoard's ``SummaryWriter``.

    Args:
        directory: TensorBoard's directory.
        queue_size: values that TensorBoard buffers before it writes.
        listeners: learn of failures.
    """

    def __init__(self, directory: str, queue_size: int, listeners: Listeners):
        from torch.utils.tensorboard.writer import SummaryWriter  # takes a second to import

        self._directory = directory
        _silence_writers()
        connect = lambda: SummaryWriter(directory, max_queue=queue_size)  # noqa: E731
        super().__init__(f"TensorBoard's files in {directory}", "tensorboard", connect, listeners)
        self.begin()

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Adds one value, like TensorBoard's own method."""
        self.add_scalars({name: value}, step)

    def add_scalars(self, values: Mapping[str, float], step: int) -> None:
        numbers = {name: float(value) for name, value in values.items()}

        def write(board: Any) -> None:
            for name, value in numbers.items():
                board.add_scalar(name, value, step)
            self._flush_after_trouble(board)

        self._submit(write, len(numbers))

    def add_text(self, name: str, text: str, global_step: int) -> None:
        self._submit(lambda board: board.add_text(name, text, global_step), 1)

    def flush(self) -> None:
        """Lets TensorBoard write its buffer; returns immediately."""
        self._submit(lambda board: board.flush(), 0)

    def _target_is_removed(self) -> bool:
        return not Path(self._directory).is_dir()  # writes to removed files succeed

    def _flush_after_trouble(self, board: Any) -> None:
        if self._trouble:
            board.flush()

    def _end(self, target: Any) -> None:
        target.close()


class WandbWriter(BackgroundWriter):
    """Stands in for the module ``wandb``: Megatron-LM calls its functions."""

    def __init__(self, wandb: Any, listeners: Listeners):
        self._options: dict[str, Any] = {}
        super().__init__("W&B", "wandb", lambda: self._init(wandb), listeners)

    def init(self, config: Mapping[str, Any], **options: Any) -> None:
        """Takes the options of ``wandb.init``, which runs once the launch is known."""
        self._options = options | {"config": dict(config)}

    def begin_run(self, job: str) -> None:
        """Begins a run; a worker that replaces a lost one continues the run of its launch, if W&B allows it."""
        if "WANDB_RUN_ID" not in os.environ:
            self._options |= dict(id=job, resume="allow")
        self.begin()

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Adds values, like ``wandb.log``."""
        copied = dict(values)
        self._submit(lambda wandb: wandb.log(copied, step), len(copied))

    def add_scalars(self, values: Mapping[str, float], step: int) -> None:
        """See :meth:`BackgroundWriter.add_scalars`; values belong to W&B's current step, since steps cannot go back."""
        copied = dict(values)
        self._submit(lambda wandb: wandb.log(copied, commit=False), len(copied))

    def add_text(self, name: str, text: str, global_step: int) -> None:
        self._submit(lambda wandb: wandb.log({name: text}, commit=False), 1)

    def submit(self, action: Callable[[Any], object]) -> None:
        """Runs an action with the module ``wandb`` in the background, such as the record of a checkpoint."""
        self._submit(action, 1)

    def _init(self, wandb: Any) -> Any:
        wandb.init(**self._options)
        return wandb

    def _end(self, target: Any) -> None:
        target.finish()


class MlflowWriter(BackgroundWriter):
    """Writes to a run of MLflow, which ``MLFLOW_TRACKING_URI`` places; Megatron-LM has no such writer.

    A worker that replaces a lost one continues the run of its launch.

    Args:
        experiment: name of the experiment.
        job: id of the launch.
        listeners: learn of failures.
    """

    def __init__(self, experiment: str, job: str, listeners: Listeners):
        super().__init__("MLflow", "mlflow", lambda: _begin_mlflow(experiment, job), listeners)
        self.begin()

    def add_scalars(self, values: Mapping[str, float], step: int) -> None:
        numbers = {name: float(value) for name, value in values.items()}
        self._submit(lambda mlflow: mlflow.log_metrics(numbers, step=step), len(numbers))

    def add_text(self, name: str, text: str, global_step: int) -> None:
        """Sets a tag, whose name ends with the step, since MLflow's metrics have no text."""
        self._submit(lambda mlflow: mlflow.set_tag(f"{name}/{global_step}", text), 1)

    def _end(self, target: Any) -> None:
        target.end_run()


def _begin_mlflow(experiment: str, job: str) -> Any:
    mlflow: Any = import_module("mlflow")
    mlflow.end_run()  # of an attempt that failed
    mlflow.set_experiment(experiment)
    words = {"filter_string": f"tags.`moc.job` = '{job}'", "output_format": "list"}
    earlier = mlflow.search_runs(experiment_names=[experiment], **words)
    if earlier:
        mlflow.start_run(run_id=earlier[0].info.run_id)
    else:
        mlflow.start_run(tags={"moc.job": job})
    return mlflow


def _silence_writers() -> None:
    """Hides exceptions of TensorBoard's threads, which are already reported here."""
    before = threading.excepthook
    if getattr(before, "of_board", False):
        return

    def hook(arguments) -> None:
        if type(arguments.thread).__module__.partition(".")[0] != "tensorboard":
            before(arguments)

    hook.of_board = True
    threading.excepthook = hook
