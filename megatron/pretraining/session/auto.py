"""The choices of ``--ckpt-policy auto`` that the other flags allow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.pretraining.config import Config
from megatron.pretraining.config.flag import flags_of, refuse
from megatron.pretraining.config.snapshot import SnapshotFlags
from megatron.pretraining.session.settings import settings_of
from moc.policy import AUTO, owners
from moc.session.auto import AutoLimits, AutoPolicy
from moc.session.engine import Engine, Listener
from moc.session.settings import Settings

_OWN_FLAGS = ("exact_only", "host_memory_gb", "mtbf_hours")


@dataclass(frozen=True)
class FlaggedChoices:
    """The flags as given, as :class:`moc.session.auto.Choices`."""

    config: Config

    def check(self, flags: Mapping[str, object]) -> None:
        """Raises ConfigError if chosen flags contradict the given ones."""
        in_force(self.config, flags)

    def settings(self, flags: Mapping[str, object], engine: Engine) -> Settings:
        """The session's settings with the chosen flags in force."""
        return settings_of(in_force(self.config, flags), engine)


def auto_policy(config: Config, log: Listener) -> AutoPolicy | None:
    """The object that chooses the policy; None unless ``--ckpt-policy auto``."""
    snapshot, parallel = config.snapshot, config.parallel
    if snapshot.ckpt_policy != AUTO:
        return None
    sizes = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    limits = AutoLimits(
        tier=snapshot.ckpt_tier,
        replicas=snapshot.replicas,
        exact_only=snapshot.exact_only,
        host_memory_gb=snapshot.host_memory_gb,
        plt=snapshot.pec_plt_limit,
        mtbf_hours=snapshot.mtbf_hours,
        parallel=(*sizes, parallel.expert_model_parallel_size),
        has_experts=config.moe.num_experts is not None,
    )
    return AutoPolicy(limits, FlaggedChoices(config), log)


def in_force(asked: Config, flags: Mapping[str, object]) -> Config:
    """The configuration with the chosen values of a policy in place of ``auto``.

    Raises:
        ConfigError: the other flags do not allow the choice.
    """
    policy, others = flags["ckpt_policy"], flags_of(SnapshotFlags)
    unknown = flags.keys() - {spec.name for spec in others}  # flags of a policy that is no longer installed
    refuse(unknown, f"there is no {', '.join(sorted(unknown))}: install the policy that it is of.")
    plain = {spec.name: spec.default for spec in others if not _is_of(spec.name, policy, asked)}
    return asked.replace("snapshot", **plain | dict(flags))


def _is_of(flag: str, policy: object, asked: Config) -> bool:
    """Whether a flag applies to the chosen policy."""
    if (owner := owners().get(flag)) is None:
        return flag not in _OWN_FLAGS
    needs = next(one.needs for one in owner.flags if one.name == flag)
    return owner.name == policy and (needs is None or bool(getattr(asked.snapshot, needs)))
