"""Names, positions and refusals of moc.torch, without workers."""

import contextlib
import random
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

import moc.torch as ft
from moc.errors import UserError, code_of
from moc.inspect import verify
from moc.runtime.job import World
from moc.runtime.process_group import DEFERRAL, PeerFailure
from moc.state.operators import Detail, UnsupportedStateError
from moc.state.record import Position, StepRecord
from moc.state.replicated import SavedTensor, TorchState
from moc.store.storage import LocalStorage
from moc.store.store import Store
from moc.torch.data import MAX_BYTES, Batches, DealtBatches, decode_plain, encode_plain
from moc.torch.engine import Loop, LoopEngine, average_gradients, clip_gradients
from moc.torch.loop import without_waiting
from moc.torch.naming import Router, structure_of
from moc.torch.routing import RouterCounter
from tests.cases import each_row
from tests.fake_cuda import GPU, FakeCuda
from tests.integration.own_loop import Counting, Model, Noisy, loss_of


@pytest.fixture(autouse=True)
def no_job_is_left(monkeypatch):
    """Each test joins a job of its own, of one process."""
    monkeypatch.setattr("moc.torch.loop._job", None)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def operators(model, patterns=None):
    """By operator, the names of its tensors."""
    found = {}
    for named in structure_of(model, patterns).tensors:
        found.setdefault(named.operator, []).append(named.name)
    return found


def test_blocks_routers_and_experts_are_found():
    found = operators(Model("list"))
    assert list(found)[0] == "embedding" and list(found)[-1] == "output"
    assert found["layers.1.expert.3"] == ["blocks.1.experts.3.weight", "blocks.1.experts.3.bias"]
    assert found["layers.0.router"] == ["blocks.0.gate.weight", "blocks.0.gate.bias"]
    assert "blocks.0.norm.weight" in found["layers.0.mlp"] and "norm.running_mean" in found["output"]
    stacked = structure_of(Model("stacked"))
    assert [(one.layer, one.experts) for one in stacked.routers] == [(0, 4), (1, 4)]
    assert {one.index for one in stacked.tensors if one.operator.startswith("layers.0.expert.")} == {0, 1, 2, 3}


class Stacked(nn.Module):
    """Stacked experts next to their router, and a convolution with as many rows."""

    def __init__(self):
        super().__init__()
        self.w1, self.gate, self.norm = nn.Parameter(torch.zeros(4, 2, 2)), nn.Linear(2, 4), nn.LayerNorm(4)
        self.mix = nn.Conv1d(4, 4, 1)


def test_blocks_in_module_dict_and_router_experts_are_found():
    """nanoGPT keeps its blocks in a ModuleDict of different modules."""
    parts = {"wte": nn.Embedding(3, 2), "h": nn.ModuleList(Stacked() for _ in range(2)), "ln": nn.LayerNorm(2)}
    structure = structure_of(nn.ModuleDict({"transformer": nn.ModuleDict(parts)}))
    assert [(one.layer, one.module, one.experts) for one in structure.routers] == [
        (layer, f"transformer.h.{layer}.gate", 4) for layer in (0, 1)
    ]
    found = operators(nn.ModuleDict({"transformer": nn.ModuleDict(parts)}))
    assert found["layers.1.expert.3"] == ["transformer.h.1.w1"] and found["output"][0] == "transformer.ln.weight"
    assert [name.rpartition(".")[2] for name in found["layers.0.mlp"]] == ["weight", "bias"] * 2
    two_in_a_layer = nn.ModuleDict({"blocks": nn.ModuleList([nn.Sequential(Stacked(), Stacked())])})
    assert not structure_of(two_in_a_layer).routers  # their tokens cannot be told apart


def test_top_level_modules_are_blocks_and_patterns_take_priority():
    net = nn.Sequential(nn.Linear(2, 3), nn.GELU(), nn.Linear(3, 1))
    assert operators(net) == {"layers.0.mlp": ["0.weight", "0.bias"], "layers.1.mlp": ["2.weight", "2.bias"]}
    found = operators(net, {"N.weight": "layers.N.attention", "0.bias": "layers.0.expert.*"})
    assert found["layers.2.attention"] == ["2.weight"] and found["layers.0.expert.2"] == ["0.bias"]


