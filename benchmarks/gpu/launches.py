"""Kernel launches, waits of the host, and collectives of a program on fake CUDA tensors, by the line that causes them.

    with fake_gpu(), Launches() as counted:
        optimizer.step()

Tensors on a CPU stay real, so whatever the program decides on the host it decides as it would. What comes back from the
GPU is all ones. An operator of torch counts as one kernel, though sorts and scans are several.
"""

import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import speedrun
from benchmarks.gpu.declared import OPEN, WAITS, Undeclared, launches_of
from benchmarks.gpu.lower import taken

SOURCE = Path(speedrun.__file__).parents[1]
NOWHERE = "autograd itself"  # it has threads of its own, without a line of ours

FREE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "set_", "resize_",
    "squeeze_", "unsqueeze_", "t_", "transpose_", "as_strided_", "detach_", "record_stream", "is_pinned",
}  # fmt: skip
"""Run no kernel, beside views."""
MORE = {"addmm": 2, "baddbmm": 2}
"""Kernels where it is not one: these copy what is added into the result before they multiply."""
ANSWERED = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave", "equal"}
"""Wait for the GPU because their result's shape, or the result itself, is needed on the host."""

# ATen/native/cuda/MultiTensorApply.cuh, for CUDA 12; builds for CUDA 13 take seven times as many.
CHUNK, BLOCKS, TENSORS = 65_536, 320, (110, 64, 48, 36, 30)

KINDS = {
    "_reduce_scatter_base_": "reduce-scatter", "reduce_scatter_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "_allgather_base_": "all-gather", "allgather_": "all-gather", "allgather_into_tensor_coalesced_": "all-gather",
    "allreduce_": "all-reduce", "allreduce_coalesced_": "all-reduce", "broadcast_": "broadcast",
}  # fmt: skip
"""Collectives, which are counted apart from launches."""


