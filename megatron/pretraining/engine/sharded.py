"""Implements ZeRO stage 1 for any number of ranks: dense optimizer state in blocks, each with identical replicas.

megatron-core's ``DistributedOptimizer`` divides its buffers by the number of data-parallel ranks at construction, and
stores each part once.  Here gradients are all-reduced.  A rank has master weights and moments only of the blocks that
it holds (:mod:`moc.elastic.transfers`), and updates only these; all holders of a block compute the same bits.
The owner of a block then sends its weights to the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

from moc.elastic.transfers import Block, Holders, cut_into_blocks


class FragmentedOptimizer(MixedPrecisionOptimizer):
    """Optimizer of megatron-core that is saved only as tensor chunks.

    megatron-core requires these methods; :mod:`megatron.pretraining.engine.state` replaces them.
    """

    def state_dict(self):
        """Not implemented: see the class."""
        raise NotImplementedError

    def load_state_dict(self, state_dict):
        raise NotImplementedError

    def sharded_state_dict(self, model_sharded_state_dict, is_loading: bool = False, metadata: dict | None = None):
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Shard:
    """Block that this rank holds.

    Attributes:
        start: index of the first element in the flattened parameter.
        master: fp32, 1-D: a view of the parameter if it is also fp32.
        holder_index: index of this rank among the holders: 0 for the owner.
    """

    parameter: torch.nn.Parameter
    start: int
    master: torch.Tensor
    holder_index: int

    @property
    def stop(self) -> int:
        """Index behind the last element."""
        return self.start + self.master.numel()


class ShardedOptimizer(FragmentedOptimizer):
    """megatron-core optimizer of the blocks that this rank holds.

    Args:
        dense_optimizer: megatron-core's optimizer of all dense parameters, which this one replaces.
        masters: its parameters, each with its master weights, in the same order on all ranks.
        group: the ranks that share the blocks.

    Attributes:
        blocks: blocks of all parameters.
        held: the blocks that this rank holds by number, ascending.
    """

    is_stub_optimizer = False

    def __init__(
        self,
        dense_optimizer: MegatronOptimizer,
        masters: Sequence[tuple[torch.nn.Parameter, torch.Tensor]],
        group: dist.ProcessGroup,
    ):
        scaler = getattr(dense_optimizer, "grad_scaler", None)
        super().__init__(dense_optimizer.optimizer, dense_optimizer.config, scaler, lambda *_: None)
        attributes: Any = dense_optimizer
        self.tp_group, self._group = attributes.tp_group, group
        group_of_main = {
            main: number for number, settings in enumerate(self.param_groups) for main in settings["params"]
        }
        self._group_of = {parameter: group_of_main[main] for parameter, main in masters}
        self._parameters = [parameter for parameter, _ in masters]
        self.blocks: tuple[Block, ...] = cut_into_blocks([parameter.numel() for parameter in self._parameters])
        self.shards: dict[int, Shard] = {}
        self._holders: Holders = ()
        self.optimizer.state.clear()

    @torch.no_grad()
    def set_holders(self, holders: Holders) -> None:
        """Sets the holders of blocks; blocks that a rank already holds do not change.

        A block that is new to this rank gets the parameter's current weights, and has no moments yet.
        """
        rank, previous = dist.get_rank(self._group), self.shards
        local_indices = {
            number: block_holders.index(rank) for number, block_holders in enumerate(holders) if rank in block_holders
        }
        for number in previous.keys() - local_indices.keys():
            self.optimizer.state.pop(previous[number].master, None)
        self.shards = {
            number: self._shard(number, holder_index, previous.get(number))
            for number, holder_index in sorted(local_indices.items())
        }
        for settings in self.param_groups:
            settings["params"] = []
        for shard in self.shards.values():
            self.param_groups[self._group_of[shard.parameter]]["params"].append(shard.master)
        self._holders = holders

    def _shard(self, number: int, holder_index: int, previous: Shard | None) -> Shard:
        block = self.blocks[number]
        parameter: Any = self._parameters[block.tensor]
        part = parameter.detach().view(-1)[block.start : block.stop]
        master: Any = previous.master if previous else part if part.dtype is torch.float32 else part.float()
        tensor_parallel.copy_tensor_model_parallel_attributes(master, parameter)
        # megatron-core's mark for values that count in norms on another rank
        master.shared = holder_index > 0 or getattr(parameter, "shared", False)
        return Shard(parameter, block.start, master, holder_index)

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self._parameters[0].device

    @property
    def first(self) -> int:
        """Rank of the group that has state; it sends the others the state outside of blocks."""
        return self._holders[0][0]

    @torch.no_grad()
    def gather_weights(self) -> None:
        """Sends the weights of each block from its owner to all ranks; a collective call, safe to repeat.

        Does not overwrite blocks that this rank holds: they have the owner's bits, and this rank may be the next owner.
        If a peer is lost during the call, received data is undefined.
        """
        size, rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        for dtype in dict.fromkeys(parameter.dtype for parameter in self._parameters):
            owned: list[dict[int, torch.Tensor]] = [{} for _ in range(size)]
            for number, (block, holders) in enumerate(zip(self.blocks, self._holders, strict=True)):
                parameter = self._parameters[block.tensor]
                if parameter.dtype is dtype:
                    owned[holders[0]][number] = parameter.detach().view(-1)[block.start : block.stop]
            max_numel = max(sum(part.numel() for part in parts.values()) for parts in owned)
            local_flat = torch.zeros(max_numel, dtype=dtype, device=self._parameters[0].device)
            if owned[rank]:
                local_values = torch.cat([*owned[rank].values()])
                local_flat[: local_values.numel()].copy_(local_values)
            gathered = local_flat.new_empty(size * max_numel)
            dist.all_gather_into_tensor(gathered, local_flat, group=self._group)
            for parts, rank_values in zip(owned, gathered.view(size, max_numel), strict=True):
                lengths = [part.numel() for part in parts.values()]
                for number, values in zip(parts, rank_values[: sum(lengths)].split(lengths), strict=True):
                    if number not in self.shards:
                        parts[number].copy_(values)

    # a megatron-core optimizer

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Removes the gradients from the inner Adam; the reduced ones are kept."""
        for shard in self.shards.values():
            shard.master.grad = None

    def _copy_model_grads_to_main_grads(self) -> None:
        for shard in self.shards.values():
            reduced: Any = shard.parameter
            shard.master.grad = reduced.main_grad.view(-1)[shard.start : shard.stop].to(shard.master.dtype)

    def _copy_main_params_to_model_params(self) -> None:
        for weights, master in self._separate_masters():
            weights.copy_(master)

    def _copy_model_params_to_main_params(self, state_dict=None) -> None:
        for weights, master in self._separate_masters():
            master.copy_(weights)

    def _separate_masters(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields weights that are not their own masters, with their masters."""
        for shard in self.shards.values():
            if shard.parameter.dtype is not shard.master.dtype:
                yield shard.parameter.detach().view(-1)[shard.start : shard.stop], shard.master