@each_row("patterns", [{"x.*": "output"}, {"0.weight": "layers.N.mlp"}, {"0.weight": "strange"}], ids=str)
def test_invalid_operator_pattern_is_refused(patterns):
    with pytest.raises(UnsupportedStateError) as refused:
        structure_of(nn.Sequential(nn.Linear(2, 3)), patterns)
    assert refused.value.code == "operator-pattern-invalid"


def sampler(generator=None):
    return BatchSampler(RandomSampler(range(20), generator=generator), 3, drop_last=True)


KINDS = {
    "loader": lambda: DataLoader(Noisy(), batch_size=3, shuffle=True, drop_last=True),
    "workers": lambda: DataLoader(Noisy(), batch_size=30, shuffle=True, num_workers=1),
    "single": lambda: DataLoader(Noisy(), batch_size=None),
    "generator": lambda: sampler(torch.Generator()),
    "sampler": sampler,
    "list": lambda: [1, 2, 3],
    "function": lambda: lambda position: iter([position, position + 1]),
    "random": lambda: lambda position: (torch.rand(3) for _ in range(99)),
    "nothing": lambda: None,
    "dealt": lambda: DataLoader(Noisy(), batch_sampler=DealtBatches(sampler(), 0, 1, 2)),
}  # fmt: skip


def plain(batch):
    return batch.tolist() if torch.is_tensor(batch) else batch


@each_row("kind", KINDS)
def test_batches_depend_only_on_position(kind):
    """Also over the end of an epoch, and whatever random numbers the loop draws."""
    whole = Batches(KINDS[kind](), seed=3, rank=0)
    whole.begin(0)
    all_of_them = [plain(whole.take()) for _ in range(10)]
    for position in (0, 4, 9):
        again = Batches(KINDS[kind](), seed=3, rank=0)
        torch.manual_seed(position), random.seed(position), np.random.seed(position)
        again.begin(position)
        assert [plain(again.take()) for _ in range(10 - position)] == all_of_them[position:]


def test_workers_share_batches_of_epoch():
    dealt = [[*DealtBatches(BatchSampler(RandomSampler(range(20)), 2, False), 5, rank, 2)] for rank in (0, 1)]
    assert sorted(index for of_rank in dealt for batch in of_rank for index in batch) == [*range(20)]


class Endless(IterableDataset):
    """Samples without a position."""

    def __iter__(self):
        yield 1


class Unplain:
    """Has a state that is no plain value."""

    def state_dict(self):
        return {"state": object()}

    def load_state_dict(self, state_dict): ...


class Large(Unplain):
    """Returns new and large tensors each time."""

    def state_dict(self):
        return {"state": torch.zeros(MAX_BYTES)}


