"""Parameters that arrive as DTensors, as FSDP2's `fully_shard` leaves them: this rank's part, and the whole.

State is kept for this rank's part alone. Adam needs no more than that. Muon gathers what it orthogonalises, every rank
does so for all matrices and keeps its own part of the result; `speedrun.optim.sharded` divides that work, too.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def is_sharded(p: Tensor) -> bool:
    """Whether `p` is a DTensor. Importing its module to ask would take half a second."""
    return hasattr(p, "device_mesh") and hasattr(p, "placements")


def local_of(p: Any) -> Tensor:
    """This rank's part, sharing memory with the parameter; the parameter itself when it is an ordinary one."""
    local: Tensor = p.to_local() if is_sharded(p) else p
    return local


def placed_as(grad: Any, p: Any) -> Tensor:
    """This rank's part of a gradient, laid out as its DTensor. All ranks of its mesh must call this, no others.

    Under `SequenceParallel` a weight is the same on all ranks, and each has only a share of the gradient's sum.
    """
    local: Tensor = grad.redistribute(p.device_mesh, p.placements).to_local()
    return local


def whole_of(part: Tensor, like: Any) -> Tensor:
    """The parts of all ranks as one tensor, laid out as `like`. All ranks must call this."""
    from torch.distributed.tensor import DTensor

    together = DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return together.full_tensor()


def part_of(whole: Tensor, like: Any) -> Tensor:
    """This rank's part of a tensor that all ranks have. Nothing is sent."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(mesh, like.placements).to_local()


def meshes_of(params: Iterable[Any]) -> list[Any]:
    """The device meshes of those of `params` that are DTensors, each once, as far as this rank is on them."""
    meshes = dict.fromkeys(p.device_mesh for p in params if is_sharded(p))
    return [mesh for mesh in meshes if mesh.get_coordinate() is not None]


def largest(value: Tensor, meshes: Iterable[Any]) -> Tensor:
    """The largest `value` of all ranks of each mesh, and of what they had heard on the meshes before it.

    It travels on the meshes' devices, for which they have a backend: weights that FSDP keeps on the CPU are elsewhere.
    """
    for mesh in meshes:
        value = value.to(mesh.device_type)
        for group in mesh.get_all_groups():
            torch.distributed.all_reduce(value, torch.distributed.ReduceOp.MAX, group=group)
    return value


def refuse_state(name: str, why: str) -> ValueError:
    """For the state of a DTensor on its way into or out of a checkpoint, of a replicated one, too."""
    return ValueError(
        f"The state of {name} cannot be saved or loaded: it is a DTensor (fully_shard, tensor parallelism), and {why}. "
        "Save the weights alone, use torch.optim.AdamW for such parameters, or train with Interleaved or DDP instead."
    )
