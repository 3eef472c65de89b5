"""Computes the ranks of tensor, expert, data and pipeline parallelism, without process groups."""

from __future__ import annotations

from dataclasses import dataclass

from moc.errors import UserError


class LayoutError(UserError, ValueError):
    """Incompatible parallel sizes; the message names them."""


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of all parallel dimensions in ranks, numbered in megatron-core's order "tp-cp-ep-dp-pp".

    Attributes:
        world: number of ranks.
        tp: tensor-parallel ranks of each dense layer.
        pp: pipeline stages.
        ep: ranks that share the experts of a layer.
        expert_tp: tensor-parallel ranks of each expert; by default ``tp``.
        vpp: virtual stages per pipeline stage.
    """

    world: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    expert_tp: int | None = None
    vpp: int = 1

    def __post_init__(self) -> None:
        sizes = dict(world=self.world, tp=self.tp, pp=self.pp, ep=self.ep, expert_tp=self.etp, vpp=self.vpp)
        for name, size in sizes.items():
            if size < 1:
                raise LayoutError(
                    f"{name} is {size}. Fix: set it to 1 or more",
                    code="value-out-of-range",
                )
        for product, names in ((self.tp * self.pp, "tp x pp"), (self.etp * self.ep * self.pp, "expert_tp x ep x pp")):
            if self.world % product:
                raise LayoutError(
                    f"{self.world} ranks are not a multiple of {names} = {product}. Fix: change the number of workers, "
                    "or the parallel sizes",
                    code="workers-not-divisible",
                )

    @property
    def etp(self) -> int:
        """Tensor-parallel ranks of each expert."""
        return self.tp if self.expert_tp is None else self.expert_tp

    @property
    def dp(self) -> int:
        """Replicas of each dense operator (of its slice, with tensor parallelism): D_dp."""
        return self.world // (self.tp * self.pp)

    @property
    def expert_dp(self) -> int:
        """Replicas of each expert, equal to the number of expert-parallel groups: D_dp / D_ep."""
        return self.world // (self.etp * self.ep * self.pp)

    def rank(self, tp: int, dp: int, pp: int) -> int:
        """Returns the rank at dense coordinates."""
        return tp + self.tp * (dp + self.dp * pp)

    def expert_rank(self, etp: int, ep: int, expert_dp: int, pp: int) -> int:
        """Returns the rank at expert coordinates."""
        return etp + self.etp * (ep + self.ep * (expert_dp + self.expert_dp * pp))

    def replicas(self, tp: int, pp: int) -> tuple[int, ...]:
        """Returns the ranks that hold one slice of the dense operators of a stage, in data-parallel order."""
        return tuple(self.rank(tp, dp, pp) for dp in range(self.dp))

    def expert_replicas(self, etp: int, ep: int, pp: int) -> tuple[int, ...]:
        """Returns the ranks that hold one slice of the same experts, one in each expert-parallel group, in order."""
        return tuple(self.expert_rank(etp, ep, group, pp) for group in range(self.expert_dp))

    def stage(self, rank: int) -> int:
        """Returns the pipeline stage of a rank."""
        return rank // (self.world // self.pp)

    def stage_of_layer(self, layer: int, num_layers: int) -> int:
        """Returns the pipeline stage that computes a layer, interleaved with virtual stages."""
        chunks = self.pp * self.vpp
        if num_layers % chunks:
            raise LayoutError(
                f"{num_layers} layers are not a multiple of {chunks} pipeline stages. Fix: change the number of layers "
                "or of stages",
                code="layers-not-divisible",
            )
        return layer // (num_layers // chunks) % self.pp
