"""Training loops as public tutorials write them, protected as docs/how-to/own-loop.md tells a reader.

Each function is one tutorial: it trains, and returns the tensors that must not depend on lost workers.
"""

import argparse
import hashlib
import itertools
import math
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset, default_collate

import moc.torch as ft

VOCABULARY, WIDTH, LENGTH = 32, 16, 8


class CausalSelfAttention(nn.Module):
    """Attention with dropout."""

    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj, self.drop = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
        made = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.drop(self.c_proj(made.transpose(1, 2).flatten(2)))


class TransformerBlock(nn.Module):
    """A block of a transformer."""

    def __init__(self):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), CausalSelfAttention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A language model whose output weights are its embedding."""

    def __init__(self, tied=True):
        super().__init__()
        parts = dict(wte=nn.Embedding(VOCABULARY, WIDTH), wpe=nn.Embedding(LENGTH, WIDTH))
        self.transformer = nn.ModuleDict(parts | dict(h=nn.ModuleList(TransformerBlock() for _ in range(2))))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.shape[1]))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(x)
        return logits, cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def nanogpt(protection):
    """karpathy/nanoGPT: random batches, tied weights, parameter groups, a schedule by hand, accumulation, DDP."""
    model, corpus, accumulate = GPT(), np.arange(999) * 7 % 31, 2
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    groups = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=6e-3, betas=(0.9, 0.95), fused=True)

    def get_batch():
        ix = torch.randint(len(corpus) - LENGTH, (4,))
        x, y = (torch.stack([torch.from_numpy(corpus[i + s : i + s + LENGTH]) for i in ix]) for s in (0, 1))
        return x, y

    def get_lr(it):
        return 6e-3 * (it + 1) / 6 if it < 5 else 6e-4 + 2.7e-3 * (1 + math.cos(math.pi * (it - 5) / 40))

    run = ft.protect(
        model,
        optimizer,
        data=lambda position: (get_batch() for _ in itertools.count()),
        accumulate=accumulate,
        wrap=DistributedDataParallel,
        clip_grad_norm=1.0,
        **protection,
    )
    for x, y in run:
        for group in optimizer.param_groups:
            group["lr"] = get_lr(run.iteration)
        with torch.autocast("cpu", torch.bfloat16):
            _, loss = run.model(x, y)
        (loss / accumulate).backward()
        run.step(loss.detach())
    return run, model.state_dict().values()


class Pictures(Dataset):
    """Pictures that are augmented at random."""

    def __len__(self):
        return 70

    def __getitem__(self, index):
        picture = torch.full((3, 8, 8), index % 5 / 5)
        return (picture.flip(-1) if torch.rand(()) < 0.5 else picture) + 0.1 * torch.randn(3, 8, 8), index % 5


def mixup(samples):
    """Mixes each picture with the next one, as torchvision's reference does in its collate function."""
    pictures, labels = default_collate(samples)
    share = float(np.random.beta(0.2, 0.2))
    return share * pictures + (1 - share) * pictures.roll(1, 0), labels