def refusals():
    model, single = nn.Linear(2, 2), [torch.zeros(1, 2)]
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    protect = lambda model=model, optimizer=sgd, data=single, **more: ft.protect(  # noqa: E731
        model, optimizer, **{"data": data, "iterations": 1, "policy": None} | more
    )
    transposed = nn.Linear(2, 3)
    transposed.weight = nn.Parameter(torch.zeros(2, 3).t())
    moe = Model("list")
    bubbles = {"hide": "bubble", "bubble_share": 0.2}
    sparse = {"policy": "sparse", "forward": lambda model, batch: model(batch).sum()}
    of_moe = lambda **more: protect(moe, torch.optim.SGD(moe.parameters(), lr=0.1), **more)  # noqa: E731

    def partitioned(**more):
        ft.init()
        sharded = fully_shard(nn.Linear(2, 2))
        return protect(sharded, torch.optim.SGD(sharded.parameters(), lr=0.1), **more)

    def two_runs():
        batches = [iter(protect(iterations=2)) for _ in range(2)]
        list(map(next, batches))

    return [
        ("loop-call-unsupported", two_runs),
        ("data-without-position", lambda: protect(data=DataLoader(Endless()))),
        ("data-without-position", lambda: protect(data=iter([1]))),
        ("data-without-position", lambda: protect(data=Noisy)),
        ("data-without-position", lambda: protect(data=[])),
        ("parameter-not-contiguous", lambda: protect(transposed, torch.optim.SGD(transposed.parameters(), lr=0.1))),
        ("loop-policy-unsupported", lambda: protect(policy="sparse")),
        ("loop-policy-unsupported", lambda: protect(policy="gradient")),
        ("loop-policy-unsupported", lambda: protect(policy="auto")),
        ("loop-policy-unsupported", lambda: of_moe(policy="selective", options={"gradients": True})),
        ("loop-policy-unsupported", lambda: of_moe(policy="selective", options=bubbles)),
        ("loop-policy-unsupported", lambda: of_moe(**sparse, wrap=nn.parallel.DistributedDataParallel)),
        ("loop-policy-unsupported", lambda: of_moe(**sparse, grouped=True)),
        ("loop-policy-unsupported", lambda: of_moe(**sparse, state={"ema": moe})),
        ("loop-policy-unsupported", lambda: of_moe(**sparse, data=Counting(0))),
        ("loop-policy-unsupported", lambda: of_moe(**sparse).reduce()),
        ("loop-policy-unsupported", lambda: partitioned(**sparse)),
        ("loop-call-unsupported", lambda: protect(optimizer=[sgd, sgd])),
        ("loop-call-unsupported", lambda: protect(scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(sgd))),
        ("optimizer-unsupported", lambda: protect(optimizer=torch.optim.NAdam(model.parameters()))),
        ("optimizer-unsupported", lambda: protect(optimizer=torch.optim.LBFGS(model.parameters()))),
        ("state-not-plain", lambda: encode_plain("it", Unplain().state_dict())),
        ("state-not-plain", lambda: encode_plain("it", Large().state_dict())),
        ("router-unknown", lambda: RouterCounter(moe, (), [0], 1)),
        ("router-unknown", lambda: RouterCounter(nn.Sequential(nn.Linear(2, 4)), [Router(0, "0", 4)], [0], None)),
    ]


@each_row("number", range(25))
def test_inexact_setup_is_refused_before_training(number):
    code, attempt = refusals()[number]
    with pytest.raises(UserError) as refused:
        attempt()
    assert code_of(refused.value) == code


BODIES = {
    "without a step": "loop-step-missing",
    "with another digest": "loop-state-differs",
    "with two steps": "loop-call-unsupported",
    "with an early reduce": "loop-call-unsupported",
    "with another parameter": "loop-call-unsupported",
}


@each_row("body", BODIES)
def test_loop_body_that_breaks_rules_is_refused(body, tmp_path, monkeypatch):
    monkeypatch.setattr("moc.torch.loop._job", None)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    settings = {"iterations": 3, "accumulate": 1 + (body == "with an early reduce"), "policy": None}
    run = ft.protect(model, optimizer, data=[torch.zeros(1, 2)], directory=str(tmp_path), **settings)
    if body == "with another digest":
        summed = lambda values, world: dict(values, digest=1.0, digest_squared=2.0)  # noqa: E731
        monkeypatch.setattr("moc.torch.loop.sum_over_workers", summed)
    with pytest.raises(UserError) as refused:
        for batch in run:
            model(batch).sum().backward()
            if body == "with another digest":
                assert not run.step()
            if body == "with two steps":
                assert run.step() and run.step()
            if body == "with an early reduce":
                run.reduce()
            if body == "with another parameter":
                optimizer.add_param_group({"params": [model.bias]})
                assert not run.step()
    assert code_of(refused.value) == BODIES[body]
    dist.destroy_process_group()


