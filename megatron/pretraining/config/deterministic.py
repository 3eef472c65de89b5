"""What bit-identical results need on CUDA, beyond deterministic kernels of torch (docs/reference/bit-identity.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from megatron.pretraining.config.composed import Config
from megatron.pretraining.config.flag import refuse
from moc.policy import AUTO, policy_named


class _Needed(NamedTuple):
    variable: str
    values: tuple[str, ...]  # that are deterministic; the first is set where nothing is
    why: str


_NEEDED = (
    _Needed("NCCL_ALGO", ("Ring",), "trees and NVLS may add in another order in each call"),
    _Needed("CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8"), "other workspaces make matrix products depend on timing"),
    _Needed("NVTE_ALLOW_NONDETERMINISTIC_ALGO", ("0",), "otherwise attention may add in any order"),
)


def deterministic_environment(config: Config, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that ``--deterministic-mode`` sets on CUDA, before anything uses the device.

    Raises:
        ConfigError: the environment or another flag asks for what is not deterministic.
    """
    for needed in _NEEDED:
        given = environment.get(needed.variable)
        refuse(
            given is not None and given.strip().lower() not in {value.lower() for value in needed.values},
            f"--deterministic-mode cannot go with {needed.variable}={given}: {needed.why}; unset it, or make it "
            f"{needed.values[0]}.",
        )
    refuse(
        config.moe.moe_token_dispatcher_type == "flex",
        "--deterministic-mode cannot go with --moe-token-dispatcher-type flex, whose kernels promise no order of "
        "additions: choose alltoall or allgather.",
    )
    return {needed.variable: needed.values[0] for needed in _NEEDED if needed.variable not in environment}


def may_differ(config: Config) -> str | None:
    """Returns a warning for a run on CUDA whose recovery promises bit-identical results that its kernels do not."""
    name = config.snapshot.ckpt_policy
    if config.training.deterministic_mode or name is None or name != AUTO and not policy_named(name).exact:
        return None
    return (
        "WARNING: without --deterministic-mode, kernels and NCCL add in any order, so what is computed again after a "
        "loss may differ in the last bits from what was lost: pass it for bit-identical recovery"
    )
