"""The function that replaces ``megatron.training.pretrain``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from megatron.training import training

from megatron.pretraining import loop
from megatron.pretraining.config import ConfigError, check_backend
from megatron.pretraining.entry import command_line, cpu
from megatron.pretraining.entry.configuration import MegatronConfig, config_of
from megatron.pretraining.entry.limits import check_length
from megatron.pretraining.entry.program import StockProgram
from megatron.pretraining.entry.stock import get_args
from megatron.pretraining.errors import reported
from megatron.pretraining.process.core import check_releases
from moc.runtime import import_hook
from moc.runtime.program import end_if_checking


def pretrain(
    cfg_container: Any,
    train_valid_test_dataset_provider: Any,
    model_type: Any,
    forward_step_func: Any,
    model_provider: Any = None,
    process_non_loss_data_func: Any = None,
    get_embedding_ranks: Any = None,
    get_position_embedding_ranks: Any = None,
    non_loss_data_func: Any = None,
    store: Any = None,
    inprocess_call_wrapper: Any = None,
    p2p_communicator: Any = None,
    pg_collection: Any = None,
    skip_model_parallel_init: bool = False,
) -> None:
    """Trains as ``megatron.training.pretrain`` does, with the same arguments, and recovers from lost workers.

    Ends the process with a non-zero code if training does not end normally.
    """
    import_hook.record_pretrain_call()
    end_if_checking()
    with reported(Path(sys.argv[0]).name):
        _refuse(
            store=store,
            inprocess_call_wrapper=inprocess_call_wrapper,
            p2p_communicator=p2p_communicator,
            pg_collection=pg_collection,
            skip_model_parallel_init=skip_model_parallel_init or None,
        )
        config, program = prepared(
            StockProgram(
                cfg_container,
                train_valid_test_dataset_provider,
                model_type,
                forward_step_func,
                model_provider,
                process_non_loss_data_func,
                non_loss_data_func,
                get_embedding_ranks,
                get_position_embedding_ranks,
            )
        )
        code = loop.pretrain(config, program)
    if code:
        sys.exit(code)


def prepared(program: StockProgram) -> tuple[MegatronConfig, StockProgram]:
    """Returns the configuration of Megatron-LM's parsed arguments, adapted to this loop, and the program.

    Raises:
        ConfigError: the arguments cannot work.
        UnknownReleaseError: a library lacks a private interface that they need.
    """
    args = get_args()
    cpu.adapt(args)
    check_length(args)
    training.update_train_iters(args)
    config = config_of(args, command_line.read().own)
    check_backend(config, args.distributed_backend, torch.cuda.is_available())
    check_releases(config)
    _disable_local_checks(args, program.container)
    return config, program


def _refuse(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ConfigError(
                f"pretrain() got {name}, and mocrun has to control the process groups. Fix: leave it out",
                code="process-groups-of-caller",
            )


def _disable_local_checks(args: Any, container: Any) -> None:
    """Turns off Megatron-LM's local checks for non-finite results, since the commit all-reduce checks all workers."""
    args.rerun_mode = "disabled"
    args.check_for_nan_in_loss_and_grad = False
    args.use_gloo_process_groups = False
    if getattr(container, "ddp", None) is not None:
        container.ddp.check_for_nan_in_grad = False