class Averages:
    """An EMA whose tensors are replaced, as in many tutorials."""

    def __init__(self, model):
        self.shadow = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def update(self, model):
        for name, parameter in model.named_parameters():
            self.shadow[name] = (0.5 * self.shadow[name] + 0.5 * parameter.detach()).clone()

    def state_dict(self):
        return self.shadow

    def load_state_dict(self, state):
        self.shadow = dict(state)


class Grown(nn.Module):
    """Has an unused part, a complex parameter, and buffers of many dtypes that the loop changes after an update."""

    DTYPES = (torch.bool, torch.int8, torch.int16, torch.int32, torch.uint16, torch.complex64, torch.float8_e5m2)

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(2, 1), nn.Linear(2, 1)
        self.waves = nn.Parameter(torch.rand(2, dtype=torch.complex64))
        for number, dtype in enumerate(self.DTYPES):
            self.register_buffer(f"buffer{number}", torch.zeros((), dtype=dtype))

    def forward(self, inputs):
        return self.used(inputs) + self.waves.abs().sum()


def test_restarted_loop_continues_from_what_body_has_left(tmp_path):
    """Averages are replaced, buffers change after step(), and the optimizer has updates from before the run."""

    def begin(iterations):
        model = Grown()
        optimizer, averages = torch.optim.AdamW(model.parameters()), Averages(model)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        state = {"averages": averages}
        run = ft.protect(model, optimizer, state=state, iterations=iterations, directory=str(tmp_path))
        return run, model, optimizer, averages

    run, model, optimizer, averages = begin(2)
    for _ in run:
        run.model(torch.ones(1, 2)).sum().backward()
        assert run.step()
        averages.update(model)
        for buffer in model.buffers():
            buffer.fill_(run.iteration)
    again, resumed, resumed_optimizer, resumed_averages = begin(3)
    assert again.resume() == 2
    assert all(buffer.item() == torch.tensor(2).to(buffer.dtype).item() for buffer in resumed.buffers())
    for (name, parameter), other in zip(model.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(parameter, other) and torch.equal(averages.shadow[name], resumed_averages.shadow[name])
        state, others = optimizer.state[parameter], resumed_optimizer.state[other]
        assert state["step"] == others["step"] == (1 if name.startswith("unused") else 3)
        assert torch.equal(state["exp_avg"], others["exp_avg"])
    dist.destroy_process_group()


def test_replay_computes_update_of_the_loop(tmp_path):
    """With a scaler, and gradients that are added."""
    model = Model("list")
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    options = {"policy": "sparse", "options": {"window": 2}, "forward": loss_of, "directory": str(tmp_path)}
    run = ft.protect(
        model, optimizer, data=DataLoader(Noisy(), batch_size=8), scaler=scaler, accumulate=2, iterations=2, **options
    )
    run.resume()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for batch in run:
        if run.iteration:
            break  # the first iteration is committed
        scaler.scale(loss_of(run.model, batch)).backward()
        run.step()
    updated = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(before)
    run._engine.capture()
    record = StepRecord(**dict.fromkeys(StepRecord.__dataclass_fields__, 0))
    run._engine.replay(record, Position(), contextlib.nullcontext)
    assert not torch.equal(before["head.weight"], updated["head.weight"])
    assert all(torch.equal(updated[name], tensor) for name, tensor in model.state_dict().items())


def test_data_continue_after_change_of_accumulation(tmp_path):
    seen = []
    for accumulate, iterations in [(2, 2), (1, 3)]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = ft.protect(model, optimizer, accumulate=accumulate, iterations=iterations, directory=str(tmp_path))
        for batch in run:
            seen.append(batch)
            model(torch.ones(1)).sum().backward()
            run.step()
    assert seen == [0, 1, 2, 3, 4]


def test_each_backward_of_grouped_batches_averages_gradients(tmp_path):
    model = nn.Linear(2, 1)
    wrap, optimizer = nn.parallel.DistributedDataParallel, torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"accumulate": 2, "grouped": True, "policy": None, "directory": str(tmp_path)}
    run = ft.protect(model, optimizer, wrap=wrap, iterations=1, **options)
    for _ in run:
        assert run.model.require_backward_grad_sync
        run.step()


