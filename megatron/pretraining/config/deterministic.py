"""Sets the environment variables that bit-identical results on CUDA need besides torch's deterministic kernels.

See docs/reference/bit-identity.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from megatron.pretraining.config.flag import Problems
from megatron.pretraining.config.groups import Config
from moc.policy import AUTO, registered_policy

_ALLOW_FLAG = "--allow-nondeterministic"


class _RequiredVariable(NamedTuple):
    variable: str
    values: tuple[str, ...]  # deterministic values; the first is set if the variable is unset
    why: str


_REQUIRED = (
    _RequiredVariable("NCCL_ALGO", ("Ring", "CollnetDirect", "CollnetChain", "^NVLS"), "others may add in any order"),
    _RequiredVariable(
        "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8"), "other workspaces make matrix products depend on timing"
    ),
    _RequiredVariable("NVTE_ALLOW_NONDETERMINISTIC_ALGO", ("0",), "otherwise attention may add in any order"),
)


def deterministic_environment(config: Config, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that ``--deterministic-mode`` sets on CUDA, before anything uses the device.

    Raises:
        ConfigError: the environment or another flag requests nondeterministic kernels.
    """
    alternative = f", or pass {_ALLOW_FLAG}" if recovery_is_exact(config) else ""
    problems = Problems()
    for required in _REQUIRED:
        current = environment.get(required.variable)
        problems.refuse(
            current is not None and current.strip().lower() not in {value.lower() for value in required.values},
            f"--deterministic-mode cannot go with {required.variable}={current}, since {required.why}. Fix: unset it, "
            f"or make it {required.values[0]}{alternative}",
            code="environment-not-deterministic",
        )
    problems.refuse(
        config.moe.moe_token_dispatcher_type == "flex",
        "--deterministic-mode cannot go with --moe-token-dispatcher-type flex, whose kernels promise no order of "
        f"additions. Fix: choose alltoall or allgather{alternative}",
        code="dispatcher-not-deterministic",
    )
    problems.raise_found()
    return {required.variable: required.values[0] for required in _REQUIRED if required.variable not in environment}


def recovery_is_exact(config: Config) -> bool:
    """Returns whether recovery by the run's policy is exact, if its computation is deterministic."""
    name = config.snapshot.ckpt_policy
    return name is not None and (name == AUTO or registered_policy(name).is_exact)


def is_exact(config: Config, cuda: bool) -> bool | None:
    """Returns whether recovery restores the same bits, on CUDA or on the CPU; None without a policy."""
    if config.snapshot.ckpt_policy is None:
        return None
    is_deterministic = not config.training.allow_nondeterministic and (config.training.deterministic_mode or not cuda)
    return recovery_is_exact(config) and is_deterministic


def deterministic_if_exact(config: Config, cuda: bool) -> Config:
    """Turns on ``--deterministic-mode`` on CUDA if recovery is to be exact."""
    training = config.training
    if not cuda or training.deterministic_mode or training.allow_nondeterministic or not recovery_is_exact(config):
        return config
    return config.replace("training", deterministic_mode=True)


def about_bits(config: Config) -> str | None:
    """Returns the log sentence of a CUDA run about exact recovery; None if the policy does not promise it."""
    if not recovery_is_exact(config):
        return None
    if config.training.deterministic_mode:
        name = config.snapshot.ckpt_policy
        return (
            f"deterministic mode is on, so that recovery by --ckpt-policy {name} is exact ({_ALLOW_FLAG} turns it off)"
        )
    return (
        f"WARNING: with {_ALLOW_FLAG}, kernels and NCCL add in any order: iterations that are computed again after a "
        "loss may differ in the last bits, and the run is reported as not exact"
    )
