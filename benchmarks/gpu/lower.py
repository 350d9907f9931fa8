"""Code for a GPU, as Inductor makes it, without running any: kernels, bytes, and what the backward pass needs.

Fake tensors go through Dynamo, AOTAutograd and Inductor as in training. The generated module is kept instead of loaded.
"""

import importlib.util
import re
import tempfile
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.graph import GraphLowering

from benchmarks.gpu.declared import WAITS, launches_of
from speedrun.model.head import has_fp8_units

# A gradient in 8 bits is made from a scaled copy in 16, and is transposed: 1.5 times the gradient at most. On a GPU
# without units for such products it is there in 8 bits twice, and one of them is widened to 32: 3.2 times.
SCRATCH, WIDENED = {"speedrun.fp8_product": 1.5, "speedrun.fp8_gradients": 1.5}, 3.2


@dataclass(frozen=True)
class Lowered:
    """One graph: a forward or a backward pass."""

    backward: bool
    kernels: int
    """Launches of Triton kernels."""
    products: int
    """Calls of cuBLAS and of opaque operators, all of which are declared."""
    launches: int
    """Of all of them; an opaque operator may launch several kernels."""
    waits: int
    """How often opaque operators wait for the GPU, by what they declare."""
    bytes: int
    """Read and written by all of them, as Inductor counts."""
    saved: int
    """What a forward pass leaves for the backward pass, weights and inputs aside."""
    peak: int
    """The most that is alive at once, weights and inputs that outlive the pass aside."""
    code: str

    @property
    def name(self) -> str:
        return "backward" if self.backward else "forward"

    def sources(self) -> dict[str, str]:
        """Its Triton kernels by name, each a module's text."""
        return dict(
            re.findall(r"^(\w+) = async_compile\.triton\('\w+', '''\n(.*?)'''", self.code, re.DOTALL | re.MULTILINE)
        )


class HostSync(Exception):
    """A graph waits for a number from the GPU, and the line that asks for it."""


class Caught(Exception):
    """All graphs are there: calling them would run kernels."""


def lower(
    function: Callable[..., Tensor], *args: Any, arithmetic: torch.dtype | None = torch.bfloat16, **options: Any
) -> list[Lowered]:
    """The forward and the backward graph of `function(*args, **options)`, fake tensors, compiled as the trainer does.

    Raises what Dynamo or Inductor raise (a graph break, an operator without a lowering, a failed assertion), and
    HostSync.
    """
    found: list[Lowered] = []

    def keep(graph: GraphLowering) -> types.ModuleType:
        lowered, module = taken(graph, stop)
        found.append(lowered)
        waits.extend(syncs(graph))
        made.append(Path(str(module.__file__)))
        return module

    def stop(_: object) -> None:
        raise Caught

    made: list[Path] = []
    waits: list[str] = []
    before = GraphLowering.compile_to_module
    GraphLowering.compile_to_module = keep  # type: ignore[method-assign]
    try:
        torch._dynamo.reset()
        compiled = torch.compile(function, dynamic=False, fullgraph=True)
        with torch.autocast("cuda", arithmetic, enabled=arithmetic is not None):
            compiled(*args, **options)
    except Caught:
        pass
    finally:
        GraphLowering.compile_to_module = before  # type: ignore[method-assign]
        for path in made:
            path.unlink()
    if waits:
        raise HostSync(waits[0])
    return found


def taken(graph: GraphLowering, call: Callable[[Any], Any]) -> tuple[Lowered, types.ModuleType]:
    """What a graph was lowered to, and a module that calls `call` in its place. Its file is the caller's to remove."""
    code, _ = graph.codegen()
    module = types.ModuleType("lowered")
    module.call = call  # type: ignore[attr-defined]
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
        file.write(code.value)
    module.__file__ = graph.cache_path = file.name
    graph.cache_key, graph.cache_linemap = "lowered", []
    return measure(graph, code.value), module


def syncs(graph: GraphLowering) -> list[str]:
    """The lines that read a number back."""
    return [written(node) for node in graph.module.graph.nodes if "_local_scalar_dense" in str(node.target)]