def test_operators_without_elements_on_this_worker_are_updated(tmp_path):
    """FSDP2 leaves workers without rows of a small layer; all workers clip and count the same parameters."""
    model = nn.Sequential(nn.Linear(2, 1), nn.ParameterList([torch.zeros(0, 2)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = ft.protect(model, optimizer, iterations=1, policy=None, directory=str(tmp_path))
    assert len(run._engine.parameters) == 3
    for _ in run:
        model[0](torch.ones(1, 2)).sum().backward()
        assert run.step()


def test_samples_of_batch_have_random_numbers_of_their_own():
    """Also if a sampler returns NumPy's integers."""
    batches = Batches(DataLoader(Noisy(), batch_size=4, sampler=np.zeros(8, dtype=np.int64)), 0, 0)
    batches.begin(0)
    assert len({tuple(sample.tolist()) for sample in batches.take()}) > 1


def test_updates_are_counted_exactly_with_half_precision():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.set_default_dtype(torch.bfloat16)
    try:
        TorchState([SavedTensor.replicated(f"output_layer.{n}", p, 0) for n, p in model.named_parameters()], optimizer)
    finally:
        torch.set_default_dtype(torch.float32)
    assert optimizer.state[model.weight]["step"].dtype == torch.float32


def test_gradients_are_averaged_and_training_can_end_early(tmp_path):
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run = ft.protect(
        model, optimizer, data=[torch.ones(1, 2)], iterations=9, accumulate=2, policy=None, directory=str(tmp_path)
    )
    assert run.resume() == 0
    before = model.weight.detach().clone()
    batches = iter(run)
    for batch in batches:
        model(batch).sum().backward()
        if run.is_last_batch:
            assert run.reduce() and model.weight.grad.tolist() == [[2.0, 2.0]]
            model.weight.grad.zero_().add_(1)
        run.step()
        if run.iteration == 2:
            break
    run.finish()
    assert run.iteration == 2 and torch.equal(model.weight, before - 1)


def test_wrapped_model_is_refused():
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    with pytest.raises(UserError) as refused:
        ft.protect(wrapped, None, data=[1])
    assert code_of(refused.value) == "loop-wrapped-too-early"


def test_parameter_on_some_workers_only_is_refused():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        weights = nn.Parameter(distribute_tensor(torch.zeros(4), init_device_mesh("cpu", (1,)), [Shard(0)]))
        net = nn.Module()
        net.weights = weights
        world = World.replicas(SimpleNamespace(rank=0, size=2), torch.device("cpu"))
        loop = Loop(model=net, optimizer=torch.optim.SGD([weights], lr=0.1))
        with pytest.raises(UnsupportedStateError) as refused:
            LoopEngine(world, loop, structure_of(net), Batches([1], 0, 0))
    finally:
        dist.destroy_process_group()
    assert refused.value.code == "mesh-unsupported"


def test_plain_and_sharded_gradients_are_clipped_to_common_norm():
    ft.init()
    plain, mesh = nn.Parameter(torch.zeros(1)), init_device_mesh("cpu", (1,))
    sharded = nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Shard(0)]))
    plain.grad, sharded.grad = torch.tensor([3.0]), distribute_tensor(torch.tensor([0.0, 4.0]), mesh, [Shard(0)])
    clip_gradients([plain, sharded], 1.0)
    assert plain.grad.item() == pytest.approx(0.6) and sharded.grad.to_local().tolist()[1] == pytest.approx(0.8)


