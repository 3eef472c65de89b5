"""A job is killed and started again with another flag: iterations are not replayed under it without notice."""

import random

import pytest

from benchmarks.live.job import Events
from tests.errors import only_code
from tests.integration.snapshot_files import node_memory, start
from tests.integration.test_pec import SMALL, kill_at
from tests.integration.tiny import train
from tests.shared import ALL

POLICIES = {
    "sparse": dict(sparse_window=3, snapshot_interval=1),
    "gradient": dict(gradient_window=3, snapshot_interval=1, ckpt_tier="memory", persist_interval=4),
}
CHANGES = {
    "--clip-grad": dict(clip_grad=0.5),
    "--adam-beta1": dict(adam_beta1=0.8),
    "--adam-beta2": dict(adam_beta2=0.9),
    "--adam-eps": dict(adam_eps=1e-6),
    "--seed": dict(seed=7),
    "--hidden-dropout": dict(hidden_dropout=0.1),
    "--attention-dropout": dict(attention_dropout=0.1),
    "--moe-aux-loss-coeff": dict(moe_aux_loss_coeff=0.3),
    "--moe-z-loss-coeff": dict(moe_z_loss_coeff=0.01),
    "--moe-router-topk": dict(moe_router_topk=3),
    "--moe-router-score-function": dict(moe_router_score_function="sigmoid"),
    "--moe-input-jitter-eps": dict(moe_input_jitter_eps=0.01),
    "--recompute-granularity": dict(recompute_granularity="selective"),
    "--global-batch-size": dict(global_batch_size=4),
    "--use-checkpoint-opt-param-scheduler": dict(lr=7e-3, override_opt_param_scheduler=True),
}


def drawn(seed: int) -> list[tuple[str, ...]]:
    """Draws pairs of flags; with ``MOC_TESTS_ALL=1``, each flag is in one."""
    names = list(CHANGES)
    random.Random(seed).shuffle(names)
    return [tuple(names[at : at + 2]) for at in range(0, len(names) if ALL else 4, 2)]


@pytest.mark.recovery
@pytest.mark.parametrize("policy", POLICIES)
def test_a_replay_under_other_flags_is_refused_by_their_names(policy, data, tmp_path):
    with node_memory() as memory:
        places = dict(ckpt_policy=policy, ckpt_dir=str(tmp_path / "c"), ckpt_memory_dir=memory)
        flags = data | SMALL | places | POLICIES[policy] | dict(log_dir=str(tmp_path / "log"))
        kill_at("1", flags, iteration=8)
        for names in drawn(len(policy)):
            changed = {flag: value for name in names for flag, value in CHANGES[name].items()}
            (result,) = start("1", flags | changed).wait()
            (said,) = (line for line in result.output.splitlines() if "pretrain_gpt_moe.py: error" in line)
            assert result.exit == 1 and "Traceback" not in result.output
            assert only_code(said) == "replay-not-identical" and all(name in said for name in names), said
        kept = dict(lr=7e-3, use_checkpoint_opt_param_scheduler=True, exit_interval=12)  # the stored schedule continues
        resumed = train("1", flags | kept)
        assert set(resumed.codes) == {0} and resumed.start >= 4
        replayed = Events(tmp_path / "log" / "events.jsonl").of("replay")
        assert all(event["exact"] for event in replayed) and (replayed or policy == "gradient")


@pytest.mark.recovery
def test_inexact_replay_is_permitted_by_flag(data, tmp_path):
    places = dict(ckpt_policy="sparse", ckpt_dir=str(tmp_path / "c"), log_dir=str(tmp_path / "log"))
    flags = data | SMALL | places | POLICIES["sparse"]
    kill_at("1", flags, iteration=8)
    resumed = train("1", flags | dict(clip_grad=0.5, allow_nondeterministic=True, exit_interval=12))
    assert set(resumed.codes) == {0} and resumed.start >= 4
    assert not Events(tmp_path / "log" / "events.jsonl").of("replay")[-1]["exact"]
