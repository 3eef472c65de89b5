"""Authenticates the objects that torch.distributed pickles, so that only objects of this job are unpickled.

megatron-core gathers objects, and unpickling can run any code of the sender.  So each object has an HMAC-SHA256 of the
pickle, the job, the generation and the group, with a key of the token; it is verified before unpickling.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from moc.runtime.results import on_host

_MAC_BYTES = 32


class SealError(RuntimeError):
    """An object was not sent by a worker of this job, in this generation and to this group."""


def functions(token: bytes, where: Callable[[Any], tuple[str, int, str]]) -> dict[str, Callable]:
    """Returns authenticating versions of the two functions of ``distributed_c10d`` that convert all objects.

    Args:
        token: the job's secret.
        where: returns the job's id, the generation and the name of a group; its argument is None for the world.
    """
    key = hmac.digest(token, b"objects of groups", "sha256")
    to_tensor, to_object = c10d._object_to_tensor, c10d._tensor_to_object

    def seal_of(pickled: bytes, group) -> bytes:
        job, generation, name = where(group)
        return hmac.digest(key, f"{job} {generation} {name} ".encode() + pickled, "sha256")

    def sealed(obj, device, group, *more):  # torch passes weights_only from 2.14 on
        pickled, _ = to_tensor(obj, torch.device("cpu"), group, *more)
        data = pickled.numpy().tobytes()
        whole = torch.frombuffer(bytearray(data + seal_of(data, group)), dtype=torch.uint8)
        whole = whole.to(device, copy=True)  # torch resizes it to the largest object, which a buffer does not allow
        return whole, torch.tensor([whole.numel()], dtype=torch.int64, device=device)

    def unsealed(tensor, tensor_size, group, *more):
        data = on_host(tensor).numpy().tobytes()[: int(on_host(tensor_size))]
        pickled, seal = data[:-_MAC_BYTES], data[-_MAC_BYTES:]
        if not hmac.compare_digest(seal, seal_of(pickled, group)):
            _, generation, name = where(group)
            raise SealError(f"an object in {name} is not of a worker of this job in generation {generation}")
        return to_object(torch.frombuffer(bytearray(pickled), dtype=torch.uint8), len(pickled), group, *more)

    return {"_object_to_tensor": sealed, "_tensor_to_object": unsealed}