def test_snapshot_of_another_optimizer_is_refused(tmp_path):
    model = nn.Linear(2, 1)

    def train(kind, iterations, **more):
        run = ft.protect(model, kind(model.parameters()), iterations=iterations, directory=str(tmp_path), **more)
        for _ in run:
            model(torch.ones(1, 2)).sum().backward()
            run.step()

    train(torch.optim.RMSprop, 1)
    train(torch.optim.RMSprop, 2)
    assert verify.main([str(tmp_path)]) == 0
    in_groups = lambda parameters: torch.optim.RMSprop([{"params": [one]} for one in parameters])  # noqa: E731
    for kind, more in [(torch.optim.AdamW, {}), (in_groups, {}), (torch.optim.RMSprop, {"state": {"x": Counting(0)}})]:
        with pytest.raises(UserError) as refused:
            train(kind, 3, **more)
        assert code_of(refused.value) == "checkpoint-of-another-model"


def test_buffers_of_any_dtype_are_restored(tmp_path):
    buffers = {
        "mask": torch.tensor([True, False, True]),
        "steps": torch.tensor(7, dtype=torch.int32),
        "rotations": torch.tensor([1 + 2j]),
        "scales": torch.tensor([0.5]).to(torch.float8_e5m2),
    }

    def train(values, iterations):
        model = nn.Linear(2, 1)
        for name, value in values.items():
            model.register_buffer(name, value.clone())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = ft.protect(model, optimizer, data=[torch.ones(1, 2)] * 2, iterations=iterations, directory=str(tmp_path))
        for batch in run:
            run.model(batch).sum().backward()
            run.step()
        return dict(model.named_buffers())

    train(buffers, 1)
    restored = train({name: torch.zeros_like(value) for name, value in buffers.items()}, 2)
    assert {name: value.tolist() for name, value in restored.items()} == {
        name: value.tolist() for name, value in buffers.items()
    }


def test_last_partial_snapshot_stays_on_full_disk(tmp_path, monkeypatch):
    """The full snapshot at the end has the same name, and its larger files do not fit."""
    monkeypatch.setattr("moc.session.saving.pipeline.LAST_TRIES_S", ())
    free_bytes, is_full = LocalStorage.free_bytes, threading.Event()

    def full_after_last_iteration(storage):
        if (storage.root / "iter_0000003" / "manifest.json").exists():
            is_full.set()
        return 100 if is_full.is_set() else free_bytes(storage)

    monkeypatch.setattr(LocalStorage, "free_bytes", full_after_last_iteration)
    model = Model("list")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.arange(72).view(8, 9) % 32] * 3
    options = {"policy": "pec", "options": {"k": 1}, "tier": "disk", "iterations": 3, "directory": str(tmp_path)}
    run = ft.protect(model, optimizer, data=batches, **options)
    with pytest.raises(UserError, match="of iteration 3, is not saved .the newest one there is of iteration 3"):
        for tokens in run:
            run.model(tokens).sum().backward()
            run.step()
    assert Store(LocalStorage(tmp_path)).read_manifest(3).iteration == 3


def test_scaler_unscales_again_after_interrupted_iteration(tmp_path):
    """The update of the interrupted iteration, which would let it unscale again, is missing."""
    model, scaler = nn.Linear(2, 1, bias=False), torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run = ft.protect(model, optimizer, scaler=scaler, iterations=2, policy=None, directory=str(tmp_path))
    before, is_first = model.weight.detach().clone(), True
    for _ in run:
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        assert run.reduce() and model.weight.grad.tolist() == [[1.0, 1.0]]
        if is_first:
            run._engine.begin(Position())  # as a recovery does
            scaler.scale(model(torch.ones(1, 2)).sum()).backward()
            assert run._engine.reduce() and model.weight.grad.tolist() == [[1.0, 1.0]]
        is_first = not run.step()
    assert torch.equal(model.weight, before - 1) and scaler.get_scale() == 8.0


def test_states_are_encoded_without_loss():
    state = {"a": (1, [2.5, float("inf")], None), "t": torch.arange(3), "s": torch.tensor(2.0), "n": np.arange(2.0)}
    again = decode_plain(encode_plain("it", state))
    assert again["a"] == state["a"] and torch.equal(again["t"], state["t"]) and again["s"] == 2.0
    assert again["s"].shape == () and np.array_equal(again["n"], state["n"])