def classification(protection):
    """torchvision's reference: loader workers, batch norm, schedule of epochs, EMA with buffers, a short last batch."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
    warmup, decay = LinearLR(optimizer, 0.1, total_iters=2), StepLR(optimizer, 2, 0.5)
    lr_scheduler = SequentialLR(optimizer, [warmup, decay], milestones=[2])
    model_ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    job, dataset = ft.init(), Pictures()
    sampler = DistributedSampler(dataset, job.size, job.rank)
    loader = DataLoader(dataset, 8, sampler=sampler, num_workers=1, collate_fn=mixup, persistent_workers=True)
    run = ft.protect(
        model,
        optimizer,
        data=loader,
        state={"ema": model_ema, "schedule": lr_scheduler},
        wrap=DistributedDataParallel,
        **protection,
    )
    for image, target in run:
        model.train()
        loss = cross_entropy(run.model(image), target, label_smoothing=0.1)
        loss.backward()
        if run.step(loss.detach()):
            model_ema.update_parameters(model)
            if run.iteration % len(loader) == 0:
                lr_scheduler.step()
                model.eval()  # evaluation of an epoch
                with torch.inference_mode():
                    right = (model(image).argmax(1) == target).sum()
                    dist.all_reduce(right)
    return run, [*model.state_dict().values(), *model_ema.state_dict().values()]


class Trainer:
    """The class of PyTorch's tutorial on fault-tolerant DDP."""

    def __init__(self, model, train_data, optimizer, protection):
        self.optimizer = optimizer
        self.run = ft.protect(model, optimizer, data=train_data, wrap=DistributedDataParallel, **protection)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = mse_loss(self.run.model(source), targets)
        loss.backward()
        self.run.step(loss.detach())

    def train(self):
        for source, targets in self.run:
            self._run_batch(source, targets)


def ddp_tutorial(protection):
    """pytorch/tutorials, ddp_series: a Trainer class with a DistributedSampler."""
    job = ft.init()
    data = TensorDataset(torch.arange(1300.0).view(65, 20).sin(), torch.arange(65.0).view(65, 1).cos())
    loader = DataLoader(data, 4, pin_memory=True, shuffle=False, sampler=DistributedSampler(data, job.size, job.rank))
    model = nn.Linear(20, 1)
    trainer = Trainer(model, loader, torch.optim.SGD(model.parameters(), lr=1e-2), protection)
    trainer.train()
    return trainer.run, model.state_dict().values()


def fsdp2_tutorial(protection):
    """pytorch/tutorials, FSDP2: a model from the meta device, mixed precision, clipping of DTensors."""
    ft.init()
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT(tied=False)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.transformer.h:
        fully_shard(block, mp_policy=precision)
    fully_shard(model, mp_policy=precision)
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    run = ft.protect(model, optim, **protection)
    for _ in run:
        x = torch.randint(0, VOCABULARY, (4, LENGTH))
        _, loss = run.model(x, x)
        loss.backward()
        run.reduce()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        run.step(loss.detach())
    return run, model.state_dict().values()


def amp_recipe(protection):
    """pytorch/tutorials, amp_recipe: autocast, GradScaler with skipped updates, clipping, one-cycle schedule."""
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=4)
    schedule = OneCycleLR(opt, max_lr=0.1, total_steps=100)
    run = ft.protect(net, opt, scaler=scaler, scheduler=schedule, **protection)
    for number in run:
        data = torch.full((8, 16), number / 40.0) + torch.randn(8, 16)
        with torch.autocast("cpu", torch.float16):
            loss = mse_loss(run.model(data).float(), data[:, :4])
        scaler.scale(loss).backward()
        run.reduce()
        torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=0.1)
        run.step(loss.detach())
    assert float(scaler.get_scale()) != 2.0**20
    return run, net.state_dict().values()


def dcgan(protection):
    """pytorch/tutorials, dcgan_faces: generator and discriminator in one optimizer with two groups."""
    nets = nn.ModuleDict(
        {
            "g": nn.Sequential(nn.Linear(4, 15), nn.BatchNorm1d(15), nn.ReLU(), nn.Linear(15, 9), nn.Tanh()),
            "d": nn.Sequential(nn.Linear(9, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)),
        }
    )
    groups = [{"params": nets["d"].parameters(), "lr": 2e-3}, {"params": nets["g"].parameters(), "lr": 1e-3}]
    optimizer = torch.optim.Adam(groups, betas=(0.5, 0.999))
    faces = DataLoader(torch.arange(720.0).view(80, 9).cos(), 8, shuffle=True)
    run = ft.protect(nets, optimizer, data=faces, **protection)
    for real in run:
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        fake = nets["g"](torch.randn(len(real), 4))
        if run.iteration % 2:
            loss = binary_cross_entropy_with_logits(nets["d"](fake), ones)
            loss.backward()
            nets["d"].zero_grad(set_to_none=True)
        else:
            loss = binary_cross_entropy_with_logits(nets["d"](real), ones)
            loss = loss + binary_cross_entropy_with_logits(nets["d"](fake.detach()), zeros)
            loss.backward()
        run.step(loss.detach())
    return run, nets.state_dict().values()


