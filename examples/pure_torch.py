#!/usr/bin/env python3
"""A training loop of plain PyTorch that survives kill -9 of its workers, by ``moc`` alone.

    python -m moc.launch --nproc-per-node 2 examples/pure_torch.py --ckpt-dir /tmp/snapshots

A small language model with experts, replicated; one all-reduce averages gradients.  Kill any worker: another one takes
its place, and the last line is identical to an uninterrupted run's.  docs/how-to/own-engine.md explains it.
"""

import argparse
import hashlib
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu, softmax

from moc import (
    CheckpointError,
    Detail,
    LocalRemains,
    NoRecoveryPoint,
    NoTap,
    ReplicatedState,
    Session,
    Settings,
    StepRecord,
    World,
    join_job,
    sum_over_workers,
)
from moc.cli_output import print_lines, refused
from moc.events import EventLog, event_directory
from moc.runtime.progress import progress

VOCABULARY, WIDTH, EXPERTS, SEQUENCE, BATCH = 64, 32, 4, 16, 8


class Layer(nn.Module):
    """Experts with top-1 routing."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, tokens):
        """Adds the output of each token's expert, weighted by its probability."""
        weight, chosen = softmax(self.router(tokens), -1).max(-1)
        made = torch.stack([expert(tokens) for expert in self.experts], -1)
        return tokens + weight[..., None] * made.gather(-1, chosen[..., None, None].expand(*tokens.shape, 1))[..., 0]


class Model(nn.Module):
    """Predicts the next token from the two before it."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.output = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        """Mean loss over a batch of sequences."""
        hidden = gelu(self.embedding(tokens[:, :-2]) + self.embedding(tokens[:, 1:-1]).roll(1, -1))
        for layer in self.layers:
            hidden = layer(hidden)
        return cross_entropy(self.output(hidden).flatten(0, 1), tokens[:, 2:].flatten())


def name_of(parameter: str) -> str:
    """Returns the name of a parameter in checkpoints: Megatron's, which determines its operator."""
    head, _, rest = parameter.partition(".")
    if head != "layers":
        return {"embedding": "embedding.", "output": "output_layer."}[head] + rest
    layer, _, rest = rest.partition(".")
    return f"decoder.layers.{layer}.mlp." + rest.replace("experts.", "experts.experts.", 1)


class Engine:
    """Computes iterations: an implementation of moc.session.engine.Engine."""

    tap, reduced, peers, stages = NoTap(), None, None, (0, 0)

    def __init__(self, job):
        torch.manual_seed(1)
        self.world = World.replicas(job, torch.device("cpu"))
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        named = {name_of(name): parameter for name, parameter in self.model.named_parameters()}
        self.state = ReplicatedState(named, self.optimizer, job.rank)
        self.operators, self.layout, self.slices = self.state.described(), {"dp": job.size}, (job.rank,)

    def scalars(self, position):
        return vars(position) | {"optimizer": "adam", "shape": [VOCABULARY, WIDTH, EXPERTS]}

    def load_scalars(self, saved, where): ...  # no schedule, no loss scale

    def check(self, saved, where, window=False):
        if saved.get("shape") != [VOCABULARY, WIDTH, EXPERTS]:
            raise CheckpointError(f"{where} holds another model")

    def compare_samples(self, saved, say): ...

    def gradients(self, iteration):
        """Computes the mean gradients of an iteration; samples depend only on its number and the rank."""
        samples = torch.Generator().manual_seed(iteration * self.world.size + self.world.rank)
        tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=samples).sort(-1).values
        self.optimizer.zero_grad()
        loss = self.model(tokens)
        loss.backward()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]  # which all have
        mean = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(mean)
        for gradient, part in zip(gradients, mean.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient) / self.world.size)
        return loss.item()

    def apply(self, record, gradients=None, operators=None):
        """Updates the state from the current gradients, or from kept ones, of all operators or some."""
        if gradients is not None:
            self.optimizer.zero_grad()  # what has no gradient stays as it is
            for fragment in self.state.fragments(operators or self.state.operators(), Detail.GRAD):
                self.state.load(fragment, gradients(fragment))
        self.optimizer.step()


def train(engine, session, iterations):
    """The loop: gradients, commit all-reduce, update, snapshot."""
    position, mean = session.resume(), None
    while position.iteration < iterations:
        progress("step")  # so that a hang is noticed
        begun = time.perf_counter()
        loss = engine.gradients(position.iteration)
        totals = sum_over_workers({"loss": loss, **session.contribution()}, engine.world)  # from here on all can update
        mean, batch = totals["loss"] / engine.world.size, BATCH * engine.world.size
        record = StepRecord(position.iteration + 1, mean, 0.0, 1.0, False, batch * (SEQUENCE - 2), 1e-3, batch)
        session.on_totals(totals)  # waits for copies of the state that the update changes
        engine.apply(record)
        position = session.completed(record, begun)  # from here on a lost worker does not undo the iteration
        progress("save")  # may take longer, at the end above all
        session.take()
    session.flush()
    return position, mean


class Log:
    """Messages and events of rank 0."""

    def __init__(self, rank, directory):
        self._rank, self.events = rank, EventLog(event_directory(directory) if rank == 0 else None)

    def message(self, text):
        if self._rank == 0:
            print_lines(text, flush=True)


def main():
    """Trains until all iterations are done, whichever workers are lost."""
    parser = argparse.ArgumentParser(description="Plain PyTorch that survives kill -9.", allow_abbrev=False)
    parser.add_argument("--ckpt-dir", required=True)
    parser.add_argument("--log-dir", help="directory of events.jsonl")
    parser.add_argument("--iterations", type=int, default=400)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    settings = Settings(asked.ckpt_dir, asked.iterations, policy="full", tier="memory")
    job, remains, engine, session, lost = join_job(), LocalRemains(), None, None, None
    log = Log(job.rank, asked.log_dir)
    while True:
        try:
            if engine is None:
                job.connect("gloo", timedelta(minutes=5), torch.device("cpu"))
                engine = Engine(job)
            if lost := job.report_ready() or lost:  # a new worker has it from there, a survivor from below
                log.message(f"generation {lost.generation}: {lost.reason}")
            session = Session(engine, settings, log, remains)
            position, loss = train(engine, session, asked.iterations)
            digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in engine.model.parameters()))
            log.message(f"iteration {position.iteration}: loss {loss}, weights {digest.hexdigest()[:16]}")
            session.close()
            return job.leave()
        except NoRecoveryPoint:
            job.start_over()
        except Exception as error:
            lost = job.rejoin_after(error)  # raises it again, unless a worker was lost and another has taken its place
        if session is not None:
            session.interrupt()


if __name__ == "__main__":
    try:
        main()
    except (CheckpointError, ValueError) as error:  # one sentence with the remedy
        sys.exit(refused("pure_torch", error))
