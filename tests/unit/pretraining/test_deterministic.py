"""What --deterministic-mode sets on CUDA, and what it refuses."""

import torch

from megatron.pretraining.config.deterministic import (
    about_bits,
    deterministic_environment,
    deterministic_if_exact,
    is_exact,
)
from megatron.pretraining.process import initialize
from tests.cases import each_row
from tests.errors import raises
from tests.unit.pretraining.flags import assert_refused, parse, refusal

SET = {"NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}


def test_missing_variables_are_set_and_compatible_ones_kept():
    config = parse("--deterministic-mode")
    assert deterministic_environment(config, {}) == SET
    given = {"NCCL_ALGO": "ring", "CUBLAS_WORKSPACE_CONFIG": ":16:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    assert deterministic_environment(config, given) == {}
    for value in ("^NVLS", "CollnetDirect", "CollnetChain"):  # as Megatron-LM accepts
        assert deterministic_environment(config, given | {"NCCL_ALGO": value}) == {}


@each_row(
    ("variable", "value"),
    [
        ("NCCL_ALGO", "Tree"), ("NCCL_ALGO", "Ring,Tree"), ("NCCL_ALGO", ""), ("CUBLAS_WORKSPACE_CONFIG", ":0:0"),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1"),
    ],
)  # fmt: skip
def test_conflicting_variable_is_refused_by_name(variable, value):
    with raises("environment-not-deterministic", f"{variable}={value}", SET[variable]):
        deterministic_environment(parse("--deterministic-mode"), {variable: value})


def test_nondeterministic_dispatcher_is_refused():
    config = parse("--deterministic-mode").replace("moe", moe_token_dispatcher_type="flex")
    with raises("dispatcher-not-deterministic", "--moe-token-dispatcher-type flex"):
        deterministic_environment(config, {})


EXACT, LOSSY, ALLOW = "--ckpt-policy full --save x", "--ckpt-policy pec --save x", "--allow-nondeterministic"


@each_row(
    ("flags", "cuda", "on", "exact"),
    [
        (EXACT, True, True, True),
        (EXACT.replace("full", "auto"), True, True, True),
        (EXACT, False, False, True),
        (f"{EXACT} {ALLOW}", True, False, False),
        (f"{EXACT} {ALLOW}", False, False, False),
        (LOSSY, True, False, False),
        (f"{LOSSY} --deterministic-mode", True, True, False),
        ("", True, False, None),
    ],
)
def test_exact_policies_turn_on_deterministic_mode(flags, cuda, on, exact):
    config = deterministic_if_exact(parse(flags), cuda)
    assert config.training.deterministic_mode == on and is_exact(config, cuda) is exact


def test_log_names_bits_that_recovery_restores():
    assert ALLOW in about_bits(deterministic_if_exact(parse(EXACT), cuda=True))
    warning = about_bits(deterministic_if_exact(parse(f"{EXACT} {ALLOW}"), cuda=True))
    assert warning.startswith("WARNING") and ALLOW in warning
    assert about_bits(parse(LOSSY)) is about_bits(parse()) is None


def test_contradicting_flags_are_refused():
    assert_refused(refusal(f"--deterministic-mode {ALLOW}"), f"flags-exclude-each-other {ALLOW}")


def test_exact_policy_refusal_names_flag():
    config = deterministic_if_exact(parse(EXACT), cuda=True)
    with raises("environment-not-deterministic", ALLOW):
        deterministic_environment(config, {"NCCL_ALGO": "Tree"})
    assert not deterministic_if_exact(parse(f"{EXACT} {ALLOW}"), cuda=True).training.deterministic_mode


def test_deterministic_mode_is_applied_to_process(monkeypatch):
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