def fake_gpu() -> FakeTensorMode:
    """The mode to count under. It has symbols, for operators whose result has as many rows as it happens to have."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)


class Launches(TorchDispatchMode):
    """Counts while it is entered, inside `fake_gpu()`. `base` is the folder whose lines are named."""

    current: ClassVar["Launches | None"] = None
    _pinned: ClassVar[dict[int, Tensor]] = {}  # by address; they stay alive, so that nothing else gets it

    def __init__(self, base: Path = SOURCE) -> None:
        super().__init__()
        self.base = base
        self.launches: Counter[str] = Counter()
        self.syncs: Counter[tuple[str, str]] = Counter()  # (line, what it does)
        self.copies: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.passes = 0
        """Through code that is counted elsewhere."""
        self._lifted: tuple[Tensor, str] | None = None
        self._elsewhere = 0
        self._made: list[Path] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled regions are compiled in here, too, and count as what they became

    def __enter__(self) -> "Launches":
        self._before = Launches.current, torch.cuda.Event, torch.cuda.synchronize, GraphLowering.compile_to_module
        Launches.current = self
        torch.cuda.Event, torch.cuda.synchronize = Event, waited  # type: ignore[misc, assignment]
        GraphLowering.compile_to_module = compiled_region  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        Launches.current, torch.cuda.Event, torch.cuda.synchronize = self._before[:3]  # type: ignore[misc]
        GraphLowering.compile_to_module = self._before[3]  # type: ignore[method-assign]
        while self._made:
            self._made.pop().unlink()

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Code that runs compiled, whose kernels are counted when it is lowered. Waits of its opaque operators are not
        seen there, and are counted here."""
        self._elsewhere += 1
        try:
            yield
        finally:
            self._elsewhere -= 1

    def line(self) -> str:
        """The innermost line of the project that is being executed."""
        frame, start = sys._getframe(1), f"{self.base}/"
        while frame is not None:
            if frame.f_code.co_filename.startswith(start):
                return f"{self.base.name}/{frame.f_code.co_filename.removeprefix(start)}:{frame.f_lineno}"
            frame = frame.f_back  # type: ignore[assignment]
        return NOWHERE

    def by_line(self) -> dict[str, tuple[int, int, int]]:
        """(launches, syncs, copies) of each line, the most first."""
        syncs: Counter[str] = Counter()
        for (line, _), count in self.syncs.items():
            syncs[line] += count
        lines = {*self.launches, *syncs, *self.copies}
        found = [(line, (self.launches[line], syncs[line], self.copies[line])) for line in lines]
        return dict(sorted((x for x in found if any(x[1])), key=lambda x: ([-n for n in x[1]], x[0])))

    # ------------------------------------------------------------------ operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func.namespace == "c10d":
            return self._collective(func, name, args, kwargs)
        lifted, self._lifted = self._lifted, None
        devices = {x.device.type for x in tensors}
        if kwargs.get("device") is not None:
            devices.add(torch.device(kwargs["device"]).type)
        if "cuda" not in devices:
            return self._on_host(func, name, args, kwargs)
        if func.namespace not in OPEN:
            launches_of(func.namespace, name, self.line())  # refused before it runs
            self._wait(f"in {func._schema.name}", WAITS.get(func._schema.name, 0))
        if self._elsewhere:
            return func(*args, **kwargs)
        if name == "_local_scalar_dense":
            self._wait("item")
            with unset_fake_temporarily():
                return torch.ones((), dtype=tensors[0].dtype).item()
        if name in ANSWERED or masked(name, args):
            self._wait(name)
            self.launches[self.line()] += 1
            return True if name == "equal" else func(*args, **kwargs)
        if name in ("copy_", "_to_copy") and len(devices) == 2:
            return self._across(func, name, args, kwargs, lifted)
        out = func(*args, **kwargs)
        self.launches[self.line()] += self._kernels(func, name, args, out)
        return out

    def _kernels(self, func: Any, name: str, args: Any, out: Any) -> int:
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        sizes = [x.numel() for x in results]
        empty = bool(sizes) and all(isinstance(n, int) and n == 0 for n in sizes)  # others are symbols
        if func.is_view or name in FREE or empty:
            return 0
        if name.startswith(("_foreach_", "_fused_")):
            lists = [x for x in args if isinstance(x, list | tuple) and x and isinstance(x[0], Tensor)]
            return foreach_launches(name, lists)
        if not results and func.namespace in OPEN:
            return 0  # it asks for a size or a device
        return MORE.get(name) or launches_of(func.namespace, name, self.line())

    def _wait(self, what: str, times: int = 1) -> None:
        if times:
            self.syncs[self.line(), what] += times

    def _on_host(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """For real, unless it was made fake before. There is nobody to pin memory for, so that is remembered."""
        pinned = kwargs.pop("pin_memory", False) or name == "_pin_memory"
        if name == "is_pinned":
            return self._is_pinned(args[0])
        if any(isinstance(x, FakeTensor) for x in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            out = args[0].clone() if name == "_pin_memory" else func(*args, **kwargs)
        if pinned:
            self._pinned[out.untyped_storage().data_ptr()] = out
        if name == "lift_fresh":
            self._lifted = out, self.line()
        return out

    def _is_pinned(self, x: Tensor) -> bool:
        return not isinstance(x, FakeTensor) and x.untyped_storage().data_ptr() in self._pinned

    def _across(self, func: Any, name: str, args: Any, kwargs: Any, lifted: tuple[Tensor, str] | None) -> Any:
        """A copy between the host and the GPU."""
        target, source = args[:2] if name == "copy_" else (None, args[0])
        free = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        if source.device.type == "cuda":
            if not free:
                self._wait("copy to the CPU")
            else:
                self.launches[self.line()] += 1
            with unset_fake_temporarily():
                if target is not None:
                    return target.fill_(1)
                return torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        if free and self._is_pinned(source):
            self.launches[self.line()] += 1
        elif lifted is not None and lifted[0] is source and lifted[1] == self.line():
            self._wait("torch.tensor on the GPU")
        else:
            self.copies[self.line()] += 1
        return func(*args, **kwargs)

    def _collective(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Counted by the larger side, which is the whole buffer; between CPUs it is a message."""
        sizes = [[x.nbytes for x in tree_leaves(side) if isinstance(x, Tensor)] for side in args[:2]]
        first = next(x for x in tree_leaves(args) if isinstance(x, Tensor))
        kind = KINDS.get(name) if first.device.type == "cuda" else "message"
        if kind is None:
            raise Undeclared(f"c10d::{name} at {self.line()} is not in benchmarks.gpu.launches.KINDS")
        self.collectives[kind] += 1
        self.bytes[kind] += max(map(sum, sizes))
        return func(*args, **kwargs)


def masked(name: str, args: Any) -> bool:
    """Whether this is x[mask], which asks how many there are; x[mask] = 0 does not."""
    if name not in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return False
    one = name != "index" and args[2].numel() == 1
    return not one and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])


def foreach_launches(name: str, lists: list[Any]) -> int:
    """What a `_foreach_` operator launches: blocks of elements of so many tensors at a time, see MultiTensorApply."""
    depth = len(lists) + (not name.endswith("_"))
    rows = list(zip(*lists, strict=False))
    alike = len({x.dtype for row in rows for x in row}) == 1 or name == "_foreach_copy_"
    if not alike or any(len({x.stride() for x in row}) > 1 for row in rows):
        return len(rows)  # the slow route: one after the other
    launches = blocks = tensors = 0
    for x in lists[0]:
        chunks = -(-x.numel() // CHUNK)
        tensors += chunks > 0
        for chunk in range(chunks):
            blocks, last = blocks + 1, chunk == chunks - 1
            if blocks == BLOCKS or (last and tensors == TENSORS[min(depth, 5) - 1]):
                launches, blocks, tensors = launches + 1, 0, int(not last)
    return launches + (blocks > 0)


class Event:
    """Stands in for torch.cuda.Event, which a build without CUDA does not have."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def wait(self, *_: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        if Launches.current is not None:
            Launches.current._wait("event.synchronize")


def waited(*_: Any) -> None:
    """torch.cuda.synchronize"""
    assert Launches.current is not None
    Launches.current._wait("synchronize")


def compiled_region(graph: GraphLowering) -> types.ModuleType:
    """In place of the module that Inductor makes of a graph: one that counts its launches and gives fake results."""

    def call(args: list[Any]) -> list[Any]:
        counted = Launches.current
        assert counted is not None
        counted.launches[counted.line()] += lowered.launches
        counted._wait("in compiled code", lowered.waits)
        known = dict(zip(graph.graph_inputs, args, strict=True))
        out = [result(graph, node, known) for node in graph.graph_outputs]
        args.clear()
        return out

    lowered, module = taken(graph, call)
    assert Launches.current is not None
    Launches.current._made.append(Path(str(module.__file__)))
    return module


def result(graph: GraphLowering, node: Any, known: dict[str, Any]) -> Any:
    number: Callable[[Any], int] = graph.sizevars.optimization_hint
    if isinstance(node, ir.NoneAsConstantBuffer):
        return None
    if isinstance(node, ir.ShapeAsConstantBuffer):
        return number(node.expr)
    if node.get_name() in known:
        return known[node.get_name()]
    size, stride = ([number(n) for n in numbers] for numbers in (node.get_size(), node.get_stride()))
    return torch.empty_strided(size, stride, dtype=node.get_dtype(), device=node.get_device())
