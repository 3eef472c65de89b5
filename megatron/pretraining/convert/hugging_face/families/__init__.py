"""Registers families by name.  Every file in this directory is imported: to add a family, add one file."""

from __future__ import annotations

import importlib
import pkgutil

from megatron.pretraining.convert.hugging_face.family import Config, Family, Model, described_model
from moc.errors import cause_of
from moc.store.errors import CheckpointError

FAMILIES: dict[str, Family] = {
    family.name: family
    for module in pkgutil.iter_modules(__path__)
    for family in [importlib.import_module(f"{__name__}.{module.name}").FAMILY]
}
_LONGEST = 80  # characters of a name
_LATENT_ATTENTION = ("deepseek_v2", "deepseek_v3")


def family_named(name: str) -> Family:
    """Returns the family of a ``model_type``.

    Raises:
        CheckpointError: it is unknown.
    """
    if name in FAMILIES:
        return FAMILIES[name]
    if name in _LATENT_ATTENTION:
        raise CheckpointError(
            f"{name} has multi-head latent attention (MLA), which megatron-core's own layers do not compute. Fix: "
            f"choose one of the families {', '.join(FAMILIES)}",
            code="family-unknown",
        )
    raise CheckpointError(
        f"models of {name} are not known. Fix: choose one of the families {', '.join(FAMILIES)}",
        code="family-unknown",
    )


def family_of(config: Config) -> Family:
    """Returns the family of a configuration by its ``model_type``; raises CheckpointError if it is unknown."""
    if not isinstance(name := config.get("model_type"), str) or len(name) > _LONGEST:
        raise CheckpointError(
            "config.json has no model_type, which names the family of the weights. Fix: add it, as the model was "
            "trained",
            code="config-key-missing",
        )
    return family_named(name)


def families_for(model: Model) -> list[Family]:
    """Returns the families that can express a model: exact matches, or otherwise families that need added zeros."""
    candidates = [family for family in FAMILIES.values() if _refusal(family, model) is None]
    return [family for family in candidates if _needs_no_zeros(family, model)] or candidates


def family_for(model: Model) -> Family:
    """Returns the only family that can express a model.

    Raises:
        CheckpointError: no family or several can.
    """
    candidates = families_for(model)
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise CheckpointError(
            f"several families can express this model. Fix: choose --family {' or '.join(f.name for f in candidates)}",
            code="family-ambiguous",
        )
    reasons = "; ".join(cause_of(_refusal(family, model)) for family in FAMILIES.values())
    raise CheckpointError(
        f"no family can express this model: {reasons}. Fix: keep the checkpoint in torch_dist, or train a model that a "
        "family can express",
        code="family-cannot-express",
    )


def _refusal(family: Family, model: Model) -> CheckpointError | None:
    try:
        family.config_of(model)
    except CheckpointError as error:
        return error
    return None


def _needs_no_zeros(family: Family, model: Model) -> bool:
    described = described_model(model)
    gated = not family.shared_gate or described.moe_shared_expert_gate
    return gated and family.shared_width(model) == described.shared
