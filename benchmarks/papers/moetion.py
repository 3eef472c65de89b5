"""Reproduces MoEtion's Figures 4, 7, 9, 10, 11: checkpoint sizes, time wasted by a fault, tokens at risk."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from benchmarks.papers.equations import pec_size
from benchmarks.papers.reproduction import Reproduction, Row
from moc.policy.expert_selection import (
    CountsByLayer,
    ExpertsByLayer,
    Limit,
    count_limit,
    per_byte,
    proportional,
    scores,
)
from moc.policy.flags import bubble_share
from moc.policy.pec_selection import sequential_experts
from moc.sharding import StateBytes

_STATE = StateBytes(weights=2, master=0, moments=8)  # section 2.3
_SNAPSHOT_GBS = 1820 / 74.9  # Gemini with 32 experts, Figure 9
_BLOB_GBS = 40 / 8  # section 7.1
_EP = 8  # for experts in turn: neighbours are on different ranks
_SHARES = (1 / 16, 1 / 8, 1 / 4, 0.4)  # shares of experts in a snapshot
_TYPICAL = 0.25  # lower limit of S relative to E (section 4.1)
_RECURRING = 0.62  # share of a snapshot's experts also in the previous one: Algorithm 1, recorded loads, _TYPICAL
_FIRST = 10  # skipped iterations, because nothing was saved before them


@dataclass(frozen=True)
class Model:
    """Model of section 7.1, in 10^9 parameters."""

    dense: float  # parameters of the dense model whose feed-forward parts became experts
    parameters: float
    experts: int
    selective_s: float  # seconds of a selective checkpoint without the techniques of section 5, Figure 10
    all_s: float  # seconds with all techniques

    @property
    def gb(self) -> float:
        """Size of a full checkpoint, in GB."""
        return self.with_experts(self.experts)

    @property
    def in_experts(self) -> float:
        """Parameters in experts: the other experts' addition to the dense model, and the same amount for the first."""
        return (self.parameters - self.dense) * self.experts / (self.experts - 1)

    def with_experts(self, number: int) -> float:
        """Returns the GB of a checkpoint with ``number`` experts of each layer (eq. 5)."""
        dense, in_experts = (round(1e9 * count) for count in (self.parameters - self.in_experts, self.in_experts))
        return pec_size(dense, in_experts, number, self.experts, _STATE) / 1e9


_SMALL = Model(1.6, 58.7, 64, 5.7, 2.7)
_MEDIUM = Model(2.9, 30.1, 16, 3.6, 1.5)
_LARGE = Model(3.8, 46.7, 8, 12.6, 3.9)


def figure_4() -> Reproduction:
    """Reproduces the numbers of section 7.2 for MoEtion's Figure 4, and the example of section 4.1."""
    share, chosen, fewest = 0.85, 2, 4  # fewest: 25 % of 16 experts
    by_sizes = 100 * (1 - _MEDIUM.with_experts(fewest) / _MEDIUM.gb)
    rows = (
        Row("GPT-1.6B-64E, everything, GB", 587, _SMALL.gb, "factor"),
        Row("GPT-1.6B-64E, 6 of 64 experts, GB", 61, _SMALL.with_experts(6), "factor"),
        Row("GPT-2.9B-16E, experts, percent", 100 * share, 100 * _MEDIUM.in_experts / _MEDIUM.parameters, "percent"),
        Row("GPT-2.9B-16E, less with 4 of 16 experts, by the sizes, percent", 75, by_sizes, "percent"),
        Row(
            "GPT-2.9B-16E, less with 2 of 16 experts, by 85 %, percent",
            75,
            100 * share * (1 - chosen / 16),
            "percent",
            excluded="fitted to",
        ),
    )
    notes = (
        "Inputs: parameters with and without experts (section 7.1), 2 + 8 bytes each (section 2.3), equations 4 and 5.",
        "With 1.6 and 58.7 x 10^9 parameters, 0.7 x 10^9 are not in experts.  Experts of GPT-2.9B-16E are 96 % by the",
        "same sizes, where section 4.1 has 85 %.  By 85 % its reduction of 75 % needs 2 of 16 experts, below the 25 to",
        "40 % that the section calls typical; by the sizes 4 of 16 are near it.  GPT-3.8B-8E is left out: 8 x 3.8 is",
        "less than its 46.7 x 10^9 parameters.",
    )
    fitted = ("2 of 16 experts: the printed reduction",)
    return Reproduction("MoEtion, Figure 4: bytes of a checkpoint", rows, notes, fitted=fitted)


