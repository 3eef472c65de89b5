"""A user's loop of the given kind, as docs/how-to/own-loop.md writes it; each worker prints the hash of its weights."""

import argparse
import hashlib
import json
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import binary_cross_entropy, cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import moc.torch as ft

VOCABULARY, WIDTH, EXPERTS = 32, 16, 4


class Experts(nn.Module):
    """Stacked experts of one token each."""

    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 4)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 4)

    def forward(self, tokens, chosen):
        hidden = torch.einsum("btw,ewh->bteh", tokens, self.w1).relu()
        made = torch.einsum("bteh,ehw->btew", hidden, self.w2)
        return made.gather(2, chosen[..., None, None].expand(*tokens.shape[:2], 1, WIDTH))[:, :, 0]


class Block(nn.Module):
    """A dense part with dropout, and experts: stacked, in one matrix, or a list of which some have no tokens."""

    def __init__(self, kind):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.gate.top_k = 1
        if kind == "bank":
            self.bank = nn.Parameter(torch.randn(EXPERTS, WIDTH * WIDTH) / 4)
        else:
            linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
            self.experts = Experts() if kind == "stacked" else linears

    def forward(self, tokens):
        tokens = tokens + self.dropout(self.down(self.up(self.norm(tokens)).relu()))
        weight, chosen = self.gate(tokens).softmax(-1).max(-1)
        if hasattr(self, "bank"):
            made = torch.einsum("btw,btwv->btv", tokens, self.bank.view(EXPERTS, WIDTH, WIDTH)[chosen])
        elif isinstance(self.experts, Experts):
            made = self.experts(tokens, chosen)
        else:
            made = torch.zeros_like(tokens)
            for number, expert in enumerate(self.experts):
                here = chosen == number
                if here.any() or isinstance(self, FSDPModule):  # which needs all gradients on all workers
                    made[here] = expert(tokens[here])
        return tokens + weight[..., None] * made


class Model(nn.Module):
    """Predicts the next token; a batch norm has buffers that a forward changes."""

    def __init__(self, kind):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden.transpose(1, 2)).transpose(1, 2))


class Noisy(Dataset):
    """Samples with random noise."""

    def __len__(self):
        return 100

    def __getitem__(self, index):
        return (torch.arange(9) * (index % 7 + 1) + torch.randint(2, (9,))) % VOCABULARY


class Counting:
    """A loader with a state, like torchdata's StatefulDataLoader."""

    def __init__(self, rank):
        self.rank, self.at = rank, 0

    def __iter__(self):
        while True:
            self.at += 1
            yield (torch.arange(72).view(8, 9) * (self.at + self.rank)) % VOCABULARY

    def state_dict(self):
        return {"at": self.at, "kept": torch.tensor(self.at)}

    def load_state_dict(self, state):
        assert int(state["kept"]) == state["at"]
        self.at = state["at"]


class Averages:
    """Moving averages of parameters that may be DTensors, which AveragedModel does not copy; tensors are replaced."""

    def __init__(self, model):
        self.tensors = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update_parameters(self, model):
        for name, parameter in model.named_parameters():
            self.tensors[name] = self.tensors[name].lerp(parameter.detach(), 0.1)

    def state_dict(self):
        return self.tensors

    def load_state_dict(self, state):
        for name, tensor in state.items():
            self.tensors[name].copy_(tensor)


class Adversaries(nn.Module):
    """A generator and a discriminator, as in DCGAN."""

    def __init__(self):
        super().__init__()
        odd = 2 * WIDTH - 1  # the integer of the batch norm is not aligned after them
        layers = [nn.Linear(4, odd), nn.BatchNorm1d(odd), nn.ReLU(), nn.Linear(odd, 9)]
        self.generator = nn.Sequential(*layers)
        self.discriminator = nn.Sequential(nn.Linear(9, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, 1), nn.Sigmoid())

    def loss(self, iteration, samples):
        """Loss of the discriminator in even iterations, and of the generator in odd ones."""
        ones, zeros = torch.ones(len(samples), 1), torch.zeros(len(samples), 1)
        fake = self.generator(torch.randn(len(samples), 4))
        if iteration % 2:
            return binary_cross_entropy(self.discriminator(fake), ones)
        real = self.discriminator(samples / VOCABULARY)
        return binary_cross_entropy(real, ones) + binary_cross_entropy(self.discriminator(fake.detach()), zeros)


