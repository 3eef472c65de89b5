"""Sets what bit-identical results need on CUDA, in addition to torch's deterministic kernels.

See docs/reference/bit-identity.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from megatron.pretraining.config.flag import Problems
from megatron.pretraining.config.groups import Config
from moc.policy import AUTO, registered_policy

_OTHERWISE = "--allow-nondeterministic"


class _Needed(NamedTuple):
    variable: str
    values: tuple[str, ...]  # deterministic values; the first is set if the variable is unset
    why: str


_NEEDED = (
    _Needed("NCCL_ALGO", ("Ring", "CollnetDirect", "CollnetChain", "^NVLS"), "others may add in any order"),
    _Needed("CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8"), "other workspaces make matrix products depend on timing"),
    _Needed("NVTE_ALLOW_NONDETERMINISTIC_ALGO", ("0",), "otherwise attention may add in any order"),
)


def deterministic_environment(config: Config, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that ``--deterministic-mode`` sets on CUDA, before anything uses the device.

    Raises:
        ConfigError: the environment or another flag requests nondeterministic kernels.
    """
    otherwise = f", or pass {_OTHERWISE}" if promises_bits(config) else ""
    problems = Problems()
    for needed in _NEEDED:
        given = environment.get(needed.variable)
        problems.refuse(
            given is not None and given.strip().lower() not in {value.lower() for value in needed.values},
            f"--deterministic-mode cannot go with {needed.variable}={given}, since {needed.why}. Fix: unset it, or "
            f"make it {needed.values[0]}{otherwise}",
            code="environment-not-deterministic",
        )
    problems.refuse(
        config.moe.moe_token_dispatcher_type == "flex",
        "--deterministic-mode cannot go with --moe-token-dispatcher-type flex, whose kernels promise no order of "
        f"additions. Fix: choose alltoall or allgather{otherwise}",
        code="dispatcher-not-deterministic",
    )
    problems.raise_found()
    return {needed.variable: needed.values[0] for needed in _NEEDED if needed.variable not in environment}


def promises_bits(config: Config) -> bool:
    """Returns whether recovery by the run's policy is exact, if its computation is deterministic."""
    name = config.snapshot.ckpt_policy
    return name is not None and (name == AUTO or registered_policy(name).is_exact)


def is_exact(config: Config, cuda: bool) -> bool | None:
    """Returns whether recovery restores the same bits, on CUDA or on the CPU; None without a policy."""
    if config.snapshot.ckpt_policy is None:
        return None
    computes_again = not config.training.allow_nondeterministic and (config.training.deterministic_mode or not cuda)
    return promises_bits(config) and computes_again


def deterministic_if_exact(config: Config, cuda: bool) -> Config:
    """Turns on ``--deterministic-mode`` on CUDA if recovery is to be exact."""
    training = config.training
    if not cuda or training.deterministic_mode or training.allow_nondeterministic or not promises_bits(config):
        return config
    return config.replace("training", deterministic_mode=True)


def about_bits(config: Config) -> str | None:
    """Returns the log sentence of a CUDA run about exact recovery; None if the policy does not promise it."""
    if not promises_bits(config):
        return None
    if config.training.deterministic_mode:
        name = config.snapshot.ckpt_policy
        return (
            f"deterministic mode is on, so that recovery by --ckpt-policy {name} is exact ({_OTHERWISE} turns it off)"
        )
    return (
        f"WARNING: with {_OTHERWISE}, kernels and NCCL add in any order: iterations that are computed again after a "
        "loss may differ in the last bits, and the run is reported as not exact"
    )
