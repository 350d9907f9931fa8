"""What operators cost that neither Inductor nor a dispatch mode can look into. Whoever adds one says so here."""

DECLARED = {
    # Prepares the schedule of the documents, attends; sums rows of the gradient, makes gradients, rounds that of q.
    "bench::fa3_forward": 2,
    "bench::fa3_backward": 3,
    # Flash Attention 2 prepares nothing.
    "torch_attn::_varlen_attn": 1,
    "torch_attn::_varlen_attn_backward": 3,
    "speedrun::lookup": 1,
    "speedrun::lookup_gradient": 1,
    "speedrun::fp8_product": 5,
    "speedrun::fp8_gradients": 8,
}
"""Kernels that an opaque operator launches. A test counts those of this package's own operators in their bodies."""

WAITS = {"speedrun::fp8_product": 2, "speedrun::fp8_gradients": 4}
"""How often one of them waits for the GPU; the others do not."""

OPEN = ("aten", "prims", "prim", "inductor", "profiler")
"""Namespaces of operators that are kernels of torch, or none."""


class Undeclared(Exception):
    """An opaque operator that nobody has counted, and where it was called."""


def launches_of(namespace: str, name: str, where: str) -> int:
    """Kernels of `namespace::name` on a GPU."""
    if namespace in OPEN:
        return 1
    found = DECLARED.get(f"{namespace}::{name}")
    if found is None:
        raise Undeclared(f"{namespace}::{name} at {where} is not in benchmarks.gpu.declared.DECLARED")
    return found
