"""What --deterministic-mode sets on CUDA, and what it refuses."""

import pytest
import torch

from megatron.pretraining.config import ConfigError, together
from megatron.pretraining.config.deterministic import deterministic_environment, may_differ
from megatron.pretraining.process import initialize
from tests.unit.pretraining.flags import parse

SET = {"NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}


def test_what_is_not_given_is_set_and_what_fits_stays():
    config = parse("--deterministic-mode")
    assert deterministic_environment(config, {}) == SET
    given = {"NCCL_ALGO": "ring", "CUBLAS_WORKSPACE_CONFIG": ":16:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    assert deterministic_environment(config, given) == {}


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("NCCL_ALGO", "Tree"), ("NCCL_ALGO", "Ring,Tree"), ("NCCL_ALGO", ""), ("CUBLAS_WORKSPACE_CONFIG", ":0:0"),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1"),
    ],
)  # fmt: skip
def test_what_contradicts_is_refused_in_one_sentence(variable, value):
    with pytest.raises(ConfigError, match=f"cannot go with {variable}={value}: .*make it {SET[variable]}") as refused:
        deterministic_environment(parse("--deterministic-mode"), {variable: value})
    assert str(refused.value).count(". ") == 0


def test_kernels_that_promise_nothing_are_refused(monkeypatch):
    monkeypatch.setattr(together, "installed", lambda package: True)
    config = parse("--deterministic-mode --expert-model-parallel-size 2").replace(
        "moe", moe_token_dispatcher_type="flex"
    )
    with pytest.raises(ConfigError, match="choose alltoall or allgather"):
        deterministic_environment(config, {})


def test_exact_recovery_without_the_flag_is_warned_of():
    exact, lossy = "--ckpt-policy full --save x", "--ckpt-policy pec --save x"
    assert "pass it for bit-identical recovery" in str(may_differ(parse(exact)))
    assert may_differ(parse(f"{exact} --deterministic-mode")) is may_differ(parse(lossy)) is may_differ(parse()) is None


def test_a_process_becomes_deterministic(monkeypatch):
    """No kernel is generated, and no memory filled: the first of a shape may come in another order after a resume."""
    for variable in SET:
        monkeypatch.delenv(variable, raising=False)
    compiling = []

    def traced(x: torch.Tensor) -> torch.Tensor:
        compiling.append(torch.compiler.is_compiling())
        return x + 1

    compiled = torch.compile(traced, backend="eager")
    try:
        initialize.be_deterministic(parse("--deterministic-mode"))
        assert {variable: initialize.os.environ[variable] for variable in SET} == SET
        compiled(torch.ones(2))
        assert compiling == [False]
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.compiler.set_stance("default")
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.use_deterministic_algorithms(False)
        for variable in SET:  # also what monkeypatch did not see being set
            initialize.os.environ.pop(variable, None)
