"""Exports the state of a run and of a job as Prometheus metrics, exactly as the events have them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from moc.files.decode import escape_controls
from moc.monitor.job_view import JobView
from moc.monitor.problems import HOUR_S
from moc.monitor.process import node_memory
from moc.report.run_state import RunState
from moc.report.wall_clock import PHASES

_OF_ITERATION = {
    "loss": ("moc_loss_nats_per_token", "Loss of the newest iteration."),
    "learning_rate": ("moc_learning_rate", "Learning rate of the newest iteration."),
    "grad_norm": ("moc_gradient_norm", "L2 norm of all gradients before clipping."),
    "loss_scale": ("moc_loss_scale", "Loss scale of fp16."),
    "elapsed_s": ("moc_iteration_seconds", "Seconds of the newest iteration."),
    "mfu": ("moc_mfu_ratio", "Model FLOPs utilization of the newest iteration; absent on a CPU."),
    "plt": ("moc_tokens_lost_ratio", "Share of the experts' tokens that recoveries have lost."),
    "tokens_owed": ("moc_tokens_owed", "Lost tokens that experts still have to compensate."),
    "mlt": ("moc_tokens_at_risk_iterations", "Iterations of tokens that the loss of a worker would lose."),
    "mlt_peers": ("moc_tokens_at_risk_node_iterations", "The same if a node is lost with its memory."),
    "mlt_storage": ("moc_tokens_at_risk_memory_iterations", "The same if all memory is lost."),
    "storage_age": ("moc_storage_age_iterations", "Iterations repeated if all memory were lost."),
    "storage_overdue": ("moc_storage_overdue_operators", "Operators whose state in storage is older than promised."),
    "max_violation": ("moc_expert_load_violation", "Largest load of an expert by the mean of its layer, minus 1."),
    "dropped_share": ("moc_dropped_tokens_ratio", "Share of routed tokens that no expert received."),
    "skewness": ("moc_expert_skewness", "0 if experts are equally busy, 1 if one has all tokens."),
    "upstream_log_bytes": ("moc_upstream_log_bytes", "Bytes in upstream logs, over all workers."),
}
"""By field of the newest event ``iteration``, name and meaning of its metric."""

_OPERATIONS = {
    "copy": ("snapshot", "bytes", "copy_s"),
    "hash": ("snapshot", "bytes", "hash_s"),
    "replicate": ("replicate", "bytes", "replicate_s"),
    "write": ("persist", "bytes", "write_s"),
    "publish": ("persist", "bytes", "publish_s"),
    "load": ("resume", "bytes", "seconds"),
}
"""By operation on snapshots, the type of its event, and the fields with its bytes and its seconds."""


def render_metrics(state: RunState, job: JobView, now: float, hook: Mapping[str, int]) -> bytes:
    """Returns all metrics in the text format of Prometheus.

    Args:
        state: state of the run; without events, only the metrics of the node are exported.
        job: state of the job at this node.
        now: Unix seconds.
        hook: number of commands of ``--on-event``, by result.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(lambda: _metrics(state, job, now, hook)))  # pyright: ignore[reportArgumentType]
    return generate_latest(registry)


class _Collected:
    def __init__(self, collect: Callable[[], Iterable[Metric]]):
        self.collect = collect


def _metrics(state: RunState, job: JobView, now: float, hook: Mapping[str, int]) -> Iterator[Metric]:
    if state.time:
        yield from _training(state, now)
        yield from _losses(state, now)
        yield from _snapshots(state, now)
    yield from _job(job)
    yield _counter("moc_hook_commands", "Commands of --on-event, by result.", "result", hook)


def _training(state: RunState, now: float) -> Iterator[Metric]:
    newest = state.newest.get("iteration", {})
    for name, (metric, text) in _OF_ITERATION.items():
        if newest.get(name) is not None:
            yield _gauge(metric, text, newest[name])
    yield _gauge("moc_iteration", "Iterations completed, without discarded ones.", state.last_iteration)
    yield _counter("moc_iterations_computed", "Iterations computed, with discarded ones.", state.computed)
    yield _gauge("moc_tokens", "Tokens of the iterations that count.", state.tokens)
    if newest.get("elapsed_s") and newest["tokens"]:
        yield _gauge("moc_tokens_per_second", "Of the newest iteration.", newest["tokens"] / newest["elapsed_s"])
    yield _gauge("moc_undisturbed_iteration_seconds", "Median of undisturbed iterations.", state.iteration_s)
    yield _gauge("moc_training_workers", "Workers of the newest start.", state.workers)
    yield _gauge("moc_recovering", "1 while a loss is not recovered.", float(state.is_recovering))
    yield _gauge("moc_ended", "1 after the end of the job.", float(state.ended is not None))
    yield _gauge("moc_event_age_seconds", "Seconds since the newest event.", max(0.0, now - state.time))
    counts = {kind: totals.count for kind, totals in state.totals.items()}
    yield _counter("moc_events", "Events, by type.", "type", counts)
    losses = {split: loss for split, loss in state.validation.items() if loss is not None}
    yield _gauge("moc_evaluation_loss_nats_per_token", "Newest loss of a split.", "split", losses)


