"""Pre-trains a GPT language model with a mixture of experts; ``--help`` lists the flags.

torchrun --nproc-per-node 4 pretrain_gpt_moe.py --model tiny --mock-data ...
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from functools import partial
from importlib import import_module

from megatron.pretraining.process.early_stop import end_at_once
from moc.runtime import environment

WARM = (
    # modules that torch and megatron-core import only while they work
    "torch._dynamo",
    "torch._inductor.utils",
    "megatron.core.tokenizers.text.models.gpt_tokenizer",
)


def forward_step(batches, model):
    """One micro batch through one model chunk, as megatron-core's schedules call it.

    Args:
        batches: iterator over micro batches, drawn from only by the first and the last stage.
        model: the chunk.

    Returns:
        Its output (on the last stage the loss of each token, [micro batch, sequence], fp32), and the function
        that makes the loss of it.
    """
    from megatron.pretraining.model.parameters import unwrap

    bare = unwrap(model)
    batch = next(batches) if bare.pre_process or bare.post_process else {}
    output = model(
        batch.get("tokens"), batch.get("position_ids"), batch.get("attention_mask"), labels=batch.get("labels")
    )
    return output, partial(loss_function, batch.get("loss_mask"))


def loss_function(loss_mask, losses):
    """Sums the losses of the tokens that count.

    Args:
        loss_mask: [micro batch, sequence], 1 where the token counts.
        losses: [micro batch, sequence] cross entropy in nats.

    Returns:
        The sum (scalar, differentiable), the number of tokens (int scalar), and both for the record.
    """
    mask = loss_mask.view(-1).float()
    total = (losses.view(-1).float() * mask).sum()
    tokens = mask.sum().to(dtype=int)
    return total, tokens, {"loss_sum": total.detach().clone(), "loss_tokens": tokens}


def providers():
    """The model, the data and the forward step of this program."""
    from megatron.pretraining.data.streams import build_datasets
    from megatron.pretraining.model.build import build_gpt
    from megatron.pretraining.setup import Providers

    return Providers(model=build_gpt, datasets=build_datasets, forward_step=forward_step)


def prepare_core(config=None) -> None:
    """Checks the libraries, then imports the training loop; exits with one sentence if a library does not fit."""
    from megatron.pretraining.process import core, cpu, releases
    from megatron.pretraining.process.rank0 import let_first_worker_speak
    from moc.errors import with_code
    from moc.private_interfaces import UnknownReleaseError, refuse_import

    os.environ.setdefault(
        "HF_HUB_OFFLINE", "1"
    )  # a job downloads nothing; read when megatron-core imports transformers
    try:
        cpu.install()
        if config is not None:
            releases.check_releases(config)
        with refuse_import():
            import_module("megatron.pretraining.errors")
            import_module("megatron.pretraining.loop")
    except (core.CoreError, UnknownReleaseError) as error:
        let_first_worker_speak()
        sys.exit(f"pretrain_gpt_moe.py: error: {with_code(error)}")


def check_arguments(arguments: list[str], least_nodes: int, nodes: int, per_node: int) -> None:
    """Exits with a message if the flags cannot work with these workers, for a launcher that starts them.

    Directories of a job of several nodes are checked by its first worker, which alone knows whether training began.
    """
    megatron, others = asks_for_megatron(arguments)
    if megatron:
        os.environ["MOC_FRONT"] = "megatron"
        import_module("megatron.pretraining.entry.words").check_arguments(sys.argv[0], others, nodes * per_node)
        return
    from megatron.pretraining.arguments import build_parser, parse_config
    from megatron.pretraining.config import ConfigError, Workers
    from megatron.pretraining.process.outputs import check_directories

    config = parse_config(arguments, Workers(least_nodes, nodes, per_node))
    if nodes == 1:
        try:
            check_directories(config)
        except ConfigError as error:
            build_parser().refuse(error)


def workers_here():
    """The workers of this job; None if a launcher has checked that the flags fit them."""
    from megatron.pretraining.config import Workers

    if environment.AGENT in os.environ:
        return None
    size = int(os.environ.get("WORLD_SIZE", "1"))
    return Workers(1, 1, size)


def asks_for_megatron(words: list[str]) -> tuple[bool, list[str]]:
    """Whether Megatron-LM's flags are used, which is the default, and the other words of the command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--front", choices=("moc", "megatron"), default=os.environ.get("MOC_FRONT", "megatron"))
    known, others = parser.parse_known_args(words)
    return known.front == "megatron", others


def warm_up() -> None:
    """Imports what training needs, and nothing more, for a launcher that forks its workers."""
    megatron, _ = asks_for_megatron(sys.argv[1:])
    if megatron:
        import_module("moc.megatron").warm_up()
        import_module("megatron.pretraining.entry.gpt")
        return
    from megatron.pretraining.arguments import valid_config

    prepare_core(valid_config(sys.argv[1:]))
    for module in WARM:
        with suppress(ImportError):  # a release may have other modules
            import_module(module)


def main() -> int:
    """Parses the flags before anything heavy is imported, then trains."""
    end_at_once("pretrain_gpt_moe.py")  # before imports that take seconds
    megatron, others = asks_for_megatron(sys.argv[1:])
    if megatron:
        sys.argv[1:] = others
        import_module("moc.megatron")
        import_module("megatron.pretraining.entry.gpt").main()
        return 0
    from megatron.pretraining.arguments import parse_config

    config = parse_config(workers=workers_here())
    prepare_core(config)
    from megatron.pretraining.errors import reported
    from megatron.pretraining.loop import pretrain

    with reported():
        return pretrain(config, providers())


if __name__ == "__main__":
    sys.exit(main())
