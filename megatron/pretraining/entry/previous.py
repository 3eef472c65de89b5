"""Reads checkpoints of converters, and of the previous release, which had its own flags and ``--save`` format.

A checkpoint is a directory ``iter_0000100`` with

* the weights in megatron-core's ``torch_dist`` format;
* ``optimizer/*.safetensors``: master weights and moments as boxes of the unpartitioned tensors;
* ``training_state.json``: position, learning-rate schedule, loss scale, model and tokenizer;
* ``manifest.json``: every file with its hash.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from megatron.pretraining.checkpoint import contents, fragments
from megatron.pretraining.checkpoint.unpickling import check_metadata, restricted_unpickling
from megatron.pretraining.config.flag import dashed
from megatron.pretraining.config.layer_pattern import expand, parse_layer_freq
from megatron.pretraining.model.parameters import unwrap
from megatron.pretraining.parts import WorkerParts
from moc.files.decode import short_repr
from moc.runtime.collectives import first_line, run_on_rank0
from moc.state.record import Position
from moc.store.errors import CheckpointError

_ROUTING = """
    moe_router_topk moe_router_pre_softmax moe_router_score_function moe_aux_loss_coeff moe_z_loss_coeff
    moe_expert_capacity_factor moe_token_drop_policy
    """.split()


def described_by_flags(shape: Mapping) -> bool:
    """Returns whether a state describes the model by flags, as the previous release did, not by operators."""
    return "num_layers" in shape


def check_flags(arguments: Mapping, saved: Mapping, where: object) -> None:
    """Raises ``CheckpointError`` if the flags of a model of the previous release differ from Megatron-LM's arguments.

    Args:
        arguments: Megatron-LM's arguments, as values of JSON.
        saved: flags by name; a flag that did not exist yet is absent.
        where: the checkpoint or snapshot, for the message.
    """
    expected, stored = _plain(arguments), _plain(saved)
    for name in saved:
        if stored[name] != expected.get(name, stored[name]):
            raise CheckpointError(
                f"{where} holds another model: {dashed(name)} is {short_repr(stored[name])} there, {expected[name]} "
                "here. Fix: pass the value of the checkpoint, with --dialect moc if its command line is of the "
                "previous release, or load another checkpoint",
                code="checkpoint-of-another-model",
            )


def _plain(flags: Mapping) -> dict[str, Any]:
    """Returns the flags of a model in a canonical form."""
    plain = dict(flags)
    if not flags.get("group_query_attention", flags.get("num_query_groups") != flags.get("num_attention_heads")):
        plain["num_query_groups"] = flags.get("num_attention_heads")
    if flags.get("num_experts"):
        plain["moe_layer_freq"] = [*expand(parse_layer_freq(flags.get("moe_layer_freq", 1)), flags["num_layers"])]
    else:
        plain |= dict.fromkeys(("moe_layer_freq", "moe_ffn_hidden_size"))
    return plain


def load(
    parts: WorkerParts, directory: Path, manifest: Mapping, state: dict, arguments: Mapping, optimizer: bool
) -> Position:
    """Loads a worker's part of a checkpoint; a collective call.

    Args:
        parts: receive the state.
        directory: directory of the checkpoint, whose files are verified.
        manifest: manifest of the checkpoint.
        state: training state of the checkpoint, for this model.
        arguments: Megatron-LM's arguments, as values of JSON.
        optimizer: whether to load optimizer, schedule and loss scale as well.

    Raises:
        CheckpointError: on all workers: the checkpoint is incomplete, or of another optimizer or schedule.
    """
    _load_weights(parts, directory)
    if optimizer:
        fragments.load(directory, manifest, state, parts.config, parts.chunks, parts.optimizer)
        contents.restore_scheduler(parts.scheduler, state["scheduler"], directory)
    else:
        parts.optimizer.core.reload_model_params()
    if described_by_flags(state["shape"]):
        _warn_of_other_routing(arguments, state.get("model") or {}, parts.log.message)
    contents.warn_of_other_run(parts.config, parts.world, parts.optimizer, parts.data, state, parts.log.message)
    return Position(state["iteration"], state.get("consumed_samples", 0), state.get("skipped_iterations", 0))


def _warn_of_other_routing(arguments: Mapping, saved: Mapping, warn: Callable[[str], None]) -> None:
    """Warns of flags whose value differs, perhaps because the command line is read in another program's dialect."""
    for name in _ROUTING if saved else ():
        current, stored = arguments.get(name), saved.get(name)
        if current not in (stored, [stored]):
            warn(
                f"WARNING: {dashed(name)} was {short_repr(stored)} and is {short_repr(current)}: the model differs "
                "from here on; --dialect moc reads command lines of the previous release"
            )


def _load_weights(parts: WorkerParts, directory: Path) -> None:
    keys = run_on_rank0(lambda: check_metadata(directory), "cannot read a checkpoint")
    sharded_state = contents.described_weights(parts.chunks)
    contents.name_as_stored(sharded_state, frozenset(keys))
    try:
        with restricted_unpickling():
            loaded: Any = dist_checkpointing.load(sharded_state, str(directory))
    except (CheckpointingException, CheckpointException, KeyError, RuntimeError, OSError, ValueError) as error:
        raise CheckpointError(
            f"the weights in {directory} do not fit this model: {first_line(error)}. Fix: pass the flags of the model "
            "that was saved, or load another checkpoint",
            code="checkpoint-of-another-model",
        ) from error
    for i, chunk in enumerate(parts.chunks):
        unwrap(chunk).load_state_dict(loaded["model" if len(parts.chunks) == 1 else f"model{i}"], strict=False)
    parts.modules.take_over()
