"""Writes ``events.jsonl``, the source of all figures and reports, and defines its events."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moc.background import Background, Trouble
from moc.errors import warning
from moc.files.event_log import EVENTS_FILE, SCHEMA, newest_event
from moc.files.safe_directory import open_without_links
from moc.runtime import environment
from moc.runtime.progress import Lease

_MAX_WAITING = 100_000  # lines
_PATIENCE_S = 1.0  # seconds to wait for a hanging write, once


def event_directory(log_dir: str | Path | None) -> str | Path | None:
    """Returns the directory for ``events.jsonl``, by default of the launch's monitor; None without one."""
    return log_dir or os.environ.get(environment.MONITOR)


class EventLog:
    """Writer of events to ``events.jsonl``; a no-op without a directory.

    A line is normally complete before :meth:`write` returns, so a killed worker leaves at most one torn line at the
    end.  Numbers without a JSON representation (nan, inf) are written as null.

    File errors neither end nor delay the caller.  Failed lines stay in memory and are retried; a hanging write is
    waited for once.  When writing works again, a ``log_failed`` event reports it.

    Args:
        directory: directory of the file; created if missing, also later.
        say: receives a message when writing fails, works again or has lost lines; may be called from a thread.
        listen: receives type and fields of each event, also without a directory.
    """

    def __init__(
        self,
        directory: str | Path | None,
        say: Callable[[str], None] = lambda text: None,
        listen: Callable[[str, Mapping[str, Any]], None] = lambda event, fields: None,
    ):
        self._listen = listen
        self._path = Path(directory or "") / EVENTS_FILE  # not opened without a directory
        self._lines: deque[bytes] = deque()
        self._lock, self._say, self._trouble = threading.Lock(), say, Trouble()
        self._descriptor: int | None = None
        self._lease = Lease.from_environment()
        self._written = self._lost_lines = 0  # bytes written of the first line; lines lost
        self._late: Future | None = None
        self._thread = None if directory is None else Background("event-log")
        self._deviating: set[str] = set()  # types
        self._run_in_thread(self._drain)

    def write(self, event: str, **fields) -> None:
        """Appends one event; ``type`` and ``time`` (Unix seconds) are the first fields.

        An event that deviates from :data:`EVENTS` is written, too, and reported once for each type.
        """
        if event == "start":
            fields = {**fields, "schema": SCHEMA}
        if event not in self._deviating and (deviations := problems({"type": event, **fields})):
            self._deviating.add(event)
            self._report(
                warning(
                    f"events of the type {event} deviate from the schema of {EVENTS_FILE}: {', '.join(deviations)}. "
                    "Fix: add the fields to moc/events.py",
                    code="event-deviates",
                )
            )
        self._listen(event, fields)
        if self._thread is not None:
            self._keep(event, fields)
            self._run_in_thread(self._drain)

    def newest(self, event: str) -> dict:
        """Returns the newest event of a type in the last MiB of the file, from any process; empty if there is none."""
        return self._run_in_thread(newest_event, self._path, event) or {}

    def close(self) -> None:
        """Closes the file; later events are dropped."""
        if self._thread is None:
            return
        if self._late is not None:
            wait([self._late], timeout=_PATIENCE_S)
        self._run_in_thread(self._close)
        self._thread.end()
        self._thread = None
        if self._lines:
            self._say(
                warning(
                    f"{len(self._lines) + self._lost_lines} lines of {self._path} are lost: it cannot be written. Fix: "
                    "correct its permissions or make room",
                    code="log-unwritable",
                )
            )

    def _run_in_thread(self, action: Callable, *args):
        """Runs an action in the thread; returns its result, or None if it fails or takes too long."""
        if self._thread is None or (self._late is not None and not self._late.done()):
            return None
        self._late = self._thread.submit(action, *args)
        wait([self._late], timeout=_PATIENCE_S)
        failed = not self._late.done() or self._late.exception() is not None
        return None if failed else self._late.result()

    def _keep(self, event: str, fields: dict) -> None:
        record = {"type": event, "time": round(time.time(), 3), **fields}
        line = (json.dumps(_finite(record), default=_plain) + "\n").encode()
        with self._lock:
            self._lines.append(line)
            if len(self._lines) > _MAX_WAITING:
                self._lines.pop()
                self._lost_lines += 1

    def _drain(self, last: bool = False) -> None:
        """Writes waiting lines, unless a failure is recent; runs in the thread, like all methods below."""
        if self._trouble.rests and not last:
            return
        try:
            self._open()
            while self._lines:
                self._write_first()
        except OSError as error:
            self._forget_file()
            if self._trouble.failed():
                self._report(
                    warning(
                        f"{self._path} cannot be written ({error.strerror or error}), and events wait in memory. Fix: "
                        "correct its permissions or make room",
                        code="log-unwritable",
                    )
                )
            return
        if self._trouble:
            count, lasted = self._trouble.count, self._trouble.over()
            self._keep("log_failed", dict(what="events", tries=count, lasted_s=round(lasted, 3), lost=self._lost_lines))
            self._report(f"{self._path} can be written again, after {lasted:.0f} s; {self._lost_lines} lines are lost")
            self._lost_lines = 0
            self._drain()

    def _write_first(self) -> None:
        if self._lease is not None:  # a stopped worker must not write the same lines as its successor
            self._lease.kill_if_expired()
        line = self._lines[0]
        assert self._descriptor is not None  # _open() was called
        while self._written < len(line):
            self._written += os.write(self._descriptor, line[self._written :])
        self._lines.popleft()
        self._written = 0

    def _open(self) -> None:
        if self._descriptor is not None and self._is_current_file(self._descriptor):
            return
        self._forget_file()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = open_without_links(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._name_file()
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":  # torn
            os.write(self._descriptor, b"\n")

    def _name_file(self) -> None:
        """Makes the link that shows the file to the launch's monitor."""
        if directory := os.environ.get(environment.MONITOR):
            link = Path(directory, environment.EVENTS_LINK)
            new = link.with_name(f"{link.name}.{os.getpid()}.{threading.get_ident()}")
            with contextlib.suppress(OSError):  # monitoring must not end training
                os.symlink(self._path.absolute(), new)
                os.replace(new, link)

    def _is_current_file(self, descriptor: int) -> bool:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        return False

    def _forget_file(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor, self._written = None, 0

    def _close(self) -> None:
        self._drain(last=True)
        self._forget_file()

    def _report(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._say(text)


def _finite(value):
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Any) -> Any:
    """Returns a value that JSON lacks as one that it has: a scalar of NumPy or torch as a number, others as text."""
    try:
        return _finite(float(value))
    except (TypeError, ValueError, RuntimeError):
        return str(value)


@dataclass(frozen=True)
class EventType:
    """Type of event.

    Attributes:
        when: when the event is written.
        fields: meaning of each mandatory field, by name.
        optional: meaning of each optional field, by name.
        open: further fields under their own names, such as a policy's gauges; empty if there are none.
    """

    when: str
    fields: Mapping[str, str]
    optional: Mapping[str, str] = field(default_factory=dict)
    open: str = ""


EVERY = {"type": "name of the type", "time": "Unix seconds"}
"""Fields of every event."""

_LOSS = "generation, cause, reason, and rank, node and signal if known"
_WRITER = {"job": "id of the launch", "term": "controller epoch and generation"}

EVENTS = {
    "start": EventType(
        "Training begins, resumes, or continues after a lost worker.",
        {
            "iteration": "iterations completed",
            "run": "name of the run in --ckpt-dir; null without snapshots",
            **_WRITER,
            "world_size": "workers",
            "parameters": "of rank 0's part of the model",
            "startup_s": "seconds of each phase of rank 0's set-up, by name; load begins with the first collective",
        },
        {
            "schema": "version of the schema of events, which increases when a field changes its meaning",
            "exact": "whether recovery restores the same bits; null without snapshots",
        },
    ),
    "iteration": EventType(
        "An iteration is committed.",
        {
            "iteration": "iterations completed",
            "consumed_samples": "samples that the run has consumed",
            "loss": "mean of the iteration, as Megatron-LM averages it",
            "learning_rate": "of the update",
            "grad_norm": "L2 norm of all gradients before clipping",
            "loss_scale": "of fp16; 1 otherwise",
            "skipped": "whether the update was skipped, since the norm is not finite",
            "tokens": "of the iteration",
            "elapsed_s": "seconds since the previous iteration, without evaluations and saves",
        },
        {
            "mfu": "model FLOPs utilization: FLOPs of the model, by the peak of all devices; absent on a CPU",
            "plt": "proportion of the experts' tokens that recoveries have lost so far",
            "k_snapshot": "experts of each layer in a snapshot in memory",
            "selective_experts": "experts of each layer in a snapshot, in the mean over layers",
            "selective_gradients": "of these, experts that are saved as gradients instead of their state",
            "selective_copies": "with peers: of these, experts that are copied to other nodes",
            "mlt": "momentary lost tokens: iterations of tokens that a fault right after the newest snapshot loses",
            "mlt_peers": "the same if a node is lost with its memory, and its experts are loaded from copies",
            "mlt_storage": "the same if all memory is lost; repeated iterations do not count",
            "storage_age": "iterations that would be repeated if all memory were lost, where snapshots go to storage",
            "storage_overdue": "operators whose newest state in storage is older than interval and policy promise",
            "tokens_owed": "lost tokens that experts still have to compensate by more capacity",
            "k_persist": "experts of each layer in a snapshot in storage",
            "snapshot_interval": "iterations from one snapshot to the next, as the tuner has chosen it",
            "sparse_window": "iterations of a window",
            "gradient_window": "iterations of a cycle that saves each operator in full once",
            "bubble_s": "seconds that a worker waited for other pipeline stages in the previous iteration, mean",
            "bubble_share": "share of the newest copied snapshot's bytes that was copied in the pipeline's bubbles",
            "hhi": "Herfindahl-Hirschman index of the tokens of experts, mean over layers",
            "skewness": "hhi, scaled to 0 (all experts are equally busy) to 1 (one has all tokens)",
            "max_violation": "largest load of an expert divided by the mean load of its layer, minus 1: highest layer, "
            "over the iterations since the last report; every --log-interval",
            "max_violation_by_layer": "the same of each layer with experts, by its number",
            "dropped_share": "of routed tokens that no expert received because of its capacity: mean over layers",
            "dropped_share_by_layer": "the same of each layer with experts, by its number",
            "upstream_log_bytes": "in upstream logs, over all workers",
            "upstream_log_iterations": "in upstream logs, mean over workers",
            "saves_failed": "snapshots that could not be written to storage so far, once there is one",
            "saves_skipped": "snapshots not written because an earlier one was being written, once there is one",
        },
        "the router's auxiliary losses under megatron-core's names, and gauges of other policies",
    ),
    "evaluation": EventType(
        "A split was evaluated.",
        {
            "iteration": "iterations completed",
            "split": "valid or test",
            "loss": "mean over its tokens",
            "perplexity": "exp(loss), with the loss capped at 20",
        },
    ),
    "save": EventType(
        "A dense checkpoint (--save) was written or begun.",
        {"iteration": "of the checkpoint", "elapsed_s": "seconds that training waited"},
    ),
    "snapshot": EventType(
        "A snapshot is complete on every rank: in memory, or with the disk tier in buffers.",
        {
            "iteration": "of the snapshot",
            "tier": "disk, memory or peers",
            "bytes": "over all ranks",
            "copy_s": "device to host, mean over ranks",
            "hash_s": "hashing and sealing, mean over ranks",
        },
        {"bubble_bytes": "of the bytes, those copied in the pipeline's bubbles, if any"},
    ),
    "stall": EventType(
        "Training waited for snapshots.",
        {
            "iteration": "of the newest snapshot that was begun",
            "cause": "snapshot",
            "seconds": "to begin a snapshot, for a buffer or for a copy; with --ckpt-blocking for all of it; mean",
        },
    ),
    "persist": EventType(
        "A snapshot is published in storage.",
        {
            "iteration": "of the snapshot",
            "bytes": "over all ranks",
            "write_s": "writing and fsync, mean over ranks",
            "publish_s": "manifest and garbage collection",
        },
    ),
    "replicate": EventType(
        "Every copy of a snapshot is on its replica node.",
        {"iteration": "of the snapshot", "bytes": "sent between all nodes", "replicate_s": "mean over nodes"},
        {"not_sent_bytes": "additional bytes of copies, not sent because their nodes have identical data"},
    ),
    "not_alike": EventType(
        "A node lacks data that it should share with another node, or its own snapshot of it is damaged; it was sent.",
        {"iteration": "of the snapshot", "reason": "one sentence"},
    ),
    "save_failed": EventType(
        "A snapshot or a dense checkpoint could not be written to storage; training continues.",
        {
            "what": "snapshot, or checkpoint of --save",
            "iteration": "of the snapshot or checkpoint",
            "reason": "one sentence",
            "failures": "so far: of a checkpoint in a row, of snapshots altogether",
            "lasted_s": "since the first failure in a row",
            "newest": "iteration of the newest one in storage; null if there is none",
        },
        {"age_s": "of that one; null if there is none"},
    ),
    "save_retried": EventType(
        "Writes of a snapshot to storage failed, and succeeded when they were repeated. Only snapshots of windows are "
        "written again, since one that is missing discards its window.",
        {"iteration": "of the snapshot", "writes": "number of repetitions, over all ranks"},
    ),
    "save_skipped": EventType(
        "A snapshot due in storage was not written, because an earlier one is still being written.",
        {
            "iteration": "iterations completed",
            "under_way": "iteration of the one being written",
            "newest": "iteration of the newest one in storage; null if there is none",
            "age_s": "of that one; null if there is none",
            "where": "the directory or URL",
        },
    ),
    "fold": EventType(
        "Saved gradients were applied in the background, or the result was compared with the state (selective).",
        {
            "iteration": "iterations completed",
            "folded": "experts whose base in memory is newer now, copies on other nodes included",
            "gradients": "that are in these bases, and in memory no longer",
            "equal": "experts whose saved state equals the result of their gradients, bit by bit",
            "differing": "experts whose saved state differs: gradients are no longer applied in the background",
            "seconds": "of the background processes of all nodes",
        },
    ),
    "abandoned": EventType(
        "A worker lacked memory for a snapshot. The previous snapshot is kept, and training continues.",
        {"iteration": "of the snapshot", "reason": "as reported by the worker"},
    ),
    "copy_missing": EventType(
        "A node lacked memory for its copy of another node's snapshot, which has one copy less.",
        {"iteration": "of the snapshot", "reason": "as reported by the node"},
    ),
    "memory": EventType(
        "Host memory for snapshots is allocated, at the start; of the node that needs most.",
        {
            "own": "bytes of the buffers of its workers",
            "copies": "bytes for copies of other nodes' snapshots",
            "experts": "bytes for experts that are carried out of older snapshots, copies included",
            "small": "bytes for manifests and reports",
            "logs": "bytes of upstream logs",
        },
    ),
    "memory_short": EventType(
        "After a change of members or a restart of workers, a node has too little memory for all snapshots. Training "
        "continues.",
        {"iteration": "iterations completed", "reason": "as reported by the node"},
    ),
    "window_limited": EventType(
        "A window of auto length does not fit into memory. Windows are shorter until workers restart.",
        {"iteration": "of the first snapshot of the window", "wanted": "chosen length", "length": "length that fits"},
    ),
    "placement": EventType(
        "Replica nodes are assigned, at the start with --ckpt-tier peers.",
        {
            "replicas": "copies of each node's snapshots",
            "groups": "nodes that hold each other's copies",
            "survival": "by number of nodes lost together, the probability that a copy of everything is left",
            "not_sent_bytes": "bytes of a full snapshot's copies, not sent because their nodes have identical data",
        },
    ),
    "restore": EventType(
        "A replaced node received its part of a snapshot from a replica node.",
        {"of": "the node that lost it", "held_by": "the node that sent it", "iteration": "of the snapshot"},
    ),
    "resume": EventType(
        "State is loaded, at a start or after a lost worker.",
        {
            "iteration": "iterations completed",
            "tier": "memory, storage, or live where it was copied from surviving replicas",
            "bytes": "loaded, over all ranks",
            "seconds": "to verify and load",
            "sources": "iteration and tier of each snapshot that was read",
            "kept": "workers that kept their state",
            "stages": "pipeline stages that replayed without the others",
            "went_on": "by stage, the iteration after which it continued an interrupted replay",
            "folded": "operators brought up to date by the gradients that memory had",
            "stale": "experts whose state is of another iteration, older or newer",
            "verified": "operators whose digests equal the digests of the original iteration",
            "unverified": "operators without a known digest",
            "replayed": "unverified operators whose digests were equal at an earlier iteration of the replay",
            "wrong": "operators with another digest, after a replay that is not deterministic",
        },
    ),
    "replay": EventType(
        "An iteration was replayed.",
        {
            "iteration": "that was replayed",
            "seconds": "of the replay",
            "frozen": "operators that were frozen",
            "workers": "that computed",
            "stages": "pipeline stages that computed",
            "loss": "of the replay; null where the last stage did not compute",
            "exact": "whether loss and learning rate equal the record; null where there is no loss to compare",
            "cut_off": "whether another loss, or a damaged snapshot, ended this recovery",
        },
    ),
    "lost": EventType(
        "A recovery has restored experts from older snapshots (pec, selective).",
        {
            "iteration": "where training resumes",
            "plt": "proportion of the experts' tokens lost so far",
            "raised_by": "by this recovery",
            "of_training": "the same, as a proportion of the tokens of the complete training",
            "by_layer": "plt of each layer",
        },
    ),
    "boost": EventType(
        "Experts begin or cease to make up lost tokens by more capacity; begin again after a restart.",
        {
            "iteration": "iterations completed",
            "boosted": "whether they have more capacity from now on",
            "tokens": "lost tokens that experts are to make up",
            "made_up": "of these so far: tokens that they processed beyond their capacity",
            "left": "iterations left for it",
        },
    ),
    "expected": EventType(
        "Before training with pec: the expected cost of a fault.",
        {
            "plt": "proportion of the training's tokens, where memory survives",
            "oldest": "age of the oldest expert, in iterations",
        },
        {
            "plt_storage": "plt, where only --ckpt-dir survives",
            "oldest_storage": "oldest, where only --ckpt-dir survives",
        },
    ),
    "at_risk": EventType(
        "The next fault would lose too many tokens (selective); once in each start of a worker.",
        {
            "iteration": "of the newest snapshot",
            "plt": "proportion of the tokens of the complete training that would be lost then",
            "lost": "part of it that faults have lost already",
            "mlt": "momentary lost tokens, in iterations, mean over layers",
            "mlt_sum": "the sum over layers (MoEtion, eq. 6)",
        },
    ),
    "choice": EventType(
        "A tuner or --ckpt-policy auto has chosen something new.",
        {"iteration": "iterations completed", "reason": "one sentence"},
        {
            "cause": "auto: why it looked",
            "mtbf_s": "auto: expected seconds between failures",
            "ettr": "auto: expected ETTR of the best candidate and of the runner-ups",
        },
        "the choices: each flag or gauge under its own name",
    ),
    "rebalance": EventType(
        "With --elastic, replicas of experts have moved to where the load asks for them.",
        {
            "iteration": "iterations completed",
            "experts": "copies of experts that were made, over all layers and workers",
            "bytes": "that travelled",
            "elapsed_s": "seconds that it took",
            "busiest": "experts' tokens of the busiest worker by the mean, with the load since the last look, before",
            "busiest_after": "the same with the new plan",
            "saves_s": "seconds of an iteration that it is expected to save",
        },
    ),
    "migration": EventType(
        "With --elastic, nodes were lost or have joined, and experts have moved to their new workers.",
        {
            "iteration": "iterations completed",
            "nodes": "that train now",
            "experts": "copies of experts that were made, over all layers and workers",
            "bytes": "that travelled",
            "elapsed_s": "seconds that it took",
        },
    ),
    "expert_replicas": EventType(
        "With --elastic, replicas of the experts at the start and after each change of members.",
        {
            "iteration": "iterations completed",
            "least": "replicas of the expert with the fewest",
            "fewer": "experts with fewer replicas than wanted",
            "experts": "number of experts, over all layers",
            "wanted": "replicas of each expert by --elastic-min-replicas",
        },
    ),
    "fallback": EventType(
        "With --elastic, so many nodes were lost that the state of the others does not suffice: a checkpoint is read.",
        {"reason": "what is lost", "experts": "number of lost experts; 0 if other state is lost"},
    ),
    "storage_silent": EventType(
        "Storage has not answered for some seconds.",
        {"where": "the storage", "waits": "whether training waits for it; otherwise no snapshot goes there"},
    ),
    "storage_awaited": EventType(
        "Remaining workers lacked state after a loss: the recovery has listed storage, and waited until it answered.",
        {"where": "the storage", "seconds": "until it was listed"},
    ),
    "generation": EventType(
        "Every worker is connected again after one was lost.",
        {
            "generation": "its number",
            "cause": "type of the loss, such as worker-lost; the error code if an error ended the worker (errors.md)",
            "reason": "which worker or node was lost, and how",
            "noticed_s": "from the news to when rank 0 had left the collective it waited in",
            "met_s": "from then until all workers were present and connected",
            **_WRITER,
        },
        {
            "lost_after": "newest iteration that was completed before the loss, if it is known",
            "lost_devices": "node and device of the workers lost without progress, one for each generation",
            "rank": "of the lost worker, if one worker caused it",
            "node": "that was lost, or of the lost worker",
            "signal": "number of the signal that killed the worker",
            "earlier": f"losses before it that no event describes, since others followed at once: {_LOSS}",
        },
    ),
    "inject": EventType(
        "--inject is about to act on a worker.",
        {
            "action": "kill, stop, slow or error",
            "rank": "of the worker",
            "iteration": "the newest that the worker has begun; at replaying, the one that it replays",
            "point": "name of the point",
        },
    ),
    "log_failed": EventType(
        "A log that could not be written can be written again, or its values are lost at the end.",
        {
            "what": "events, tensorboard, wandb or mlflow",
            "lasted_s": "for how long it could not",
            "lost": "lines or values that are lost",
        },
        {"tries": "failed attempts"},
    ),
    "end": EventType(
        "A loss has ended the job; written by the launcher on the node of the first worker.",
        {"reason": "which worker or node was lost, and how", "code": "exit code of the job"},
        {"earlier": f"losses that no event describes, with the one that has ended the job: {_LOSS}"},
    ),
    "exit": EventType(
        "The job ends in good order.",
        {"iteration": "iterations completed", "reason": "done, limit or signal", "code": "exit code"},
    ),
}
"""Event types by ``type``, in the order of a run."""


def problems(event: Mapping[str, object]) -> list[str]:
    """Returns deviations of an event from the schema: an unknown type, unknown fields, and missing mandatory fields."""
    event_type = EVENTS.get(name := str(event.get("type")))
    if event_type is None:
        return [f"no type {name}"]
    known_fields = {*EVERY, *event_type.fields, *event_type.optional}
    extra = [field for field in event if field not in known_fields and not event_type.open]
    return extra + [f"no {field}" for field in event_type.fields if field not in event]
