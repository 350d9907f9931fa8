"""Parameters that arrive as DTensors, as FSDP2's `fully_shard` leaves them: this rank's part, and the whole.

State is kept for this rank's part alone. Adam needs no more than that; for Muon see speedrun.optim.spread.
State that is cut as its parameter is a DTensor, too, as torch.distributed.checkpoint wants it.
"""

from collections import UserDict
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor


def is_sharded(p: Tensor) -> bool:
    """Whether `p` is a DTensor. Importing its module for an `isinstance` takes half a second."""
    return hasattr(p, "device_mesh") and hasattr(p, "placements")


def local_of(p: Any) -> Tensor:
    """This rank's part, sharing memory with the parameter; the parameter itself when it is an ordinary one."""
    return p.to_local() if is_sharded(p) else p


def redistribute(grad: Any, p: Any) -> Tensor:
    """This rank's part of a gradient, laid out as its DTensor. All ranks of its mesh must call this, no others.

    Under `SequenceParallel` a weight is the same on all ranks, and each has only a share of the gradient's sum.
    """
    return grad.redistribute(p.device_mesh, p.placements).to_local()


def versions(p: Tensor) -> tuple[int, int]:
    """Version counters that change with every write: to a DTensor the first, to a rank's part the second."""
    return p._version, local_of(p)._version


def as_dtensor(part: Any, like: Any) -> Any:
    """This rank's part of a tensor of the state of `like`, as a DTensor that lies on the ranks as `like` does.

    `part` itself if it is no tensor or a DTensor already, or `like` an ordinary tensor.
    """
    if not torch.is_tensor(part) or is_sharded(part) or not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    shape = torch.Size(full_shape(tuple(part.shape), like))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)


def full_tensor(p: Any) -> Tensor:
    """The whole of a DTensor, which all ranks must call; an ordinary tensor as it is."""
    return p.full_tensor() if is_sharded(p) else p


def gather_full(part: Tensor, like: Any) -> Tensor:
    """The parts of all ranks as one tensor, laid out as `like`. All ranks must call this."""
    return full_tensor(as_dtensor(part, like))


def local_part(whole: Tensor, like: Any) -> Tensor:
    """This rank's part of a tensor that all ranks have; all of it unless `like` is a DTensor. Nothing is sent."""
    if not is_sharded(like):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    full_tensor = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return full_tensor.redistribute(mesh, like.placements).to_local()


def device_meshes(params: Iterable[Any]) -> list[Any]:
    """The device meshes of those of `params` that are DTensors, each once, as far as this rank is on them."""
    meshes = dict.fromkeys(p.device_mesh for p in params if is_sharded(p))
    return [mesh for mesh in meshes if mesh.get_coordinate() is not None]


def max_over(value: Tensor, meshes: Iterable[Any]) -> Tensor:
    """The largest `value` of all ranks of each mesh; values from one mesh go on to the next.

    It travels on the meshes' devices, for which they have a backend: weights that FSDP keeps on the CPU are elsewhere.
    """
    for mesh in meshes:
        value = value.to(mesh.device_type)
        for group in mesh.get_all_groups():
            torch.distributed.all_reduce(value, torch.distributed.ReduceOp.MAX, group=group)
    return value


def full_shape(part: tuple[int, ...], like: Any) -> tuple[int, ...]:
    """The shape of a whole tensor of the state of `like`, of which this rank's part has the shape `part`."""
    local = local_of(like).shape
    return tuple(like.shape[d] if n == local[d] else n for d, n in enumerate(part))


class LocalState(UserDict[str, Any]):
    """The state of a DTensor as a step sees it: this rank's part of tensors that are cut as `like` is."""

    def __init__(self, state: dict[str, Any], like: Any, whole: Collection[str]) -> None:
        self.data, self.like, self.whole = state, like, whole

    def __getitem__(self, key: str) -> Any:
        return local_of(self.data[key])

    def __setitem__(self, key: str, value: Any) -> None:
        # A weight that FSDP keeps on the CPU is elsewhere than its mesh; its state stays with it, as a plain tensor.
        here = torch.is_tensor(value) and value.device.type == self.like.device_mesh.device_type
        plain = key in self.whole or key == "mantissa" or not here
        self.data[key] = value if plain else as_dtensor(value, self.like)


def local_saved(saved: Any, like: Any, what: str) -> Tensor:
    """This rank's part of a saved state of `like`: of a DTensor on the same mesh, or of a whole tensor."""
    if not is_sharded(saved):
        return local_part(saved, like)
    if not is_sharded(like):
        raise ValueError(
            f"{what} is a DTensor, and the parameter is not. Save the whole state, with "
            "get_optimizer_state_dict(..., options=StateDictOptions(full_state_dict=True)), and load that."
        )
    if saved.device_mesh != like.device_mesh:
        raise ValueError(
            f"{what} is on {saved.device_mesh}, and the parameter on {like.device_mesh}. "
            "Load it with torch.distributed.checkpoint, which moves it, or load the whole state."
        )
    return redistribute(saved, like)


def load_tensor(
    saved: Tensor, like: Any, what: str, part: tuple[int, ...], dtype: torch.dtype, whole: bool = False
) -> Tensor:
    """A copy of a saved state of `like`, of which this rank keeps the shape `part`; of all if it is kept `whole`."""
    expected = full_shape(part, like) if is_sharded(like) and not whole else part
    if tuple(saved.shape) != expected:
        raise ValueError(f"{what} has shape {tuple(saved.shape)}, but this model's needs {expected}.")
    if not saved.is_floating_point() or (dtype == torch.bfloat16 and saved.dtype != dtype):
        raise ValueError(f"{what} has dtype {saved.dtype}, and is kept in {dtype}; save it again without a cast.")
    mine = full_tensor(saved) if whole else local_saved(saved, like, what)
    return mine.detach().to(local_of(like).device, dtype, copy=True)
