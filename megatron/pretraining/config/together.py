"""Checks combinations of flags of several groups."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from importlib.util import find_spec

from megatron.pretraining.config.flag import Problems
from megatron.pretraining.config.groups import Config
from megatron.pretraining.config.snapshot import refuse_by
from moc.policy import AUTO, POLICIES, JobShape


def check_own_flags(config: Config) -> None:
    """Raises ``ConfigError`` if flags of snapshots or faults contradict others, with all such problems."""
    _run(config, *_OF_OWN_FLAGS)


def _run(config: Config, *checks: Callable[[Config, Problems], None]) -> None:
    problems = Problems()
    for check in checks:
        problems.check(check, config, problems)
    problems.raise_found()


def _check_faults(config: Config, problems: Problems) -> None:
    problems.refuse(
        config.faults.is_enabled and not config.logging.log_dir,
        "--inject and --inject-mtbf-iterations need --log-dir, which records the injected faults. Fix: add it",
        code="flag-needs-another",
    )


def _check_writers(config: Config, problems: Problems) -> None:
    problems.refuse(
        config.logging.mlflow_experiment and find_spec("mlflow") is None,
        "--mlflow-experiment needs the package mlflow, which is missing. Fix: pip install mlflow-skinny",
        code="package-missing",
    )


def _check_monitor(config: Config, problems: Problems) -> None:
    logging = config.logging
    ports = logging.metrics_port, logging.dashboard_port
    problems.refuse(
        ports != (None, None) and not logging.log_dir,
        "--metrics-port and --dashboard-port of the program need --log-dir, whose events they show. Fix: add it",
        code="flag-needs-another",
    )


def _check_failure_rate(config: Config, problems: Problems) -> None:
    problems.refuse(
        config.snapshot.mtbf_hours is not None and not (config.elastic.elastic or config.snapshot.is_chosen),
        "--mtbf-hours needs --elastic, --pec-k auto or --ckpt-policy auto, which reckon with it. Fix: add one of them, "
        "or drop --mtbf-hours",
        code="flag-needs-another",
    )


def _check_determinism(config: Config, problems: Problems) -> None:
    problems.refuse(
        config.training.deterministic_mode and config.training.allow_nondeterministic,
        "--deterministic-mode and --allow-nondeterministic contradict each other. Fix: drop one of them",
        code="flags-exclude-each-other",
    )


def job_shape(config: Config) -> JobShape:
    """Returns the job as described by flags; the layers' stages and pipeline bubbles are not yet known."""
    return JobShape(
        ep=config.parallel.expert_model_parallel_size,
        optimizer=config.regularization.optimizer,
        has_separate_experts=not (config.moe.moe_single_grouped_weight or config.moe.moe_single_grouped_bias),
        pp=config.parallel.pipeline_model_parallel_size,
        num_experts=config.moe.num_experts or 0,
        drops_tokens=config.moe.drops_tokens,
        is_elastic=config.elastic.elastic,
        offloads_optimizer=config.regularization.optimizer_cpu_offload,
    )


def may_save_gradients(config: Config) -> bool:
    """Returns whether some policy may save gradients in place of state in this job."""
    return any(kind.flags.may_save_gradients(config.snapshot, job_shape(config)) for kind in POLICIES.values())


def _check_directories(config: Config, problems: Problems) -> None:
    snapshot, save = config.snapshot, config.checkpoint.save
    problems.refuse(
        snapshot.ckpt_dir and save and os.path.realpath(snapshot.ckpt_dir) == os.path.realpath(save),
        "--ckpt-dir and --save name one directory, where their checkpoints have the same names. Fix: drop --ckpt-dir, "
        "or name another directory",
        code="flags-exclude-each-other",
    )
    problems.refuse(
        config.checkpoint.ckpt_step is not None and not config.checkpoint.load and not snapshot.ckpt_policy,
        "--ckpt-step needs --load or --ckpt-policy. Fix: add one of them",
        code="flag-needs-another",
    )
    problems.refuse(
        snapshot.ckpt_policy and not (snapshot.ckpt_dir or save),
        "--ckpt-policy needs a directory for snapshots. Fix: add --ckpt-dir or --save",
        code="snapshot-directory-missing",
    )


def _check_upstream_logging(config: Config, problems: Problems) -> None:
    kind = POLICIES.get(config.snapshot.ckpt_policy or "")
    if not config.snapshot.upstream_logging or kind is None or not kind.can_replay:
        return
    problems.refuse(
        config.parallel.pipeline_model_parallel_size == 1,
        "--upstream-logging needs --pipeline-model-parallel-size greater than 1. Fix: raise it, or drop "
        "--upstream-logging",
        code="upstream-logging-unsupported",
    )
    # a tied embedding's gradient is a sum over two stages; a stage that replays without others has only its part
    problems.refuse(
        not config.network.untie_embeddings_and_output_weights,
        "--upstream-logging replays one pipeline stage, and embeddings that are tied across stages do not allow that. "
        "Fix: add --untie-embeddings-and-output-weights, or drop --upstream-logging",
        code="upstream-logging-unsupported",
    )


def _check_policies(config: Config, problems: Problems) -> None:
    snapshot, job = config.snapshot, job_shape(config)
    kinds = (kind for name, kind in POLICIES.items() if snapshot.ckpt_policy in (name, AUTO))
    misfits = [
        (kind, misfit) for kind in kinds for misfit in itertools.islice(kind.flags.unmet_requirements(snapshot, job), 1)
    ]
    for kind, misfit in misfits:
        refuse_by(kind, misfit, problems)
    problems.refuse(  # unless the policy that needs memory does not fit itself
        not misfits and config.elastic.elastic and snapshot.ckpt_policy and snapshot.ckpt_tier != "disk",
        f"--elastic keeps replicas of experts in the workers themselves. Fix: choose --ckpt-tier disk, not "
        f"{snapshot.ckpt_tier}, or drop --elastic",
        code="elastic-excludes-flag",
    )


def _check_intervals(config: Config, problems: Problems) -> None:
    snapshot = config.snapshot
    interval = int(snapshot.snapshot_interval) if snapshot.snapshot_interval.isdecimal() else None
    problems.refuse_remainder("persist_interval", snapshot.persist_interval, "snapshot_interval", interval)


_OF_OWN_FLAGS = (
    _check_directories,
    _check_upstream_logging,
    _check_policies,
    _check_intervals,
    _check_faults,
    _check_determinism,
    _check_writers,
    _check_monitor,
    _check_failure_rate,
)
