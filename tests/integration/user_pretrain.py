"""A user's own script for megatron.training: a model with a layer of its own, a data set, a flag, and a loss of two
values, of which one is a mean.  It knows nothing of this project."""

import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args


class Gate(torch.nn.Module):
    """A layer that megatron-core does not know, with a parameter of a name of its own."""

    def __init__(self, width):
        super().__init__()
        self.strength = torch.nn.Parameter(torch.full((width,), 0.1))

    def forward(self, hidden):
        return hidden * (1.0 + self.strength)


class UserModel(GPTModel):
    """GPT with a gate before its output layer."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if get_args().user_gate and self.post_process:
            gate = Gate(self.config.hidden_size)
            self.gate = gate
            self.decoder.register_forward_hook(lambda module, inputs, output: gate(output))


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    """Builds a chunk of the model."""
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=args.normalization, vp_stage=vp_stage
    )
    return UserModel(
        config, spec, args.padded_vocab_size, args.seq_length, pre_process=pre_process, post_process=post_process,
        parallel_output=True, share_embeddings_and_output_weights=False, position_embedding_type="rope",
        vp_stage=vp_stage, pg_collection=pg_collection,
    )  # fmt: skip


class Numbers(torch.utils.data.Dataset):
    """Random tokens, by number of the sample."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        tokens = torch.Generator().manual_seed(index)
        return {"text": torch.randint(0, 200, (get_args().seq_length + 1,), generator=tokens)}


def datasets(counts, vp_stage=None):
    """The three splits."""
    return tuple(Numbers(max(count, 1)) for count in counts)


datasets.is_distributed = True


def loss_function(output, non_loss_data=False):
    """The mean over tokens, and a value that is reported beside it; or what evaluations plot."""
    if non_loss_data:
        return output.detach().float().max()
    loss = output.float().mean()
    pair = torch.stack([output.float().sum().detach(), torch.tensor(float(output.numel()), device=output.device)])
    return loss, {"user loss": pair, "user maximum": output.detach().float().max()}


def forward_step(batches, model):
    """One micro batch."""
    text = next(batches)["text"].cuda()
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    length = tokens.shape[1]
    mask = torch.ones(1, 1, length, length, device=tokens.device).triu(1).bool()
    positions = torch.arange(length, device=tokens.device)[None].expand_as(tokens)
    return model(tokens, positions, mask, labels=labels), loss_function


def plot(maxima, iteration, writer):
    """Writes what the last worker has collected after an evaluation."""
    writer.add_scalar("maximum of an evaluation", max(maxima), iteration)
    print(f"plotted {len(maxima)} maxima at iteration {iteration}", flush=True)


def own_flags(parser):
    """Adds this script's flags."""
    parser.add_argument("--user-gate", action="store_true")
    parser.add_argument("--user-plot", action="store_true")
    return parser


if __name__ == "__main__":
    arguments = parse_and_validate_args(extra_args_provider=own_flags, args_defaults={})
    container = pretrain_cfg_container_from_args(arguments)
    plots = plot if arguments.user_plot else None
    pretrain(container, datasets, ModelType.encoder_or_decoder, forward_step, model_provider, plots)
