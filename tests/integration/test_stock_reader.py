"""megatron-core alone, in a program that never imports our model or checkpoints, reads our weights."""

import json
import subprocess
import sys

from tests.integration.tiny import FLAGS, train
from tests.worlds import REPOSITORY

READER = """
import hashlib, json, os, sys
import torch
from megatron.pretraining.process import cpu          # the CPU shim: nothing else of ours
cpu.install()
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
tensor_parallel.model_parallel_cuda_manual_seed(1)
config = TransformerConfig(
    num_layers=2, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, num_moe_experts=4, moe_router_topk=2,
    moe_ffn_hidden_size=48, gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
    bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
    gradient_accumulation_fusion=False, apply_rope_fusion=False,
)
spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
model = GPTModel(config, spec, vocab_size=256, max_sequence_length=16, position_embedding_type="rope",
                 share_embeddings_and_output_weights=False)
loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, sys.argv[1])
model.load_state_dict(loaded["model"])
ours = {m for m in sys.modules if m.startswith(("moc", "megatron.pretraining."))}
checks = {"moc", "moc.errors", "moc.private_interfaces"}
assert ours <= {f"megatron.pretraining.process{end}" for end in ("", ".cpu", ".core")} | checks
print(json.dumps({
    name: hashlib.sha256(p.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    for name, p in model.named_parameters()
}))
"""


def test_megatron_core_reader_loads_our_weights(data, tmp_path):
    train("PP2xEP2", data | dict(save=str(tmp_path), train_iters=2))
    ours = train("1", data | dict(load=str(tmp_path), train_iters=2))
    assert ours.start == 2
    command = [sys.executable, "-c", READER, str(tmp_path / "iter_0000002")]
    environment = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    read = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert read.returncode == 0, read.stderr
    assert json.loads(read.stdout.splitlines()[-1]) == ours.workers[0]["parameters"]
    assert FLAGS["num_layers"] == 2 and FLAGS["hidden_size"] == 32 and FLAGS["ffn_hidden_size"] == 48
