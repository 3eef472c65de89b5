"""Makes and runs a small model of transformers: a program of its own, as models_of_transformers.py.

    python tests/integration/generation_of_transformers.py make DIRECTORY
    python tests/integration/generation_of_transformers.py generate DIRECTORY

``make`` writes a random model with a tokenizer, an added token, a chat template and generation settings whose second
end-of-text token is one that the model generates early.  ``generate`` prints what a user of the directory gets.
"""

import json
import sys

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (  # pyright: ignore[reportMissingImports]  # optional
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

CHAT = [{"role": "user", "content": "w3 w4 <tool> w5"}]
TEMPLATE = "{% for message in messages %}<start>{{ message['role'] }} {{ message['content'] }}{% endfor %}"
LENGTH = 40  # tokens, at most
WORDS, SPECIAL = [f"w{number}" for number in range(90)], ["<unk>", "<start>", "<end>", "<pad>"]


def make(directory: str) -> None:
    """Writes the model."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    kinds = {f"{kind}_token": token for kind, token in zip(("unk", "bos", "eos", "pad"), SPECIAL, strict=True)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **kinds)
    tokenizer.add_tokens(["<tool>"])
    tokenizer.chat_template = {"default": TEMPLATE, "short": TEMPLATE[:5]}
    tokenizer.save_pretrained(directory)
    sizes = dict(hidden_size=32, intermediate_size=48, moe_intermediate_size=48, num_hidden_layers=2, head_dim=8)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2)
    sizes |= dict(vocab_size=len(tokenizer), max_position_embeddings=64, initializer_range=0.5)
    special = dict(bos_token_id=1, eos_token_id=2, pad_token_id=3)
    config = Qwen3MoeConfig(norm_topk_prob=True, tie_word_embeddings=False, **sizes, **special)
    model = Qwen3MoeForCausalLM(config).eval()
    sampling = dict(do_sample=True, temperature=0.7, top_k=5, pad_token_id=3, max_new_tokens=LENGTH)
    model.generation_config = GenerationConfig(**sampling)
    generated = _new_tokens(model, tokenizer)
    assert len(generated) == LENGTH
    model.generation_config = GenerationConfig(**sampling, eos_token_id=[2, generated[9]])
    model.save_pretrained(directory)


def generate(directory: str) -> None:
    """Prints the new tokens, the settings and some encoded texts."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    ends, texts = model.generation_config.eos_token_id, ["<tool> w1<end>", "w8 <start> <pad>"]
    encoded = [tokenizer.encode(text) for text in texts]
    ids = [model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id, tokenizer.eos_token_id]
    result = {"ends": ends, "encoded": encoded, "ids": ids, "templates": tokenizer.chat_template}
    print(json.dumps(result | {"new": _new_tokens(model, tokenizer)}))


def _new_tokens(model, tokenizer) -> list[int]:
    torch.manual_seed(1)
    prompt = tokenizer.apply_chat_template(CHAT, return_tensors="pt", return_dict=True)
    return model.generate(**prompt)[0, prompt["input_ids"].shape[1] :].tolist()


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"make": make, "generate": generate}[sys.argv[1]](sys.argv[2])
