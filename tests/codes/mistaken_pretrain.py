"""A user's script for ``megatron.training`` with a mistake, which the environment variable ``MISTAKE`` names."""

import os
import sys
from pathlib import Path

import torch
from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.integration import user_pretrain as user


class Counter(torch.nn.Module):
    """Keeps a value that grows."""

    def __init__(self):
        super().__init__()
        self.seen = torch.zeros(1)

    def forward(self, hidden):
        self.seen = torch.zeros(2 * self.seen.numel())
        return hidden


def counting_model(*args, **kwargs):
    """The model with a counter."""
    model = user.model_provider(*args, **kwargs)
    counter = Counter()
    model.counter = counter
    model.decoder.register_forward_hook(lambda module, inputs, output: counter(output))
    return model


class Stream(torch.utils.data.IterableDataset):
    """Can only be read in sequence."""

    def __iter__(self):
        return iter(())


def streams(counts, vp_stage=None):
    """Splits that can only be read in sequence."""
    return Stream(), None, None


def without_stages(counts):
    """Splits for a model without virtual stages."""
    return user.datasets(counts)


streams.is_distributed = without_stages.is_distributed = True


def three_values(batches, model):
    """A micro batch whose loss function reports three values under one name."""
    output, _ = user.forward_step(batches, model)
    return output, lambda tensor: (tensor.float().mean(), {"three": torch.zeros(3)})


USUAL = {"datasets": user.datasets, "forward": user.forward_step, "model": user.model_provider}
MISTAKES = {
    "model-missing": {"model": None},
    "process-groups-of-caller": {"process_groups": object()},
    "datasets-unsupported": {"datasets": streams},
    "dataset-provider-unsupported": {"datasets": without_stages},
    "loss-report-invalid": {"forward": three_values},
    "module-state-too-large": {"model": counting_model},
    "": {},
}


def main():
    """Trains with the mistake."""
    arguments = parse_and_validate_args(extra_args_provider=user.own_flags, args_defaults={})
    asked = USUAL | MISTAKES[os.environ.get("MISTAKE", "")]
    groups = {"pg_collection": asked["process_groups"]} if "process_groups" in asked else {}
    container = pretrain_cfg_container_from_args(arguments)
    if asked["model"] is None:
        container.model = None
    pretrain(container, asked["datasets"], ModelType.encoder_or_decoder, asked["forward"], asked["model"], **groups)


if __name__ == "__main__":
    main()