def _losses(state: RunState, now: float) -> Iterator[Metric]:
    yield _gauge("moc_ettr_ratio", "Share of useful work in the wall clock so far.", state.ettr)
    parts = {part.removesuffix("_s"): seconds for part, seconds in vars(state.spent).items()}
    yield _gauge("moc_wall_clock_seconds", "Uses of the wall clock; they add up to it.", "part", parts)
    yield _counter("moc_recoveries", "Finished recoveries.", len(state.recoveries))
    seconds = {phase: sum(recovery.phases.get(phase, 0.0) for recovery in state.recoveries) for phase in PHASES}
    # a gauge: the excess of a first iteration changes with the median of undisturbed iterations
    yield _gauge("moc_recovery_seconds", "Seconds of finished recoveries, by phase.", "phase", seconds)
    repeated = sum(recovery.repeated for recovery in state.recoveries)
    yield _counter("moc_iterations_repeated", "Iterations that recoveries computed again.", repeated)
    recent = Counter(loss.rank for at, loss in state.losses if loss.rank is not None and now - at < HOUR_S)
    yield _gauge("moc_recent_losses", "Losses of a worker within the last hour, by rank.", "rank", recent)
    losses = {cause: count for (kind, cause), count in state.counts.items() if kind == "loss"}
    yield _counter("moc_losses", "Losses and other changes of members, by cause.", "cause", losses)


def _snapshots(state: RunState, now: float) -> Iterator[Metric]:
    newest = state.newest_snapshots
    ages = {tier: max(0.0, now - event["time"]) for tier, event in newest.items()}
    yield _gauge("moc_snapshot_age_seconds", "Seconds since a snapshot was complete in a tier.", "tier", ages)
    numbers = {tier: event["iteration"] for tier, event in newest.items()}
    yield _gauge("moc_snapshot_iteration", "Iteration of the newest snapshot in a tier.", "tier", numbers)
    totals = {name: (state.of_type(kind), size, time) for name, (kind, size, time) in _OPERATIONS.items()}
    counts = {name: events.count for name, (events, _, _) in totals.items()}
    yield _counter("moc_operations", "Operations on snapshots.", "operation", counts)
    sizes = {name: events.sum(size) for name, (events, size, _) in totals.items()}
    yield _counter("moc_operation_bytes", "Bytes of operations, over all workers.", "operation", sizes)
    times = {name: events.sum(time) for name, (events, _, time) in totals.items()}
    yield _counter("moc_operation_seconds", "Seconds, as means over workers.", "operation", times)
    stalled_s = state.of_type("stall").sum("seconds")
    yield _counter("moc_stall_seconds", "Seconds that training waited for snapshots.", stalled_s)
    failed = {destination: count for (kind, destination), count in state.counts.items() if kind == "save_failed"}
    failed |= {"late snapshot": state.of_type("save_skipped").count, "log": state.of_type("log_failed").count}
    failed |= {"copy": state.of_type("copy_missing").count, "abandoned snapshot": state.of_type("abandoned").count}
    yield _counter("moc_failed_writes", "Snapshots, checkpoints, copies and logs not written.", "what", failed)
    lost_values = state.of_type("log_failed").sum("lost")
    yield _counter("moc_log_values_lost", "Lines and values of logs that are lost.", lost_values)
    if (placement := state.newest.get("placement")) is not None:
        yield _gauge("moc_snapshot_replicas", "Copies of each node's snapshots.", placement.get("replicas", 0))
        survival = placement.get("survival", {})
        yield _gauge("moc_survival_ratio", "Probability that a copy is left, by lost nodes.", "nodes", survival)
    if (replicas := state.newest.get("expert_replicas")) is not None:
        yield _gauge("moc_expert_replicas", "Replicas of the expert with the fewest.", replicas["least"])
        yield _gauge("moc_experts_with_fewer_replicas", "Experts with fewer than wanted.", replicas["fewer"])
    if (rebalance := state.newest.get("rebalance")) is not None:
        yield _gauge("moc_imbalance_ratio", "Load of the busiest worker by the mean.", rebalance["busiest_after"])
    if (memory := state.newest.get("memory")) is not None:
        uses = {name: memory[name] for name in ("own", "copies", "experts", "small", "logs")}
        yield _gauge("moc_host_memory_bytes", "Memory for snapshots on the node that needs most.", "use", uses)


def _job(job: JobView) -> Iterator[Metric]:
    for name, amount in node_memory().items():
        yield _gauge(f"moc_node_memory_{name}_bytes", "Host memory of this node.", amount)
    if not job.time:
        return
    states = dict.fromkeys(("working", "waiting", "starting", "joining", "lost"), 0) | job.workers_by_state
    yield _gauge("moc_node_workers", "Workers of this node, by state.", "state", states)
    yield _gauge("moc_node", "Number of this node.", job.node)
    if job.lease_s is not None:
        yield _gauge("moc_lease_seconds", "Until this node's workers need word of a controller.", job.lease_s)
    if job.states is not None:
        nodes = dict.fromkeys(("training", "partial model", "not training", "lost"), 0) | job.nodes_by_state
        yield _gauge("moc_nodes", "Nodes of the job, by state.", "state", nodes)
        yield _gauge("moc_generation", "Number of the current generation.", job.generation)
        yield _gauge("moc_controller_epoch", "Epoch of the controller.", job.epoch)
        yield _gauge("moc_controller_node", "Number of the leading candidate.", job.leader)
        yield _gauge("moc_restarts", "Workers lost by signals, and replaced.", job.restarts)


def _gauge(name: str, text: str, *value: Any) -> Metric:
    return _metric_family(GaugeMetricFamily, name, text, *value)


def _counter(name: str, text: str, *value: Any) -> Metric:
    return _metric_family(CounterMetricFamily, name, text, *value)


def _metric_family(family: type, name: str, text: str, *value: Any) -> Metric:
    if len(value) == 1:
        return family(name, text, value=value[0])
    label, values = value
    metric = family(name, text, labels=[label])
    for key, number in values.items():
        metric.add_metric([escape_controls(key)], number)
    return metric
