"""Compares applying gradients to stored experts in the background with the run's own update of the same experts.

    python benchmarks/fold_cost.py --output docs/results/fold_cost_cpu.json

Experts of 4 million parameters are updated by torch's AdamW.  The background update uses files in shared memory: it
reads, compares hashes, updates, hashes and writes.  Both run on one core.  The program measures CPU seconds of one
process, which other load changes little, and takes the best of three.  For each number of gradients since the base it
reports the cost of a gradient in updates, and the bytes of memory released.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, show, table, write_json
from moc.recovery.carrying import file_of_operator
from moc.recovery.chains import Chain
from moc.recovery.folds import RULES, carry_out
from moc.state.adam import Rule, Rules, kind_of
from moc.state.record import StepRecord
from moc.state.region import Region
from moc.store.manifest import Manifest, OperatorEntry
from moc.store.shard_file import BoxTensor, write_shard_file
from moc.store.storage import LocalStorage
from moc.store.store import Store, checkpoint_name

EXPERT, TENSOR = "layers.0.expert.0", "decoder.layers.0.mlp.experts.experts.0.linear_fc1.weight"
SHAPE = (2048, 2048)
LENGTHS = (1, 4, 16)  # number of gradients since the base
TIMES = 3
SLOTS = ("master", "exp_avg", "exp_avg_sq")


def save(store: Store, iteration: int, slots: tuple[str, ...]) -> None:
    """Saves an expert's file and manifest, as extracted from a snapshot."""
    directory, region = Path(store.storage.display_path(checkpoint_name(iteration))), Region((0, 0), SHAPE)
    directory.mkdir(parents=True)
    tensors = [BoxTensor(TENSOR, slot, SHAPE, region, torch.rand(SHAPE) * 1e-3) for slot in slots]
    file = file_of_operator(EXPERT)
    entry = write_shard_file(directory / file, tensors)
    elements = dict.fromkeys(slots, region.numel)
    operators = {EXPERT: OperatorEntry("grad" if slots == ("grad",) else "full", iteration, elements)}
    record = StepRecord(iteration, 1.0, 2.0, 1.0, False, 1, 1e-3, 1)
    rules = Rules.of(1.0, [(kind_of(TENSOR), Rule(1e-3, 0.1, 0.9, 0.999, 1e-8, True))])
    state = {"record": asdict(record), RULES: rules.to_plain()}
    store.publish(Manifest(iteration, "selective", 1, {file: entry}, operators, {}, state))


def cpu_s(action: Callable[[], object]) -> list[float]:
    """Returns several samples of an action's CPU seconds, after a warm-up call."""
    action()
    found = []
    for _ in range(TIMES):
        begun = time.process_time()
        action()
        found.append(time.process_time() - begun)
    return found


def main() -> None:
    """Measures, prints the results, and writes all samples."""
    own = command_line(__doc__).parse_args()
    torch.set_num_threads(1)
    parameter = torch.nn.Parameter(torch.rand(SHAPE))
    parameter.grad = torch.rand(SHAPE) * 1e-3
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.1)
    update, folds = cpu_s(optimizer.step), {}
    for length in LENGTHS:
        with tempfile.TemporaryDirectory(prefix="moc-fold-", dir="/dev/shm") as directory:
            store = Store(LocalStorage(directory, in_memory=True), allows_slack=True)
            for iteration in range(1, length + 2):
                save(store, iteration, SLOTS if iteration == 1 else ("grad",))
            folds[length] = cpu_s(lambda: carry_out(store, [], [Chain(EXPERT, 1, 1 + length)]))  # noqa: B023
    each = {length: min(samples) / length / min(update) for length, samples in folds.items()}
    columns = ["gradients", "cost of each, in updates", "bytes of a parameter released"]
    rows = [[str(length), f"{ratio:.2f}", str(4 * length)] for length, ratio in each.items()]
    show(80, [(table("cost of applying saved gradients, relative to the run's own update", columns, rows), ())])
    told = {"update_cpu_s": update, "fold_cpu_s": folds, "updates_each": each, "parameters": SHAPE[0] * SHAPE[1]}
    write_json(own.output, {"machine": machine(), **told})


if __name__ == "__main__":
    main()