def figure_7() -> Reproduction:
    """Reproduces the numbers of section 7.2 for MoEtion's Figure 7."""
    blob_s, full_s = _SMALL.gb / _BLOB_GBS, _LARGE.gb / _SNAPSHOT_GBS
    often = {"CheckFreq": 100 / 2, "Gemini": 100 / 6}  # iterations between checkpoints, Figure 6
    printed = 331.9
    small_s = (printed - 2 * blob_s) / (often["CheckFreq"] / 2)
    large_s = 109 / _SNAPSHOT_GBS
    medium_s = small_s + (large_s - small_s) * (_MEDIUM.dense - _SMALL.dense) / (_LARGE.dense - _SMALL.dense)
    rows = [
        Row(
            "GPT-1.6B-64E, CheckFreq",
            printed,
            _wasted(blob_s, blob_s, often["CheckFreq"], small_s),
            "factor",
            excluded="fitted to",
        ),
        Row("GPT-3.8B-8E, Gemini in every iteration", 27.4, _wasted(full_s, full_s, 1, large_s), "factor"),
        Row("GPT-3.8B-8E, Gemini without stalls", 25.7, _wasted(full_s, full_s, often["Gemini"], large_s), "factor"),
    ]
    for label, model, paper, iteration_s in (
        ("GPT-1.6B-64E", _SMALL, 11.9, small_s),
        ("GPT-2.9B-16E", _MEDIUM, 9.8, medium_s),
        ("GPT-3.8B-8E", _LARGE, 14.9, large_s),
    ):
        ours = _wasted(model.all_s, model.selective_s, 1, iteration_s)
        rows.append(Row(f"{label}, MoEtion", paper, ours, "factor"))
    notes = (
        "Seconds: T_ckpt + T_retrieval + f/2 T_iteration.  f is 50 iterations for CheckFreq, 16.7 for Gemini without",
        "stalls (Figure 6), otherwise 1.  T_ckpt and T_retrieval are bytes by 5 GB/s to Blob storage (section 7.1) or",
        f"Gemini's {_SNAPSHOT_GBS:.1f} GB/s (Figure 9).  MoEtion's are Figure 10's: with all techniques to save,",
        "and with none of section 5 to retrieve, since these save nothing there.  T_iteration is never stated.",
        f"Gemini's figures contradict these: half of 16.7 iterations are {often['Gemini'] / 2 * large_s:.0f} s, and a",
        f"full checkpoint takes {full_s:.0f} s each way.  12 times less wasted work (section 9) follows from no pair:",
        f"it is {printed / 11.9:.0f} times less than CheckFreq, and {27.4 / 14.9:.1f} times less than Gemini.",
    )
    fitted = (
        f"{small_s:.1f} s an iteration of GPT-1.6B-64E: CheckFreq's figure",
        f"{large_s:.1f} s of GPT-3.8B-8E: its budget of 109 GB (section 4.2) by Gemini's GB/s",
        f"{medium_s:.1f} s of GPT-2.9B-16E: between these, by dense parameters",
    )
    return Reproduction("MoEtion, Figure 7: time that a fault wastes", tuple(rows), notes, fitted=fitted)


def _wasted(save_s: float, retrieve_s: float, every: float, iteration_s: float) -> float:
    return save_s + retrieve_s + every / 2 * iteration_s


