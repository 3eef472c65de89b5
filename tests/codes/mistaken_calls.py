"""A program of a user that calls one function of the library wrongly, which its first argument names."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from moc.elastic.plan import Plan
from moc.elastic.transfers import plan_transfers
from moc.logs.log import LogEntry, LogReader, LogWriter, log_directory
from moc.policy import Every, full_plan, policy_named
from moc.policy.token_ledger import TokenLedger
from moc.sharding import ParallelLayout, StateBytes, list_save_items
from moc.simulate.closed_form import best_interval
from moc.simulate.policy_costs import SimulatedCosts
from moc.store.manifest import merge_reports
from moc.store.ownership import Claim
from moc.store.storage import LocalStorage
from moc.store.store import Store
from tests.model_shape import ModelShape, model_operators
from tests.unit.elastic.test_transfers import TENSORS
from tests.unit.sharding.test_save_plan import StageReplicas, told, world
from tests.unit.store.test_assemble import full, made, part
from tests.unit.store.test_store import file_parts, publish, saved, written

SHAPE = ModelShape((1,), 64, 256, 64, 64, 16, 1000, num_experts=4, expert_ffn_hidden_size=256)
OPERATORS = model_operators(SHAPE)


def store(term):
    """The snapshots, as a generation of a job sees them."""
    return Store(LocalStorage("snapshots", 10.0, claim=Claim("job", (0, term))))


def items(layout):
    """What a layout saves of the model."""
    list_save_items(OPERATORS, layout, StateBytes())


def unannounced_log():
    """A tensor of another shape than was announced."""
    entry = LogEntry("activation", (4, 8), torch.float32)
    words = {"name": "log", "limit_remedy": "raise the limit", "alternative": "log nothing"}
    writer = LogWriter(log_directory(Path.cwd(), 0), [entry], limit=1e6, device=torch.device("cpu"), **words)
    writer.begin(1)
    writer.write("activation", torch.zeros(3))


def policy_of(name, **settings):
    """A policy for the model."""
    return policy_named(name)(OPERATORS, Every(1), **settings)


def untold():
    """A choice by the tokens of experts, which nobody counts."""
    policy = policy_of("pec", selection="load_aware")
    policy.on_snapshot(full_plan(policy, 1))
    policy.plan(2)


def without_everything_in_storage():
    """A part of the experts, for storage that has none."""
    policy = policy_of("pec", k=2, k_persist=1)
    policy.on_snapshot(policy.plan(1))
    policy.storage.part_of(policy.plan(2))


def superseded():
    """A save of a job whose next generation has begun."""
    old = store(1)
    saved(old, 10)
    store(2).take()
    publish(old, 20)


def overwritten():
    """A file that an earlier generation has written again, after its look at the fence."""
    saved(store(1), 10)
    new, unfenced = store(2), Store(LocalStorage("snapshots", 10.0))
    written(new, 30)
    unfenced.write_file(30, 1, file_parts(33, 1)[0])
    publish(new, 30)


def contradictory_report():
    """A report of another launch."""
    saved(store(1), 10)
    written(store(2), 30)
    for report in Path("snapshots/iter_0000030").glob(".rank_*.json"):
        report.write_text("{")
    publish(store(2), 30)


MISTAKES = {
    "counts-misfit": lambda: TokenLedger.empty({0: 2}).after_iteration({0: [1]}),
    "directory-taken-over": superseded,
    "expert-plan-invalid": lambda: Plan.from_json({"members": [0]}),
    "experts-not-divisible": lambda: items(ParallelLayout(6, ep=3)),
    "holdings-misfit": lambda: StageReplicas({0: told(world(tp=2))[0]}),
    "interval-unlimited": lambda: best_interval(SimulatedCosts("full", 1, 0.0, replay_s=1), 1, math.inf),
    "ledger-incomplete": lambda: TokenLedger.empty({0: 1}).after_recovery({0: {0: 3}}),
    "log-missing": lambda: LogReader(log_directory(Path.cwd(), 0)).read(1, "activation"),
    "logging-unsupported": unannounced_log,
    "operator-incomplete": lambda: made([part(0, expert=full()), part(1, expert=full(master=0))]),
    "part-overwritten": overwritten,
    "parts-contradictory": lambda: merge_reports([replace(part(0), job="one"), replace(part(1), job="two")]),
    "report-unreadable": contradictory_report,
    "saved-state-invalid": lambda: policy_of("pec").loading({"told": 1}),
    "state-without-source": lambda: plan_transfers(TENSORS, {}, {"layers.0.expert.3": [1]}),
    "storage-lacks-experts": without_everything_in_storage,
    "tensors-not-divisible": lambda: items(ParallelLayout(6, tp=3, expert_tp=1)),
    "tokens-not-counted": untold,
}

if __name__ == "__main__":
    MISTAKES[sys.argv[1]]()