def origin(graph: GraphLowering, namespace: str, name: str) -> str:
    """The line that first calls an operator."""
    nodes = (n for n in graph.module.graph.nodes if str(n.target).startswith(f"{namespace}.{name}."))
    return next(map(written, nodes), "a line unknown")


def written(node: torch.fx.Node) -> str:
    """Where a node comes from: the innermost line outside of torch."""
    lines = [line.strip() for line in node.meta.get("stack_trace", "").splitlines()]
    ours = [i for i, line in enumerate(lines) if line.startswith("File ") and "/torch/" not in line]
    return " ".join(lines[ours[-1] : ours[-1] + 2]) if ours else str(node)


def measure(graph: GraphLowering, code: str) -> Lowered:
    total, _, _ = graph.count_bytes()
    outputs = {name for name in graph.get_output_names() if name in graph.name_to_buffer}
    kernels, products = code.count(".run("), len(re.findall(r"extern_kernels\.\w+\(", code))
    operators = re.findall(r"= torch\.ops\.(\w+)\.(\w+)[\w.]*\(", code)
    return Lowered(
        backward=bool(graph.is_backward),
        kernels=kernels,
        products=products + len(operators),
        launches=kernels + products + sum(launches_of(*operator, origin(graph, *operator)) for operator in operators),
        waits=sum(WAITS.get("::".join(operator), 0) for operator in operators),
        bytes=int(total),
        saved=0 if graph.is_backward else sum(size_of(graph, name) for name in outputs),
        peak=peak(graph, code),
        code=code,
    )


def size_of(graph: GraphLowering, name: str) -> int:
    """Bytes of a buffer or an input; 0 for what is no tensor."""
    box = graph.graph_inputs[name] if name in graph.graph_inputs else graph.name_to_buffer[name]
    if isinstance(box, sympy.Expr):
        return 0
    layout = box.get_output_spec() if isinstance(box, ir.Operation) else box.get_layout()
    if not isinstance(layout, ir.Layout):
        return 0
    count = graph.sizevars.optimization_hint(layout.storage_size(), fallback=1)
    return int(count) * layout.dtype.itemsize


def peak(graph: GraphLowering, code: str) -> int:
    """The most bytes alive at once, followed through the generated code: what it allocates, reuses and deletes.

    Weights and other inputs of the model, called primals, are there before and after, and are left out. What an opaque
    operator of ours allocates inside is counted as SCRATCH of its arguments.
    """
    alive = {name: size_of(graph, name) for name in graph.graph_inputs if not name.startswith("primals")}
    most = sum(alive.values())
    for line in code[code.index("def call(") :].splitlines():
        made = re.match(r"\s+(\w+) = ", line)
        freed = [name for names in re.findall(r"\bdel ([\w, ]+)", line) for name in re.findall(r"\w+", names)]
        if line.endswith("# reuse"):
            for name in freed:
                alive.pop(name, None)
        if made and made[1] in graph.name_to_buffer:
            alive[made[1]] = size_of(graph, made[1])
        call = re.search(r"torch\.ops\.(\w+\.\w+)\.\w+\((.*)\)", line)
        inside = 0.0
        if call and call[1] in SCRATCH:
            known = [name for name in re.findall(r"\w+", call[2]) if name in graph.name_to_buffer]
            factor = SCRATCH[call[1]] if has_fp8_units(torch.device("cuda")) else WIDENED
            inside = factor * sum(size_of(graph, name) for name in known)
        most = max(most, sum(alive.values()) + int(inside))
        for name in freed:
            alive.pop(name, None)
    return most


def compile_kernels(lowered: Lowered) -> dict[str, int]:
    """Machine code of every Triton kernel, by ptxas; bytes of shared memory by kernel, of its hungriest variant."""
    shared = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, source in lowered.sources().items():
            path = Path(folder) / f"{name}.py"
            path.write_text(source)
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            kernel = getattr(module, name)
            shared[name] = max(kernel._precompile_config(config).kernel.metadata.shared for config in kernel.configs)
    return shared