def figure_9() -> Reproduction:
    """Reproduces the numbers of section 7.4 for MoEtion's Figure 9."""
    experts, popular = 32, 32 * 6 / 64
    full_gb, full_s = 1820.0, 74.9
    feed_forward = 2 / 3  # share of a GPT block's weights: 8 of 12 hidden^2
    share = (1 - feed_forward + popular * feed_forward) / (1 - feed_forward + experts * feed_forward)
    rows = (
        Row("MoEtion, 32 experts, GB", 195, share * full_gb, "factor"),
        Row("MoEtion, 32 experts, s", 8.5, share * full_s, "factor"),
    )
    notes = (
        "Inputs: Gemini's 1820 GB and 74.9 s with 32 experts; 6 of 64 experts are popular (section 7.2), which makes 3",
        "of 32; all state outside experts is saved.  The bandwidth is Gemini's size divided by its time.",
    )
    fitted = ("GB/s: Gemini's size by its time", "experts have 2/3 of a block's weights, as in a plain GPT")
    return Reproduction("MoEtion, Figure 9: checkpoints of GPT-3.8B with 32 experts", rows, notes, fitted=fitted)


def figure_10() -> Reproduction:
    """Reproduces the numbers of section 7.5 for MoEtion's Figure 10: the remaining share after each technique."""
    stages, micro_batches, large_s = 8, 16 // 8, 109 / _SNAPSHOT_GBS
    alone, bubbles, placement, everything = _LARGE.selective_s, 10.9, 7.0, _LARGE.all_s
    waits_s = bubble_share(stages, micro_batches) * large_s
    sent = _STATE.moments / (_STATE.moments + _STATE.weights)
    recomputed = 1 - _RECURRING * (1 - _STATE.weights / _STATE.moments)  # gradients are as large as weights
    left = (1 - waits_s / alone, sent, recomputed)
    printed = (bubbles / alone, placement / bubbles, everything / placement)
    solved, elsewhere = "from times that the paper does not state", "from loads recorded elsewhere"
    names = ("+ bubbles", "+ placement", "+ gradients")
    excluded = (solved, "contradicted by section 7.5", elsewhere)
    rows = [
        Row(f"GPT-3.8B-8E, {name}, percent of the step before", 100 * paper, 100 * ours, "percent", excluded=why)
        for name, paper, ours, why in zip(names, printed, left, excluded, strict=True)
    ]
    label = "GPT-3.8B-8E, all, percent of plain selective"
    rows.append(Row(label, 100 * everything / alone, 100 * math.prod(left), "percent", excluded=solved))
    notes = (
        f"Bubbles: of {stages} stages with {micro_batches} micro batches (1F1B), with the iteration time of",
        f"moetion-fig7; {waits_s:.1f} of {alone} s pass in them.  Placement: with ZeRO-1 (section 7.1) replicas have",
        "the same weights, 2 of 10 bytes, so it saves 20 %.  Section 7.5 also has 20 %, but from 10.9 to 7.0 s",
        f"it is {100 - 100 * printed[1]:.0f} %.  Gradients: 2 of the 8 bytes still sent, for experts that were",
        f"in the snapshot before; with a quarter of the experts in each, these are {_RECURRING:.0%} on the loads of",
        "moetion-fig11.",
        "Section 7.5 has no figures between the first and the last one for the other two models.",
    )
    fitted = ("the iteration: as in moetion-fig7", f"{_RECURRING:.0%} of experts recur: as on other loads")
    return Reproduction("MoEtion, Figure 10: checkpoint size after each technique", tuple(rows), notes, fitted=fitted)


Loads = Sequence[Sequence[Sequence[int]]]
"""Tokens by iteration, layer and expert."""


