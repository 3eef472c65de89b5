"""What workers of a test's world do to share out what they hold."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state

from megatron.pretraining.engine.state import MegatronState
from moc.sharding import parse_scheme
from moc.sharding.save_plan import (
    ByteRange,
    StageReplicas,
    describe_replicas,
    pack_descriptors,
    plan_shards,
    planned_bytes_by_rank,
    select_fragments,
    unpack_descriptors,
)
from moc.state.operators import Detail, Fragment
from tests.integration.bodies import with_run
from tests.integration.state_bodies import _state, _steps
from tests.integration.state_files import first_copies, write

DETAILS = (Detail.FULL, Detail.COMPUTE)


def share_out(flags: dict, schemes: list[str], directory: str) -> dict:
    """Trains a step, and shares out the state in full, in compute weights, and with every other operator in full.

    Files of the first copies are in ``directory/first``, those of the shares of each plan, of the first of the schemes,
    in ``directory/PLAN``.

    Returns:
        For each plan and scheme the ``boxes`` that this worker saves, their ``bytes``, and the ``most`` of its stage.
    """

    def use(run) -> dict:
        state, told = _state(run), {}
        _steps(run, 1)
        for name in ("first", "full", "compute", "mixed"):
            (Path(directory) / name).mkdir(exist_ok=True)
        write(Path(directory) / "first", run.world.rank, [f for d in DETAILS for f in first_copies(state, d)])
        stage = _stage(state)
        for name, plan in _plans(state).items():
            told[name] = {}
            for scheme in schemes:
                parts = plan_shards(stage, plan, parse_scheme(scheme)).get(run.world.rank, [])
                mine = _share(state, plan, parts)
                boxes = [[f.slot, f.name, f.global_shape, f.region.offset, f.region.shape] for f in mine]
                nbytes = sum(f.view.numel() * f.view.element_size() for f in mine)
                most = max(planned_bytes_by_rank(stage, plan, parse_scheme(scheme)).values(), default=0)
                told[name][scheme] = {"boxes": boxes, "bytes": nbytes, "most": most}
                if scheme == schemes[0]:
                    write(Path(directory) / name, run.world.rank, mine)
        return told

    return with_run(flags, use)


def _stage(state: MegatronState) -> StageReplicas:
    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    holdings = [h for detail in DETAILS for h in describe_replicas(state.fragments(state.operators(), detail), detail)]
    texts = [None] * group.size()
    dist.all_gather_object(texts, pack_descriptors(holdings), group)
    return StageReplicas(
        {rank: unpack_descriptors(t) for rank, t in zip(dist.get_process_group_ranks(group), texts, strict=True)}
    )


def _plans(state: MegatronState) -> dict[str, dict[str, Detail]]:
    """The same on every worker, as policies are: they know the operators of the whole model."""
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, state.operators())
    operators = sorted({name for names in everywhere for name in names})
    plans = {detail.value: dict.fromkeys(operators, detail) for detail in DETAILS}
    return plans | {"mixed": {name: DETAILS[number % 2] for number, name in enumerate(operators)}}


def _share(state: MegatronState, plan: dict[str, Detail], parts: list[ByteRange]) -> list[Fragment]:
    here = [f for d in DETAILS for f in state.fragments([o for o, planned in plan.items() if planned is d], d)]
    return select_fragments(here, parts)
