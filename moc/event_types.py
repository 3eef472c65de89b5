"""The schema of ``events.jsonl``: the event types and the meaning of their fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class EventType:
    """One event type.

    Attributes:
        name: the value of ``type``.
        when: when the event is written.
        fields: meaning of each mandatory field, by name.
        optional: meaning of each optional field, by name.
        open: further fields under their own names, such as a policy's gauges; empty if there are none.
    """

    name: str
    when: str
    fields: Mapping[str, str]
    optional: Mapping[str, str] = field(default_factory=dict)
    open: str = ""

    def unknown(self, event: Mapping[str, object]) -> list[str]:
        """Fields of an event that the type lacks, and mandatory fields that the event lacks."""
        known = {*EVERY, *self.fields, *self.optional}
        return [
            *(name for name in event if name not in known and not self.open),
            *(f"no {name}" for name in self.fields if name not in event),
        ]


EVERY = {"type": "name of the type", "time": "Unix seconds"}
"""Fields of every event."""

_WRITER = {
    "job": "id of the launch",
    "term": "controller epoch and generation",
}

EVENTS: Mapping[str, EventType] = {
    one.name: one
    for one in (
        EventType(
            "start",
            "Training begins, resumes, or continues after a lost worker.",
            {
                "iteration": "iterations completed",
                "run": "name of the run in --ckpt-dir; null without snapshots",
                **_WRITER,
                "world_size": "workers",
                "parameters": "of rank 0's part of the model",
                "startup_s": "seconds of each phase of rank 0's set-up, by name; load begins with the first collective",
            },
        ),
        EventType(
            "iteration",
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
                "plt": "proportion of the experts' tokens that recoveries have lost so far",
                "k_snapshot": "experts of each layer in a snapshot in memory",
                "k_persist": "experts of each layer in a snapshot in storage",
                "snapshot_interval": "iterations from one snapshot to the next, as the tuner has chosen it",
                "sparse_window": "iterations of a window",
                "hhi": "Herfindahl-Hirschman index of the tokens of experts, mean over layers",
                "skewness": "hhi, scaled to 0 (all experts are equally busy) to 1 (one has all tokens)",
                "upstream_log_bytes": "in upstream logs, over all workers",
                "upstream_log_iterations": "in upstream logs, mean over workers",
                "saves_failed": "snapshots that could not be written to storage so far, once there is one",
                "saves_skipped": "snapshots not written because an earlier one was being written, once there is one",
            },
            "the router's auxiliary losses under megatron-core's names, and gauges of other policies",
        ),
        EventType(
            "evaluation",
            "A split was evaluated.",
            {
                "iteration": "iterations completed",
                "split": "valid or test",
                "loss": "mean over its tokens",
                "perplexity": "exp(loss), with the loss capped at 20",
            },
        ),
        EventType(
            "save",
            "A dense checkpoint (--save) was written or begun.",
            {"iteration": "of the checkpoint", "elapsed_s": "seconds for which training stood still"},
        ),
        EventType(
            "snapshot",
            "A snapshot is complete on every rank: in memory, or with the disk tier in buffers.",
            {
                "iteration": "of the snapshot",
                "tier": "disk, memory or peers",
                "bytes": "over all ranks",
                "copy_s": "device to host, mean over ranks",
                "hash_s": "hashing and sealing, mean over ranks",
            },
        ),
        EventType(
            "stall",
            "Training waited for snapshots.",
            {
                "iteration": "of the newest snapshot that was begun",
                "cause": "snapshot",
                "seconds": "to begin a snapshot, for a buffer or for a copy; with --ckpt-blocking for all of it; mean",
            },
        ),
        EventType(
            "persist",
            "A snapshot is published in storage.",
            {
                "iteration": "of the snapshot",
                "bytes": "over all ranks",
                "write_s": "writing and fsync, mean over ranks",
                "publish_s": "manifest and garbage collection",
            },
        ),
        EventType(
            "replicate",
            "Every copy of a snapshot is on its replica node.",
            {
                "iteration": "of the snapshot",
                "bytes": "sent between all nodes",
                "replicate_s": "mean over nodes",
            },
        ),
        EventType(
            "save_failed",
            "A snapshot or a dense checkpoint could not be written to storage; training continues.",
            {
                "what": "snapshot, or checkpoint of --save",
                "iteration": "of what was to be written",
                "reason": "one sentence",
                "failures": "so far: of a checkpoint in a row, of snapshots altogether",
                "lasted_s": "since the first failure in a row",
                "newest": "iteration of the newest one in storage; null if there is none",
            },
            {"age_s": "of that one; null if there is none"},
        ),
        EventType(
            "save_skipped",
            "A snapshot due in storage was not written, because an earlier one is still being written.",
            {
                "iteration": "iterations completed",
                "under_way": "iteration of the one being written",
                "newest": "iteration of the newest one in storage; null if there is none",
                "age_s": "of that one; null if there is none",
                "where": "the directory or URL",
            },
        ),
        EventType(
            "placement",
            "Replica nodes are assigned, at the start with --ckpt-tier peers.",
            {
                "replicas": "copies of each node's snapshots",
                "groups": "nodes that hold each other's copies",
                "survival": "by number of nodes lost at once, the probability that a copy of everything is left",
            },
        ),
        EventType(
            "restore",
            "A replaced node received its part of a snapshot from a replica node.",
            {
                "of": "the node that had lost it",
                "held_by": "the node that sent it",
                "iteration": "of the snapshot",
            },
        ),
        EventType(
            "resume",
            "State is loaded, at a start or after a lost worker.",
            {
                "iteration": "iterations completed",
                "tier": "memory, storage, or live where it was copied from surviving replicas",
                "bytes": "loaded, over all ranks",
                "seconds": "to verify and load",
                "sources": "iteration and tier of each snapshot that was read",
                "kept": "workers that kept their state",
                "stages": "pipeline stages that replayed alone",
                "went_on": "by stage, the iteration from which it continued an interrupted replay",
            },
        ),
        EventType(
            "replay",
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
        EventType(
            "lost",
            "A recovery has restored experts from older snapshots (pec).",
            {
                "iteration": "from which training resumes",
                "plt": "proportion of the experts' tokens lost so far",
                "raised_by": "by this recovery",
                "of_training": "the same, as a proportion of the whole training's tokens",
                "by_layer": "plt of each layer",
            },
        ),
        EventType(
            "expected",
            "Before training with pec: what a fault is expected to cost.",
            {
                "plt": "proportion of the training's tokens, where memory survives",
                "oldest": "iterations by which the oldest expert is behind",
            },
            {
                "plt_storage": "plt, where only --ckpt-dir survives",
                "oldest_storage": "oldest, where only --ckpt-dir survives",
            },
        ),
        EventType(
            "choice",
            "A tuner or --ckpt-policy auto has chosen something new.",
            {"iteration": "iterations completed", "reason": "one sentence"},
            {
                "cause": "auto: why it looked",
                "mtbf_s": "auto: expected seconds between failures",
                "ettr": "auto: expected ETTR of the best candidate and of the runner-ups",
            },
            "what was chosen: each flag or gauge under its own name",
        ),
        EventType(
            "generation",
            "Every worker is connected again after one was lost.",
            {
                "generation": "its number",
                "reason": "which worker or node was lost, and how",
                "noticed_s": "from the news to when rank 0 had left the collective it waited in",
                "met_s": "from then until all workers were present and connected",
                **_WRITER,
            },
        ),
        EventType(
            "inject",
            "--inject is about to act on a worker.",
            {
                "action": "kill, stop, slow or error",
                "rank": "of the worker",
                "iteration": "the newest that the worker has begun; at replaying, the one that it replays",
                "point": "name of the point",
            },
        ),
        EventType(
            "log_failed",
            "A log that could not be written can be written again.",
            {
                "what": "events or tensorboard",
                "lasted_s": "for how long it could not",
                "lost": "lines or values that are lost",
            },
            {"tries": "failed attempts"},
        ),
        EventType(
            "exit",
            "The job ends in good order.",
            {
                "iteration": "iterations completed",
                "reason": "done, limit or signal",
                "code": "exit code",
            },
        ),
    )
}
"""Event types by name, in the order in which a run emits them."""


def problems(event: Mapping[str, object]) -> list[str]:
    """Deviations of an event from the schema; empty if it conforms."""
    name = str(event.get("type"))
    return EVENTS[name].unknown(event) if name in EVENTS else [f"no type {name}"]
