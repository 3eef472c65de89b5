"""The example of torchtitan on CPUs, which torchtitan itself does not support: tests.integration.test_torchtitan."""

import argparse
import json
import random
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import tokenizers
import torch
import torchtitan.tools.utils
import xxhash
from torch.distributed.fsdp import FSDPModule


class Host:
    """Stands in for ``torch.cuda``."""

    current_device = staticmethod(lambda: 0)
    get_device_name = staticmethod(lambda device=None: "CPU")
    get_device_properties = staticmethod(lambda device=None: SimpleNamespace(total_memory=1 << 34))
    memory_stats = staticmethod(lambda device=None: {})
    reset_peak_memory_stats = empty_cache = staticmethod(lambda: None)

    def __getattr__(self, name):
        return getattr(torch.cpu, name)


torchtitan.tools.utils.device_type, torchtitan.tools.utils.device_module = "cpu", Host()  # before others import them

from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.config import TrainingConfig  # noqa: E402
from torchtitan.distributed import fsdp  # noqa: E402
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader  # noqa: E402
from torchtitan.models import qwen3  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.common.config_utils import decoder_vocab_size  # noqa: E402
from torchtitan.models.common.rope import CosSinRoPE  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from moc.state.replicated import local_values  # noqa: E402
from tests.worlds import REPOSITORY  # noqa: E402

disable_division = fsdp.disable_fsdp_gradient_division


def sums_only(model):
    """Has FSDP2 add gradients without a factor, which gloo does not support."""
    disable_division(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


fsdp.disable_fsdp_gradient_division = sums_only
WORDS = ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(100))]
DATA = Path.cwd()


def write_data(directory):
    """Writes a tokenizer and texts."""
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    for name in ("tokenizer", "texts"):
        (directory / name).mkdir(parents=True)
    tokenizer.save(str(directory / "tokenizer" / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(special))
    rng = random.Random(0)
    texts = [" ".join(rng.choices(WORDS[3:40], k=rng.randrange(5, 90))) for _ in range(100)]
    (directory / "texts" / "a.json").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def tiny():
    """Returns the configuration of a model with eight experts in each of two layers."""
    spec = qwen3.model_registry("debugmodel_moe")
    spec.model.layers = qwen3._build_qwen3_moe_layers(
        n_layers=2,
        dim=256,
        n_heads=4,
        n_kv_heads=2,
        head_dim=32,
        moe_hidden_dim=32,
        num_experts=8,
        top_k=2,
        attn_backend="flex",
        moe_comm_backend="standard",
        rope=CosSinRoPE.Config(dim=32, max_seq_len=256, theta=1e6),
    )
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # flex needs a GPU for gradients
    texts = HuggingFaceTextDataLoader.Config(dataset="c4_test", dataset_path=str(DATA / "texts"))
    return Trainer.Config(
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),
        hf_assets_path=str(DATA / "tokenizer"),
        metrics=MetricsProcessor.Config(log_freq=1),
        model_spec=spec,
        dataloader=texts,
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(local_batch_size=2, seq_len=32, disable_cuda_graphs=True),
        checkpoint=CheckpointManager.Config(),
    )


def state_digest(trainer):
    """Returns a hash of this worker's weights, moments and buffers."""
    digest = xxhash.xxh3_64()
    (model,), (optimizer,) = trainer.model_parts, trainer.optimizers.optimizers
    moments = [value for parameter in model.parameters() for value in optimizer.state[parameter].values()]
    for tensor in [*model.parameters(), *model.buffers(), *moments]:
        digest.update(local_values(tensor).cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return f"{digest.hexdigest()} {trainer.step} {trainer.ntokens_seen}"


KINDS = {
    "fsdp": [],
    "accumulate": ["--training.global_batch_size=8"],
    "experts": ["--parallelism.expert_parallel_degree=2"],
    # gloo writes a result after selective checkpointing has kept it
    "tensor": ["--parallelism.tensor_parallel_degree=2", "activation-checkpoint:full"],
    "replicas": ["--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=1"],
    "checkpoint": ["--checkpoint.enable", "--checkpoint.interval=4", "--checkpoint.no-last-save-model-only"],
}


def main():
    """Trains as the example does, and writes the hash of each worker's state."""
    global DATA
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--ckpt-dir", type=Path)
    parser.add_argument("--log-dir")
    parser.add_argument("--iterations")
    parser.add_argument("--stock", action="store_true")
    asked, options = parser.parse_known_args()
    DATA = asked.ckpt_dir.parents[1] / "data"
    torch.set_num_threads(1)
    sys.modules["tiny"] = SimpleNamespace(config_registry=None, tiny=tiny)
    sys.modules["tiny.config_registry"] = sys.modules["tiny"]
    common = ["--module=tiny", "--config=tiny", f"--training.steps={asked.iterations}", "--debug.seed=1"]
    common += ["--parallelism.spmd_backend=partial_dtensor", f"--dump_folder={asked.ckpt_dir.parent}"]
    common += [*options, *KINDS[asked.kind]]
    if asked.stock:
        from torchtitan.config import ConfigManager

        if not hasattr(torch.distributed, "set_timeout"):  # in torch 2.14
            torch.distributed.set_timeout = lambda *arguments: None
        trainer = Trainer(ConfigManager().parse_args(common))
        trainer.train()
    else:
        ours = ["--ckpt-dir", str(asked.ckpt_dir), "--log-dir", asked.log_dir]
        sys.argv = ["torchtitan_trainer.py", *ours, *common]
        trainer = runpy.run_path(str(REPOSITORY / "examples" / "torchtitan_trainer.py"))["main"]()
    rank = trainer._job.rank if not asked.stock else torch.distributed.get_rank()
    (asked.ckpt_dir.parent / f"weights{rank}").write_text(state_digest(trainer))


if __name__ == "__main__":
    main()