class Corpus:
    """Columns of text in order, and the hidden state of the model after them."""

    def __init__(self, rank):
        self.source, self.at = (torch.arange(800).view(200, 4) * (rank + 3)) % VOCABULARY, 0
        self.hidden = (torch.zeros(2, 4, WIDTH), torch.zeros(2, 4, WIDTH))

    def __iter__(self):
        while True:
            data, target = (self.source[self.at + shift : self.at + shift + LENGTH] for shift in (0, 1))
            self.at = (self.at + LENGTH) % 180
            yield data, target

    def state_dict(self):
        return {"at": self.at, "hidden": self.hidden}

    def load_state_dict(self, state):
        self.at, self.hidden = state["at"], tuple(state["hidden"])


class RNNModel(nn.Module):
    """Encoder, LSTM with dropout, decoder."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.rnn = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.2)

    def forward(self, data, hidden):
        output, hidden = self.rnn(self.encoder(data), hidden)
        return self.decoder(output).flatten(0, 1), hidden


def word_language_model(protection):
    """pytorch/examples, word_language_model: a hidden state that goes from batch to batch, a schedule by the loss."""
    model, corpus = RNNModel(), Corpus(ft.init().rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    plateau = ReduceLROnPlateau(optimizer, factor=0.25, patience=1)
    run = ft.protect(model, optimizer, data=corpus, state={"plateau": plateau}, clip_grad_norm=0.25, **protection)
    for data, targets in run:
        output, hidden = run.model(data, corpus.hidden)
        loss = cross_entropy(output, targets.flatten())
        loss.backward()
        corpus.hidden = tuple(h.detach() for h in hidden)
        if run.step(loss.detach()) and run.iteration % 5 == 0:
            plateau.step(run.loss)
    return run, [*model.state_dict().values(), *corpus.hidden]


class CartPole:
    """The environment of Gymnasium, in its simplest form."""

    def reset(self):
        self.state = np.random.uniform(-0.05, 0.05, 4)
        return torch.tensor(self.state, dtype=torch.float32)

    def step(self, action):
        x, v, angle, turn = self.state
        pushed = (10.0 if action else -10.0) + 0.05 * turn**2 * math.sin(angle)
        turning = (9.8 * math.sin(angle) - math.cos(angle) * pushed) / 0.6
        self.state = np.array([x + 0.02 * v, v + 0.02 * pushed, angle + 0.02 * turn, turn + 0.02 * turning])
        return torch.tensor(self.state, dtype=torch.float32), 1.0, abs(self.state[2]) > 0.2


def reinforce(protection):
    """pytorch/examples, reinforcement_learning: no data set; an iteration is an episode of random length."""
    policy, env = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.6), nn.ReLU(), nn.Linear(16, 2)), CartPole()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    run = ft.protect(policy, optimizer, **protection)
    for _episode in run:
        state, saved, rewards, done = env.reset(), [], [], False
        while not done and len(rewards) < 50:
            chosen = torch.distributions.Categorical(logits=run.model(state))
            action = chosen.sample()
            saved.append(chosen.log_prob(action))
            state, reward, done = env.step(int(action))
            rewards.append(reward)
        returns = torch.tensor([sum(0.99**k * r for k, r in enumerate(rewards[t:])) for t in range(len(rewards))])
        loss = -(torch.stack(saved) * (returns - returns.mean())).sum()
        loss.backward()
        run.step(loss.detach())
    return run, policy.state_dict().values()


def no_trainer(protection):
    """transformers, run_clm_no_trainer.py: accelerate, epochs, accumulation, evaluation, a counter of steps."""
    from moc.accelerate import FaultTolerantAccelerator

    accelerator = FaultTolerantAccelerator(cpu=True, gradient_accumulation_steps=2, protection=protection)
    model, texts = GPT(), (torch.arange(70).view(70, 1) * torch.arange(1, 10)) % VOCABULARY
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.1, 1 - step / 100))
    train_loader, eval_loader = DataLoader(texts, 4, shuffle=True), DataLoader(texts[:8], 4)
    prepared = accelerator.prepare(model, optimizer, train_loader, eval_loader, lr_scheduler)
    model, optimizer, train_loader, eval_loader, lr_scheduler = prepared
    for _epoch in range(99):
        model.train()
        for batch in train_loader:
            with accelerator.accumulate(model):
                _, loss = model(batch[:, :-1], batch[:, 1:])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.iteration >= protection["iterations"]:
                break
        model.eval()
        with torch.no_grad():
            losses = [accelerator.gather(model(batch[:, :-1], batch[:, 1:])[1]) for batch in eval_loader]
        assert math.isfinite(sum(map(float, losses)))
        if accelerator.iteration >= protection["iterations"]:
            break
    accelerator.end_training()
    return accelerator.run, accelerator.unwrap_model(model).state_dict().values()


class ExpertParallel(nn.Module):
    """Experts on all workers: tokens go to the worker of their expert and back, in equal parts."""

    def __init__(self, mesh):
        super().__init__()
        own = torch.randn(1, WIDTH, WIDTH, generator=torch.Generator().manual_seed(mesh.get_rank())) / 4
        self.experts = nn.Parameter(DTensor.from_local(own, mesh, [Shard(0)]))
        self.gate, self.head = nn.Linear(WIDTH, mesh.size()), nn.Linear(WIDTH, WIDTH)
        self.gate.top_k = 1

    def forward(self, tokens):
        weights = self.gate(tokens).softmax(-1)
        sent = torch.cat([tokens * weights[:, [e]] for e in range(weights.shape[1])])
        received = all_to_all_single(torch.empty_like(sent), sent)
        made = (received @ self.experts.to_local()[0]).relu()
        returned = all_to_all_single(torch.empty_like(made), made)
        return self.head(tokens + returned.view(weights.shape[1], *tokens.shape).sum(0))


def expert_parallel(protection):
    """A toy of expert parallelism: each worker has an expert, and an all-to-all sends tokens."""
    job = ft.init()
    model = ExpertParallel(init_device_mesh("cpu", (job.size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = ft.protect(model, optimizer, **protection)
    for number in run:
        tokens = torch.randn(8, WIDTH) + number % 3
        loss = mse_loss(run.model(tokens), tokens.sin())
        (loss / run.size).backward()
        run.step(loss.detach())
    return run, model.state_dict().values()


LOOPS = {
    loop.__name__: loop
    for loop in (
        nanogpt,
        classification,
        ddp_tutorial,
        fsdp2_tutorial,
        amp_recipe,
        dcgan,
        word_language_model,
        reinforce,
        no_trainer,
        expert_parallel,
    )
}


def main(loops=LOOPS):
    """Trains, and writes the last loss and the hash of the weights of each worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("--ckpt-dir")
    parser.add_argument("--log-dir")
    parser.add_argument("--iterations", type=int)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    protection = dict(directory=asked.ckpt_dir, log_dir=asked.log_dir, iterations=asked.iterations)
    run, tensors = loops[asked.kind](protection)
    digest = hashlib.sha256()
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        digest.update(local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    Path(asked.ckpt_dir).with_name(f"weights{run.rank}").write_text(f"{run.loss} {digest.hexdigest()}")


if __name__ == "__main__":
    main()
