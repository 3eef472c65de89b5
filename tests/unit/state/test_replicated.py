"""The state of a plain model: each element once, in the right place, whatever the detail."""

import pytest
import torch

from moc.state.operators import Detail
from moc.state.replicated import ReplicatedState
from tests.cases import each_row
from tests.errors import raises
from tests.fake_cuda import GPU, FakeCuda

NAMES = ("embedding.weight", "decoder.layers.0.mlp.router.weight", "decoder.layers.0.mlp.experts.experts.1.weight",
         "output_layer.weight")  # fmt: skip
OPERATORS = ["embedding", "layers.0.router", "layers.0.expert.1", "output"]


def made(rank=0):
    torch.manual_seed(0)
    parameters = {name: torch.nn.Parameter(torch.randn(number + 2, 3)) for number, name in enumerate(NAMES)}
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.1)
    return parameters, optimizer, ReplicatedState(parameters, optimizer, rank)


def update(parameters, optimizer):
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_counts_on_device_are_read_together():
    parameters, optimizer, state = made()
    update(parameters, optimizer)
    assert set(state.steps().values()) == {1}
    gpu = FakeCuda()
    with gpu:
        for moments in optimizer.state.values():
            moments["step"] = torch.zeros((), device=GPU)
        with gpu.measured():
            assert set(state.steps()) == set(OPERATORS)
    assert len(gpu.waits) == 1


def test_operators_follow_from_parameter_names():
    state = made()[2]
    assert state.operators() == OPERATORS
    described = state.described()
    assert [(one.kind, one.layer, one.expert) for one in described] == [
        ("embedding", None, None), ("router", 0, None), ("expert", 0, 1), ("output", None, None)
    ]  # fmt: skip
    assert [one.parameters for one in described] == [6, 9, 12, 15]
    with raises("parameter-unknown", "head.weight"):
        ReplicatedState({"head.weight": torch.nn.Parameter(torch.zeros(1))}, torch.optim.Adam([torch.zeros(1)]), 0)


@each_row(
    ("detail", "slots"),
    [
        (Detail.FULL, ["master", "exp_avg", "exp_avg_sq"]),
        (Detail.MASTER, ["master"]),
        (Detail.MOMENTS, ["exp_avg", "exp_avg_sq"]),
        (Detail.COMPUTE, ["param"]),
        (Detail.GRAD, ["grad"]),
    ],
    ids=str,
)
def test_chunks_are_complete_views_of_live_state(detail, slots):
    parameters, optimizer, state = made()
    update(parameters, optimizer)
    found = list(state.fragments(OPERATORS[1:3], detail))
    assert {one.operator for one in found} == set(OPERATORS[1:3]) and {one.slot for one in found} == set(slots)
    for one in found:
        assert one.region.shape == one.global_shape == tuple(parameters[one.name].shape) and one.first_copy
        live = optimizer.state[parameters[one.name]] | {"master": parameters[one.name], "param": parameters[one.name]}
        live["grad"] = parameters[one.name].grad
        assert one.view.data_ptr() == live[one.slot].data_ptr() and one.view.numel() == live[one.slot].numel()


def test_other_rank_has_no_first_copies():
    assert not any(one.first_copy for one in made(rank=1)[2].fragments(OPERATORS, Detail.FULL))


def test_loaded_state_trains_identically():
    parameters, optimizer, state = made()
    update(parameters, optimizer)
    saved = {(one.name, one.slot): one.view.clone() for one in state.fragments(OPERATORS, Detail.FULL)}
    steps = state.steps()
    assert set(steps.values()) == {1}
    others, other, fresh = made()
    for one in fresh.fragments(OPERATORS, Detail.FULL):
        fresh.load(one, saved[one.name, one.slot])
    fresh.set_steps(steps)
    for pair in ((parameters, optimizer), (others, other)):
        update(*pair)
    assert all(torch.equal(parameters[name], others[name]) for name in NAMES)
    one = next(fresh.fragments(OPERATORS, Detail.FULL))
    with pytest.raises(ValueError, match="takes 6 elements"):
        fresh.load(one, torch.zeros(5))
    with pytest.raises(ValueError, match="of torch.float32"):
        fresh.load(one, torch.zeros(6, dtype=torch.float64))


def test_freezing_is_refused():
    state = made()[2]
    state.freeze([])
    state.activate(state.frozen)
    with raises("freezing-unsupported", "layers.0.router"):
        state.freeze(["layers.0.router"])


