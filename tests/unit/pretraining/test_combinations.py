"""Combinations of policy, tier, engine, elastic mode and layout are accepted, or refused with remedies that work."""

import functools
import itertools
import random
import re

from megatron.pretraining.config import ConfigError
from megatron.pretraining.config.groups import all_flags
from tests.configs import config_of
from tests.shared import ALL

GIVEN = dict(
    num_layers=4, hidden_size=128, num_attention_heads=4, seq_length=64, num_experts=8, micro_batch_size=2,
    train_iters=10, lr=1e-3, mock_data=True, tokenizer_type="NullTokenizer", vocab_size=100,
    add_bias_linear=False,
)  # fmt: skip
TP2 = dict(tensor_model_parallel_size=2, sequence_parallel=True)
ELASTIC = dict(elastic=True, elastic_slots=8, calculate_per_token_loss=True, global_batch_size=16)
POLICIES = [{}, *(dict(ckpt_policy=name, ckpt_dir="d") for name in
                  ("full", "pec", "selective", "sparse", "gradient", "auto"))]  # fmt: skip
TIERS = [{}, dict(ckpt_tier="memory"), dict(ckpt_tier="peers")]
ENGINES = [{}, dict(use_distributed_optimizer=True), dict(deepspeed=True), dict(deepspeed=True, zero_stage=2)]
LAYOUTS = [
    {},
    dict(expert_model_parallel_size=2),
    dict(pipeline_model_parallel_size=2),
    TP2,
    dict(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2),
    TP2 | dict(expert_tensor_parallel_size=1, expert_model_parallel_size=2),
]
MODES = [{}, ELASTIC, dict(elastic=True, elastic_slots=1)]
OTHERS = [
    dict(replicas=1),
    dict(persist_interval=10),
    dict(persist_interval=10, snapshot_interval="4"),
    dict(snapshot_interval="10"),
    dict(node_of_rank="0,0,1,1"),
    dict(selective_gradients="on"),
    dict(selective_fold="peers"),
    dict(selective_remote_gb=1.0),
    dict(selective_hide="bubble"),
    dict(pec_k_snapshot=4, pec_k_persist=2),
    dict(pec_k_persist=2),
    dict(mtbf_hours=4.0),
    dict(upstream_logging=True),
    dict(moe_token_dispatcher_type="allgather"),
    dict(elastic_everywhere="9"),
    dict(overlap_grad_reduce=True),
    dict(optimizer="sgd"),
]
BASIC = [*itertools.product(POLICIES, TIERS, ENGINES, MODES, LAYOUTS)]
WITH = [*itertools.product(BASIC, OTHERS)]
VALUES = dict(
    global_batch_size=16,
    elastic_slots=8,
    num_experts=8,
    persist_interval=4,
    ckpt_dir="d",
    pipeline_model_parallel_size=2,
)
"""Of flags that a remedy names without a value."""
CHOICES = dict(optimizer=("adam", "sgd"), moe_token_dispatcher_type=("allgather", "alltoall", "flex"))
"""Values of Megatron-LM's flags that are words."""

FLAG = re.compile(r"--[a-z][a-z0-9-]*")
VERBS = "drop|add|choose|set|take|make|lower|raise|change"


def refused(flags: dict) -> str | None:
    """Why the flags cannot work on four workers; None if they can."""
    return _refused(tuple(sorted(flags.items())))


@functools.cache
def _refused(items: tuple) -> str | None:
    try:
        config_of(GIVEN | dict(items), 4)
    except ConfigError as error:
        return str(error.problems[0])
    return None


def name_of(flag: str) -> str:
    return flag.removeprefix("--").removeprefix("disable-").replace("-", "_")


def remedies(sentence: str, flags: dict) -> list[dict]:
    """The flags after each of the alternatives that a sentence names."""
    cause, said = re.split(rf"(?::|[.] Fix:) (?=(?:{VERBS}) )", sentence.rstrip("."), maxsplit=1)
    return [applied(one, cause, flags) for one in re.split(rf",? or (?=(?:{VERBS}) )", said)]


def applied(remedy: str, cause: str, flags: dict) -> dict:
    """The flags after one remedy."""
    verb, _, rest = remedy.partition(" ")
    named, of_cause = FLAG.findall(rest), FLAG.findall(cause)
    if verb == "drop":
        dropped = [name_of(flag) for flag in named or of_cause[: 1 if rest == "it" else None]]
        assert {*dropped} & flags.keys(), f"nothing to drop: {remedy}"
        return {name: value for name, value in flags.items() if name not in dropped}
    if "another policy" in rest:
        return flags | dict(ckpt_policy=rest.split()[-1])
    needed = FLAG.findall(re.split("needs|without", cause)[-1])
    flag = next(iter(named or (needed if verb == "add" else of_cause)))
    if flag == "--disable-bias-linear":
        return flags | dict(add_bias_linear=False)
    name = name_of(flag)
    return flags | {name: value_of(name, verb, rest, cause)}


def value_of(name: str, verb: str, rest: str, cause: str) -> object:
    """The value that a remedy gives a flag."""
    flag = all_flags().get(name)
    if flag.kind is bool if flag else isinstance(getattr(config_of(GIVEN, 4).arguments, name), bool):
        return True
    spelling = f"--{name.replace('_', '-')}"
    words = re.findall(r"[\w.-]+", rest) + re.findall(r"[\w.-]+", cause.partition(spelling)[2])
    if choices := flag.choices if flag else CHOICES.get(name):
        return next(word for word in words if word in choices)
    if number := re.search(r"(?:at least|to|multiple of|it|--[a-z-]+) (\d+)", rest):
        return int(number[1])
    if number := re.search(r"greater than (\d+)", cause):
        return int(number[1]) + 1
    given = re.search(rf"{spelling} (\w+)", cause)
    return VALUES[name] if name in VALUES or given is None else given[1]


_accepted: set[frozenset] = set()
"""Flags that are accepted, or from which remedies lead to such."""


def leads_back(flags: dict, before: tuple = ()) -> list[str]:
    """The sentences that lead from refused flags to themselves; empty if a remedy of each leads to acceptance."""
    key = frozenset(flags.items())
    if key in _accepted:
        return []
    if key in dict(before):
        return [said for _, said in before]
    sentence, found = refused(flags), []
    if sentence is not None:
        for after in remedies(sentence, flags):
            if not (found := leads_back(after, (*before, (key, sentence)))):
                break
        else:
            return found
    _accepted.add(key)
    return []


def merged(*parts: dict) -> dict:
    return {name: value for part in parts for name, value in part.items()}


def test_refusals_are_not_contradictory():
    rng = random.Random(5)
    chosen = [*BASIC, *WITH] if ALL else [*rng.sample(BASIC, 150), *rng.sample(WITH, 100)]
    for one in chosen:
        basic, other = (one, {}) if len(one) == 5 else one
        assert leads_back(merged(*basic, other)) == []


def test_contradictory_refusals_are_detected(monkeypatch):
    monkeypatch.setitem(globals(), "refused", lambda flags: {
        True: "--elastic is on: choose --ckpt-tier disk.", False: "gradient needs memory: add --ckpt-tier memory."
    }[flags.get("ckpt_tier") == "memory"])  # fmt: skip
    assert len(leads_back(dict(ckpt_tier="memory", elastic_dispatch="even"))) == 2
