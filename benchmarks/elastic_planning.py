"""Measures the quality of expert plans on recorded loads, and the planning time with 16 times as many nodes.

    python benchmarks/elastic_planning.py --routing FILE --output docs/results/elastic_planning_cpu.json

FILE is an ``.npz`` file with ``tokens[iterations, layers, experts]``, ten iterations apart.  Plans follow section 6.1
of Lazarus: 10 nodes of 6 slots, 12 layers, the 8, 12 or 16 experts of each layer with most tokens.

* *work*: the busiest node's work divided by the mean, over the trace, with current plans and plans that are 200 steps
  old; for comparison, Algorithm 1 with the paper's placement.
* *survived*: whether each expert has the required number of holders in each plan, so that the loss of fewer nodes is
  survived.  The last fifth of the trace counts separately.
* *moved*: expert replicas sent when nodes are lost or join, relative to the minimum over all orders of nodes.  The
  busiest sender's bytes are divided by the mean, or by the bytes of experts that only one node holds, if larger.
* *planning*: CPU seconds of a first plan, and of a plan after 1 % of the nodes were lost, with 256 experts in 8 slots.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import numpy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, say, write_json
from benchmarks.papers.lazarus import aligned
from benchmarks.papers.moetion import read_loads
from moc.elastic.allocation import allocate
from moc.elastic.dispatch import even_capacities
from moc.elastic.placement import replicas_by_node
from moc.elastic.plan import Plan, PlanSettings, make_plan, placement_imbalance, previous_experts
from moc.elastic.transfers import expert_holders, plan_expert_transfers

NODES, SLOTS, LAYERS, LEAST, EXPERTS = 10, 6, 12, 2, (8, 12, 16)
OLD = 20  # rows of the recording in 200 steps
CHANGES = {  # name: (nodes before, lost nodes, new nodes)
    "10 nodes, 1 lost": (10, 1, 0),
    "10 nodes, 2 lost, 3 new": (10, 2, 3),
    "6 nodes, 4 new": (6, 0, 4),
    "8 nodes, rebalanced": (8, 0, 0),
}
EXPERT_BYTES = 3 * 4 * 2 * 4096 * 1024  # GPT-L, Table 1: masters and two moments of two matrices
SMALL, LARGE = 1024, 16384


def hottest(tokens: numpy.ndarray, experts: int) -> numpy.ndarray:
    """Returns loads of each layer's experts with most tokens over the trace: [iterations, layers, experts]."""
    order = numpy.argsort(-tokens.sum(axis=0), axis=1, kind="stable")
    return numpy.take_along_axis(tokens, order[None, :, :experts], axis=2)


def by_layer(rows: numpy.ndarray) -> dict[int, list[int]]:
    """Converts loads to the planner's format."""
    return dict(enumerate(rows.tolist()))


def unlevelled(rows: numpy.ndarray) -> float:
    """Returns busiest by mean work with Algorithm 1 and maximum rank overlap, as in the paper."""
    found = []
    for row in rows:
        replicas = replicas_by_node(aligned(allocate(row.tolist(), NODES * SLOTS, LEAST), NODES, SLOTS), len(row))
        work = even_capacities(row, replicas).sum(axis=0)
        found.append(work.max() / work.mean())
    return float(numpy.mean(found))


def on_trace(tokens: numpy.ndarray, experts: int, every: int) -> dict:
    """Returns the work of the busiest node and the holders of the rarest expert, over the trace."""
    loads = hottest(tokens, experts)
    held_back = len(loads) * 4 // 5
    work: dict[str, list[float]] = {"fresh": [], "old": [], "algorithm_1": []}
    rarest: dict[str, list[int]] = {"trace": [], "held_back": []}
    for number in range(0, len(loads) - OLD, every):
        one = make_plan(range(NODES), by_layer(loads[number]), PlanSettings(SLOTS, LEAST))
        for name, rows in (("fresh", loads[number]), ("old", loads[number + OLD])):
            work[name].append(fmean(placement_imbalance(row, one.tables[layer]) for layer, row in enumerate(rows)))
        work["algorithm_1"].append(unlevelled(loads[number]))
        least = min(int(one.replicas_by_node(layer).sum(axis=1).min()) for layer in range(LAYERS))
        rarest["trace" if number < held_back else "held_back"].append(least)
    return {
        "experts": experts,
        "plans": len(work["fresh"]),
        "work": {name: float(numpy.mean(found)) for name, found in work.items()},
        "rarest_holders": {name: min(found) for name, found in rarest.items()},
    }


def fewest_moved(previous: Plan, after: Plan) -> int:
    """Returns the minimum number of sent replicas over all orders of nodes (Hungarian method)."""
    cost = sum(
        numpy.array(
            [
                [len({*new} - {*old}) for new in after.tables[layer].tolist()]
                for old in previous_experts(previous, after.members, layer).tolist()
            ]
        )
        for layer in after.tables
    )
    return assignment(numpy.asarray(cost))