def read_loads(path: Path) -> Loads:
    """Reads recorded loads from an ``.npz`` file with ``tokens[iterations, layers, experts]``.

    Raises:
        ValueError: the file is missing or malformed.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            tokens = file["tokens"]
    except (AttributeError, KeyError, OSError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"cannot read tokens[iterations, layers, experts] from {path}: {error}") from None
    if tokens.ndim != 3 or len(tokens) <= _FIRST or tokens.dtype.kind not in "iu" or not tokens.sum(axis=2).all():
        raise ValueError(
            f"{path} does not hold integer tokens[iterations, layers, experts], of more than {_FIRST} iterations and "
            "with tokens in every layer"
        )
    return tokens.tolist()


def figure_11(loads: Loads) -> Reproduction:
    """Reproduces the numbers of section 7.5 for MoEtion's Figure 11 on recorded expert loads."""
    layers, width = len(loads[0]), len(loads[0][0])
    rows, highest = [], 0.0
    for number in dict.fromkeys(max(1, round(share * width)) for share in _SHARES):
        in_turn, algorithm_1, ours = (
            at_risk(loads, number, choose) for choose in (_in_turn, _algorithm_1, _tokens_age)
        )
        few = "" if number >= _TYPICAL * width else "with fewer experts than are typical"
        highest = max(in_turn)
        for label, risk, why in (("Algorithm 1", algorithm_1, few), ("tokens times age", ours, "not of the paper")):
            label = f"{number} of {width}: in turn by {label}"
            rows.append(Row(label, 2, _ratio(in_turn, risk), "factor", excluded=why))
    label = f"{number} of {width}: in turn, at most, percent of an iteration"
    rows.append(Row(label, 80, 100 * highest, "percent", excluded="not fully specified by the paper"))
    notes = (
        "Tokens at risk right after each snapshot, in the mean over layers and iterations.  The factor is the risk of",
        f"saving in turn (in {_EP} expert-parallel ranks) by the risk of saving as many experts by popularity.",
        f"Inputs: loads of {layers} layers with {width} experts, {len(loads)} iterations without the first {_FIRST}.",
        f"On average {_popular(loads):.1f} experts get 80 % of a layer's tokens; section 7.2 has 6 of 64.",
        "The paper names no S for its factor of 2, only that S is typically 25 to 40 % of the experts (section 4.1).",
        "The more experts are saved, the larger the factor: popularity leaves the ones with hardly any tokens.",
        "Tokens times age is the default of --ckpt-policy selective, and not in the paper.",
    )
    title = "MoEtion, Figure 11: tokens at risk, experts in turn by popularity-aware selection"
    return Reproduction(title, tuple(rows), notes, fitted=("S", f"{_EP} expert-parallel ranks"))


def _ratio(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(one) / sum(other) if sum(other) else float("inf")


def _popular(loads: Loads) -> float:
    """Returns the mean number of experts that receive 80 % of a layer's tokens."""
    tokens = np.sort(np.array(loads), axis=2)[:, :, ::-1]
    return float(((tokens.cumsum(axis=2) < 0.8 * tokens.sum(axis=2, keepdims=True)).sum(axis=2) + 1).mean())


Choose = Callable[[int, int, CountsByLayer, CountsByLayer], ExpertsByLayer]
"""Function from snapshot, experts of each layer, and tokens and iterations since an expert's last save, to experts."""


def at_risk(loads: Loads, number: int, choose: Choose) -> list[float]:
    """Returns tokens at risk after each snapshot from :data:`_FIRST` on, relative to a layer's tokens per iteration."""
    unsaved, ages = ({layer: [0] * len(row) for layer, row in enumerate(loads[0])} for _ in range(2))
    found = []
    for snapshot, rows in enumerate(loads):
        for layer, row in enumerate(rows):
            unsaved[layer] = [sum(pair) for pair in zip(unsaved[layer], row, strict=True)]
        for layer, experts in choose(snapshot, number, unsaved, ages).items():
            ages[layer] = [age + 1 for age in ages[layer]]
            for expert in experts:
                unsaved[layer][expert] = ages[layer][expert] = 0
        found.append(fmean(sum(unsaved[layer]) / sum(row) for layer, row in enumerate(rows)))
    return found[_FIRST:]


def _in_turn(snapshot: int, number: int, unsaved: CountsByLayer, ages: CountsByLayer) -> ExpertsByLayer:
    width = len(unsaved[0])
    return {layer: sequential_experts(snapshot, layer, number, width, math.gcd(_EP, width)) for layer in unsaved}


def _algorithm_1(snapshot: int, number: int, unsaved: CountsByLayer, ages: CountsByLayer) -> ExpertsByLayer:
    return proportional(unsaved, [_limit(number, unsaved)])


def _tokens_age(snapshot: int, number: int, unsaved: CountsByLayer, ages: CountsByLayer) -> ExpertsByLayer:
    limits = [_limit(number, unsaved)]
    return per_byte(scores(unsaved, ages, "tokens-age"), ages, 4 * -(-len(ages[0]) // number), limits)


def _limit(number: int, unsaved: CountsByLayer) -> Limit:
    places = [(layer, expert) for layer, row in unsaved.items() for expert in range(len(row))]
    return count_limit(places, number * len(unsaved))
