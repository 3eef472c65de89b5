"""A user's script for ``megatron.training`` with megatron-core's datasets, as Megatron-LM's ``pretrain_gpt.py``."""

from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

from megatron.pretraining.entry import gpt


def main():
    """Trains."""
    arguments = parse_and_validate_args(args_defaults={})
    container = pretrain_cfg_container_from_args(arguments, gpt_config_from_args(arguments))
    pretrain(container, gpt.build_datasets, ModelType.encoder_or_decoder, gpt.forward_step)


if __name__ == "__main__":
    main()