def test_gradients_can_be_loaded_without_backward_pass():
    parameters, optimizer, _ = made()
    fresh, other, state = made()
    kept = {name: torch.randn_like(parameter) for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        parameter.grad = kept[name].clone()
    for one in state.fragments(OPERATORS, Detail.GRAD):
        state.load(one, kept[one.name])
    optimizer.step()
    other.step()
    assert all(torch.equal(parameters[name], fresh[name]) for name in NAMES)


SGD = [dict(momentum=0.9), dict(momentum=0.9, nesterov=True, weight_decay=0.1), dict(momentum=0.9, foreach=True), {}]
OPTIMIZERS = [
    *((torch.optim.SGD, more) for more in SGD),
    *((kind, dict(amsgrad=amsgrad)) for kind in (torch.optim.Adam, torch.optim.AdamW) for amsgrad in (False, True)),
    *((kind, {}) for kind in (torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adadelta, torch.optim.RMSprop)),
    (torch.optim.Rprop, {}),
    (torch.optim.RMSprop, dict(momentum=0.9, centered=True)),
    (torch.optim.Muon, {}),
    (torch.optim.Adagrad, dict(initial_accumulator_value=0.5, lr_decay=0.1)),
]


def bits(parameters, optimizer):
    """All that goes on: weights and moments, in which -0.0 is not 0.0."""
    states = [optimizer.state[one] for one in parameters.values()]
    tensors = [one for state in states for slot, one in sorted(state.items()) if slot != "step" and one is not None]
    return [one.detach().numpy().tobytes() for one in (*parameters.values(), *tensors)]


@each_row(("kind", "more"), OPTIMIZERS, ids=str)
@each_row("updates", [0, 1, 2])
def test_optimizer_state_trains_and_restores_as_torch(kind, more, updates):
    def begun():
        parameters = {name: one for name, one in made()[0].items() if kind is not torch.optim.Muon or one.ndim == 2}
        return parameters, kind(parameters.values(), lr=0.1, **more)

    def go_on(parameters, optimizer, iteration):
        torch.manual_seed(iteration)
        for parameter in parameters.values():
            parameter.grad = torch.randn_like(parameter)
            parameter.grad[0] = -0.0
        optimizer.step()

    (plain, torchs), (lost, its), (found, other) = begun(), begun(), begun()
    state, fresh = ReplicatedState(lost, its, 0), ReplicatedState(found, other, 0)
    views = list(state.fragments(OPERATORS, Detail.FULL))  # stay valid
    for iteration in range(updates):
        go_on(plain, torchs, iteration)
        go_on(lost, its, iteration)
    assert not updates or bits(plain, torchs) == bits(lost, its)
    saved = {(one.name, one.slot): one.view.clone() for one in views}
    for one in fresh.fragments(OPERATORS, Detail.FULL):
        fresh.load(one, saved[one.name, one.slot])
    fresh.set_steps(state.steps())
    for iteration in range(updates, 4):
        go_on(plain, torchs, iteration)
        go_on(found, other, iteration)
    assert bits(plain, torchs) == bits(found, other)


@each_row(
    ("kind", "more", "said"),
    [(torch.optim.NAdam, {}, "NAdam"), (torch.optim.SGD, dict(momentum=0.9, dampening=0.1), "dampening")],
    ids=str,
)
def test_unknown_optimizer_is_refused(kind, more, said):
    parameters = made()[0]
    with raises("optimizer-unsupported", said, "TrainingState"):
        ReplicatedState(parameters, kind(parameters.values(), lr=0.1, **more), 0)


def test_unnamed_updated_parameter_is_refused():
    parameters = made()[0]
    named = {name: one for name, one in parameters.items() if name != NAMES[2]}
    with raises("parameter-unnamed", "2 of group 0", "(4, 3)"):
        ReplicatedState(named, torch.optim.SGD(parameters.values(), lr=0.1), 0)
    with raises("parameter-unnamed", NAMES[2]):
        ReplicatedState(named, torch.optim.SGD(parameters.items(), lr=0.1), 0)


def test_buffers_are_saved_without_optimizer_state():
    buffer = {"decoder.layers.0.mlp.router.bias": torch.ones(3)}
    parameters, optimizer, _ = made()
    state = ReplicatedState(parameters | buffer, optimizer, 0)
    slots = {detail: [f.slot for f in state.fragments(OPERATORS, detail) if f.name in buffer] for detail in Detail}
    assert slots == {Detail.FULL: ["master"], Detail.MASTER: ["master"], Detail.MOMENTS: [],
                     Detail.COMPUTE: ["param"], Detail.GRAD: []}  # fmt: skip


def test_parameter_without_gradient_hides_no_other_update():
    parameters = made()[0] | {"output_layer.bias": torch.nn.Parameter(torch.zeros(3))}
    optimizer = torch.optim.Adam(parameters.values())
    state = ReplicatedState(parameters, optimizer, 0)
    update({name: one for name, one in parameters.items() if name in NAMES}, optimizer)
    assert state.steps()["output"] == 1