def assignment(cost: numpy.ndarray) -> int:
    """Returns the minimum sum of one entry per row and column (Hungarian method with potentials)."""
    size = len(cost)
    rows, columns = numpy.zeros(size + 1), numpy.zeros(size + 1)
    owner = numpy.full(size + 1, -1)
    for row in range(size):
        owner[size], column = row, size
        best, back, seen = numpy.full(size, numpy.inf), numpy.full(size, size), numpy.zeros(size + 1, bool)
        while owner[column] >= 0:
            seen[column] = True
            reduced = cost[owner[column]] - rows[owner[column]] - columns[:size]
            open_ = ~seen[:size]
            better = open_ & (reduced < best)
            best[better], back[better] = reduced[better], column
            following = int(numpy.where(open_, best, numpy.inf).argmin())
            step = best[following]
            rows[owner[seen]] += step
            columns[seen] -= step
            best[open_] -= step
            column = following
        while column != size:
            owner[column], column = owner[back[column]], int(back[column])
    return int(sum(cost[owner[column], column] for column in range(size)))


def changes(tokens: numpy.ndarray) -> Iterator[dict]:
    """Yields for each change the mean number of moved replicas, and the busiest sender's maximum over the trace."""
    loads = hottest(tokens, EXPERTS[-1])
    rng = numpy.random.default_rng(0)
    for name, (nodes, lost, new) in CHANGES.items():
        moved, busiest = [], []
        for number in range(OLD, len(loads) - OLD, 60):
            before = make_plan(range(nodes), by_layer(loads[number]), PlanSettings(SLOTS, LEAST))
            kept = sorted(rng.choice(nodes, nodes - lost, replace=False).tolist())
            members = [*kept, *range(100, 100 + new)]
            if before.lost_experts(members):
                continue
            after = make_plan(members, by_layer(loads[number + OLD]), PlanSettings(SLOTS, LEAST), before)
            left, wanted = expert_holders(before.restricted_to(members, [True] * len(members))), expert_holders(after)
            replicas = sum(len({*wanted[one]} - {*left[one]}) for one in wanted)
            moved.append((replicas, fewest_moved(before, after)))
            sent = numpy.zeros(len(members))
            flow = plan_expert_transfers(left, after, dict.fromkeys(after.tables, EXPERT_BYTES))
            for one in itertools.chain.from_iterable(flow.values()):
                sent[one.source] += one.chunk.nbytes
            alone = numpy.zeros(len(members))
            for one in wanted:
                if len(left[one]) == 1 and {*wanted[one]} - {*left[one]}:
                    alone[left[one][0]] += EXPERT_BYTES
            if sent.any():
                busiest.append((sent.max() / sent.mean(), sent.max() / max(sent.mean(), alone.max())))
        total = numpy.sum(moved, axis=0)
        yield {
            "change": name,
            "events": len(moved),
            "moved": float(total[0] / len(moved)),
            "by_fewest": float(total[0] / total[1]) if total[1] else 1.0,
            "busiest_by_mean": float(numpy.max(busiest, axis=0)[0]),
            "busiest_by_bound": float(numpy.max(busiest, axis=0)[1]),
        }


def planning(nodes: int, skew: float) -> dict:
    """Returns CPU seconds of plans for one domain of nodes; load is the expert's rank to the power of ``-skew``."""
    tokens = (1e9 * numpy.arange(1, 257) ** -skew).astype(int)
    loads = {0: numpy.random.default_rng(0).permutation(tokens).tolist()}
    start = time.process_time()
    first = make_plan(range(nodes), loads, PlanSettings(8, max_domain_ranks=nodes))
    middle = time.process_time()
    make_plan([node for node in range(nodes) if node % 100], loads, PlanSettings(8, max_domain_ranks=nodes), first)
    return {"nodes": nodes, "skew": skew, "first": middle - start, "again": time.process_time() - middle}


def main() -> int:
    """Measures, prints and writes the results."""
    parser = command_line(__doc__)
    parser.add_argument("--routing", type=Path, required=True, help="recorded loads of experts")
    parser.add_argument("--every", type=int, default=5, help="rows of the recording between plans")
    own = parser.parse_args()
    tokens = numpy.array(read_loads(own.routing), numpy.int64)[:, :LAYERS]
    told: dict = {"machine": machine()}
    told["trace"] = [on_trace(tokens, experts, own.every) for experts in EXPERTS]
    for found in told["trace"]:
        print(found, flush=True)
    told["changes"] = list(changes(tokens))
    for found in told["changes"]:
        print(found, flush=True)
    told["planning"] = [planning(nodes, skew) for skew in (0.0, 1.0) for nodes in (SMALL, LARGE)]
    for found in told["planning"]:
        print(found, flush=True)
    pairs = list(zip(told["planning"][::2], told["planning"][1::2], strict=True))
    ratio = max(large[what] / small[what] for small, large in pairs for what in ("first", "again"))
    told["planning_ratio"] = ratio
    write_json(own.output, told)
    held = {
        "the busiest node has at most 1.10 times the mean work, with plans 200 steps old too": all(
            max(found["work"]["fresh"], found["work"]["old"]) <= 1.10 for found in told["trace"]
        ),
        f"each expert has {LEAST} holders in every plan": all(
            min(found["rarest_holders"].values()) >= LEAST for found in told["trace"]
        ),
        "at most 1.1 times the fewest replicas move": all(found["by_fewest"] <= 1.1 for found in told["changes"]),
        "the busiest sender sends at most 1.5 times the mean, or the data that only it holds": all(
            found["busiest_by_bound"] <= 1.5 for found in told["changes"]
        ),
        f"{LARGE:,} nodes are planned in at most 24 times the time of {SMALL:,}: {ratio:.1f}": ratio <= 24,
    }
    return 0 if say(held) else 1


if __name__ == "__main__":
    sys.exit(main())