def loss_of(model, tokens):
    """Mean loss over the next tokens."""
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Tokens:
    """Tokens of each expert, summed over workers, by completed iteration; replays overwrite."""

    def __init__(self, model, path):
        self.now, self.path = torch.zeros(len(model.blocks), EXPERTS), path
        for layer, block in enumerate(model.blocks):
            block.gate.register_forward_hook(partial(self.count, layer))

    def count(self, layer, _module, _inputs, output):
        self.now[layer] += torch.bincount(output.argmax(-1).flatten(), minlength=EXPERTS)

    def write(self, run):
        total, self.now = self.now, torch.zeros_like(self.now)
        dist.all_reduce(total)
        with open(f"{self.path}{run.rank}", "a") as file:
            file.write(json.dumps([run.iteration, total.int().tolist()]) + "\n")


PATTERNS = {"blocks.N.bank": "layers.N.expert.*", "blocks.N.gate.*": "layers.N.router"}


def policy_and_experts(kind):
    """Returns policy, experts and wrapper of a kind such as ``pec-stacked-ddp``; or of a kind with a name."""
    if "-" in kind:
        return kind.split("-")
    return "full", "stacked" if kind in ("plain", "ddp", "fsdp", "hsdp") else "list", kind


def partitioned(model, wrapper, size):
    """Distributes the model of a kind by DTensors; a batch norm has no DTensors."""
    model.norm = nn.Identity()
    if wrapper in ("fsdp", "hsdp"):
        names = ("replicas", "shards")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names) if wrapper == "hsdp" else None
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        mesh = init_device_mesh("cpu", (size,))
        for block in model.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh, plan, src_data_rank=None)  # a replacement has nobody to receive from


def arguments():
    """Returns the kind and the options of a program of tests.integration.test_pure_torch.starter."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("--ckpt-dir")
    parser.add_argument("--log-dir")
    parser.add_argument("--iterations", type=int)
    torch.set_num_threads(1)
    return parser.parse_args()


def main():
    """Trains and prints."""
    asked = arguments()
    kind, more = asked.kind, {}
    policy, experts, wrapper = policy_and_experts(kind)
    job = ft.init()
    torch.manual_seed(1 if wrapper in ("fsdp", "hsdp", "tp") else job.rank)  # replicas begin with rank 0's weights
    model = Model(experts) if kind != "gan" else Adversaries()
    data = DataLoader(Noisy(), batch_size=8, shuffle=True, drop_last=True)
    if kind == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        data = StatefulDataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=1)
    if wrapper in ("fsdp", "hsdp", "tp"):
        partitioned(model, wrapper, job.size)
    if wrapper == "tp":
        more["data_rank"] = 0
    if experts == "bank":
        more["operators"] = PATTERNS
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if wrapper == "ddp":
        more["wrap"] = partial(DistributedDataParallel, find_unused_parameters=True)
    if kind == "ddp":
        more |= dict(
            accumulate=2,
            scaler=torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=7),
        )
    averages = {"plain": torch.optim.swa_utils.AveragedModel, "fsdp": Averages}
    ema = averages[kind](model) if kind in averages else None
    if kind == "plain":
        data = Counting(job.rank)
        more["wrap"] = lambda inner: torch.compile(inner, backend="eager")
        more |= dict(scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100))
    if ema is not None:
        more["state"] = {"ema": ema}
    if policy == "sparse":
        more |= dict(forward=loss_of, options={"window": 3})
    if policy == "selective":
        more["options"] = {"experts": 3}
    tokens_of = Tokens(model, Path(asked.ckpt_dir).with_name("tokens")) if policy in ("pec", "selective") else None
    run = ft.protect(
        model,
        optimizer,
        data=data,
        iterations=asked.iterations,
        directory=asked.ckpt_dir,
        log_dir=asked.log_dir,
        clip_grad_norm=1.0,
        policy=policy,
        **more,
    )
    scaler = more.get("scaler")
    for tokens in run:
        loss = model.loss(run.iteration, tokens) if kind == "gan" else loss_of(run.model, tokens)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if kind == "gan" and run.iteration % 2:
            model.discriminator.zero_grad(set_to_none=True)
        is_updated = run.step(loss.detach())
        if is_updated and ema is not None:
            ema.update_parameters(model)
        if is_updated and tokens_of is not None:
            tokens_of.write(run)
    tensors = [*model.state_dict().values(), *(ema.state_dict().values() if ema is not None else ())]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    digest = hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in local))
    with open(Path(asked.ckpt_dir).parent / f"weights{run.rank}", "w") as file:
        file.write(f"{run.loss} {digest.hexdigest()}")


if __name__ == "__main__":
    main()