def test_tokens_are_counted_for_each_expert():
    model = Model("list")
    routers = structure_of(model).routers
    counter = RouterCounter(model, routers, [0, 1], None)
    model(torch.zeros(2, 5, dtype=torch.int64))
    with torch.no_grad():
        model(torch.zeros(2, 5, dtype=torch.int64))
    tally = counter.take()
    counts, sent = counter.by_layer({name: values.tolist() for name, values in tally.items()})
    assert sent == {0: 10, 1: 10} and sum(counts[0]) == 10
    assert 0 < sum(counter.probabilities(tally)[0]) <= 10
    counter.close()
    model(torch.zeros(2, 5, dtype=torch.int64))
    assert sum(counter.by_layer(counter.take())[1].values()) == 0


def test_tokens_are_counted_without_waits():
    gpu = FakeCuda()
    with gpu:
        router = nn.Linear(8, 4, device=GPU)
        counter = RouterCounter(nn.ModuleList([router]), [Router(0, "0", 4)], [0], 1)
        for _ in range(2):
            with gpu.measured():
                router(torch.zeros(10, 8, device=GPU))
                taken = counter.take()
        assert not gpu.waits and {values.device.type for values in taken.values()} == {GPU}


def test_average_reads_only_which_parameters_have_gradients(monkeypatch):
    gpu, sums = FakeCuda(), []
    monkeypatch.setattr("moc.torch.engine.dist.all_reduce", lambda values, group: sums.append((values.device, group)))
    monkeypatch.setattr("moc.torch.engine.copy_to_host", lambda values: values.cpu())
    monkeypatch.setattr("moc.torch.engine.group_for", lambda values: values.device.type)
    with gpu:
        parameters = [nn.Parameter(torch.zeros(3, device=device)) for device in (GPU, GPU, GPU, "cpu")]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        with gpu.measured():
            average_gradients(parameters, 2)
    assert len(gpu.waits) == 1 and [(device.type, group) for device, group in sums] == [(GPU,) * 2, ("cpu",) * 2]


def test_losses_are_added_without_waits():
    gpu = FakeCuda()
    with gpu:
        losses = [torch.zeros(1, device=GPU, requires_grad=True) for _ in range(3)]
        with gpu.measured():
            total = sum(map(without_waiting, [*losses, None, 1.5]))
        assert total.dtype is torch.float64 and not total.requires_grad and not gpu.waits
    assert without_waiting(torch.tensor([0.1])) == float(torch.tensor([0.1]))


def test_failure_is_deferred_once():
    DEFERRAL.set_active(True)
    values = torch.ones(2)
    DEFERRAL.defer(PeerFailure("first"), [[values]])
    DEFERRAL.defer(PeerFailure("second"), None)
    DEFERRAL.set_active(False)
    assert values.tolist() == [0, 0]
    with pytest.raises(PeerFailure, match="first"):
        DEFERRAL.raise_deferred()
    DEFERRAL.raise_deferred()


def test_forward_pass_does_not_change_saved_buffers():
    """A snapshot of an iteration is copied during the next forward pass."""
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    loop = Loop(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    world = World.replicas(SimpleNamespace(rank=0, size=1), torch.device("cpu"))
    engine = LoopEngine(world, loop, structure_of(net), Batches([1], 0, 0))

    def saved_means():
        fragments = engine.state.fragments(engine.state.operators(), Detail.MASTER)
        return [one.view.tolist() for one in fragments if one.name.endswith("running_mean")]

    engine.begin(Position())
    net(torch.rand(4, 2)).sum().backward()
    assert saved_means() == [[0.0, 0.0]]
    engine.apply(StepRecord(**dict.fromkeys(StepRecord.__dataclass_fields__, 0)))
    engine.capture()
    updated = net[1].running_mean.tolist()
    assert saved_means() == [updated] != [[0.0, 0.0]]
    net(torch.rand(4, 2))
    assert saved_means() == [updated] != [net[1].running_mean.tolist()]
    engine.begin(Position())
    assert net[1].running_mean.tolist() == updated
