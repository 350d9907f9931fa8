"""Which parameter goes to which optimizer.

    plan = route(model)
    print(plan)                                                     # a table with the reason for each parameter
    optimizer = Combined(NorMuon(plan.muon, lr=0.02), Adam(plan.adam, lr=0.001))

Muon is for the matrices inside a network. Tables that are looked up, the head that makes logits, and everything with
fewer than two dimensions go to Adam. Where the choice is wrong, a name pattern overrides it:

    route(model, override={"*.gate.weight": "adam", "decoder.out*": "muon", "vision.*": "frozen"})
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

Place = Literal["muon", "adam", "frozen"]
TABLE_WORDS = ("embed", "wte", "wpe", "lookup")
HEAD_WORDS = ("head", "lm_head", "logits", "classifier", "unembed")


@dataclass(frozen=True)
class Route:
    name: str
    parameter: nn.Parameter
    place: Place
    part: str  # the group it is in: matrices, banks, tables, head, low rank, vectors
    reason: str


@dataclass(frozen=True)
class Plan:
    """Where everything goes. `muon` and `adam` are parameter groups ready to use; printing it shows the table."""

    routes: tuple[Route, ...]

    @property
    def muon(self) -> list[dict[str, Any]]:
        return self._groups("muon")

    @property
    def adam(self) -> list[dict[str, Any]]:
        return self._groups("adam")

    def _groups(self, place: str) -> list[dict[str, Any]]:
        parts: dict[str, list[tuple[str, nn.Parameter]]] = {}
        for r in self.routes:
            if r.place == place:
                parts.setdefault(r.part, []).append((r.name, r.parameter))
        return [
            {"params": members, "part": part} | ({"matrix": "batch"} if part == "banks" and place == "muon" else {})
            for part, members in parts.items()
        ]

    def __str__(self) -> str:
        rows = [("to", "parameter", "shape", "why")]
        rows += [(r.place, r.name, "x".join(map(str, r.parameter.shape)) or "scalar", r.reason) for r in self.routes]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows]
        for place in get_args(Place):
            members = [r for r in self.routes if r.place == place]
            if members:
                total = sum(r.parameter.numel() for r in members)
                lines.append(f"{place}: {len(members)} tensors, {total:,} parameters")
        return "\n".join(lines)


def route(model: nn.Module, override: Mapping[str, Place] | None = None) -> Plan:
    """Decide for every parameter of `model`; the last matching pattern of `override` wins.

    ValueError when nothing is left for Muon, when a pattern matches no parameter, or when Muon would get a weight that
    is stored transposed (Conv1D of transformers): all are mistakes that would otherwise go unnoticed.
    """
    override = dict(override or {})
    for pattern, place in override.items():
        if place not in get_args(Place):
            raise ValueError(f"override[{pattern!r}] is {place!r}; it must be one of: {', '.join(get_args(Place))}.")
    tables = {
        id(module.weight): module.num_embeddings
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    kernels = {id(module.weight) for module in model.modules() if isinstance(module, _ConvNd)}
    transposed = {id(module.weight): name for name, module in model.named_modules() if _is_transposed(module)}
    named = list(model.named_parameters())
    first_names = {name for name, _ in named}
    tied = {id(p): name for name, p in model.named_parameters(remove_duplicate=False) if name not in first_names}
    head, why_head, doubt = _output_layer(model, named, tables, tied)
    if doubt and not any(fnmatchcase(doubt, pattern) for pattern in override):
        warnings.warn(
            "route() found no output layer: no name says head, and no matrix has as many rows as an embedding table. "
            f"If {doubt} produces the outputs, pass override={{{doubt!r}: 'adam'}}, else {{{doubt!r}: 'muon'}}.",
            stacklevel=2,
        )
    routes = []
    for name, p in named:
        place, part, reason = _default(name, p, tables, kernels)
        if p is head and place == "muon":
            place, part, reason = "adam", "head", why_head
        if id(p) in tied:
            reason += f", tied with {tied[id(p)]}"
        for pattern, wanted in override.items():
            if fnmatchcase(name, pattern):
                if wanted == "muon" and p.ndim < 2:
                    raise ValueError(
                        f"override[{pattern!r}] sends {name} to Muon, but it has {p.ndim} dimensions and Muon needs 2."
                    )
                if wanted != place:
                    part = "matrices" if wanted == "muon" else "others"
                place, reason = wanted, f"override {pattern!r}"
        if place == "muon" and id(p) in transposed:
            alike = "*" + ".".join(name.split(".")[-2:])
            raise ValueError(
                f"{transposed[id(p)] or 'The model'} is a Conv1D of transformers, whose weight is stored as (inputs, "
                "outputs): Muon would take its rows for outputs and give updates of the wrong size. Replace it by an "
                f'nn.Linear with the transposed weight, or train it with Adam: override={{"{alike}": "adam"}}.'
            )
        routes.append(Route(name, p, place, part, reason))
    unused = [pattern for pattern in override if not any(fnmatchcase(name, pattern) for name, _ in named)]
    if unused:
        raise ValueError(f"override[{unused[0]!r}] matches no parameter; their names are like {named[0][0]!r}.")
    plan = Plan(tuple(routes))
    if not plan.muon:
        raise ValueError(
            f"No parameter is left for Muon, so this model would train with Adam alone:\n{plan}\n"
            'Send some there, e.g. route(model, override={"blocks.*weight": "muon"}), or use Adam by itself.'
        )
    return plan


def _output_layer(
    model: nn.Module, named: list[tuple[str, nn.Parameter]], tables: dict[int, int], tied: Mapping[int, str]
) -> tuple[Tensor | None, str, str]:
    """The matrix that produces the outputs where no name says so, and how it was found; or a name that may be it."""
    if any(_has(name, HEAD_WORDS) for name, p in named if p.ndim == 2) or any(i in tables for i in tied):
        return None, "", ""
    heights = set(tables.values()) | {p.shape[0] for name, p in named if p.ndim == 2 and _has(name, TABLE_WORDS)}
    matrices = [(n, p) for n, p in named if p.ndim == 2 and id(p) not in tables and not _has(n, TABLE_WORDS)]
    found = [p for _, p in matrices if p.shape[0] in heights]
    if len(found) == 1:
        return found[0], f"{found[0].shape[0]} rows, as many as an embedding table", ""
    last: nn.Module = model
    while isinstance(last, nn.Sequential) and len(last):
        last = next((m for m in reversed(list(last)) if any(True for _ in m.parameters())), last[-1])
    if isinstance(model, nn.Sequential) and isinstance(last, nn.Linear) and len(named) > len(list(last.parameters())):
        return last.weight, "last layer of a Sequential", ""
    return None, "", matrices[-1][0] if matrices else ""


def _default(name: str, p: nn.Parameter, tables: dict[int, int], kernels: set[int]) -> tuple[Place, str, str]:
    if not p.requires_grad:
        return "frozen", "frozen", "requires no gradient"
    if p.ndim < 2:
        return "adam", "vectors", "fewer than two dimensions"
    if any(part.lower().startswith("lora_") for part in name.split(".")):
        # Its product with the other factor changes by more than a step of Muon is meant to: sqrt(rows / rank) more.
        return "adam", "low rank", "low-rank factor (LoRA)"
    if id(p) in tables:
        return "adam", "tables", "embedding table"
    if _has(name, HEAD_WORDS):
        return "adam", "head", "its name says head"
    if _has(name, TABLE_WORDS):
        return "adam", "tables", "its name says table"
    bank = p.ndim == 3 and id(p) not in kernels
    rows, cols = p.shape[-2:] if bank else (p.shape[0], p[:1].numel())
    if min(rows, cols) <= 1:
        return "adam", "vectors", "a single row or column"
    if bank:
        return "muon", "banks", f"bank of {len(p)} matrices, each orthogonalised by itself"
    if id(p) in kernels:
        return "muon", "matrices", "convolution kernel, flattened to (outputs, everything else)"
    return "muon", "matrices", "hidden matrix" if p.ndim == 2 else "hidden matrix, flattened from more dimensions"


def _is_transposed(module: nn.Module) -> bool:
    """Whether `module` is a Conv1D of transformers, or made from one; torch's is called Conv1d and has no `nf`."""
    named_so = any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)
    return named_so and hasattr(module, "nf") and getattr(getattr(module, "weight", None), "ndim", 0) == 2


def _has(name: str, words: tuple[str, ...]) -> bool:
    return any(word in part for part in name.lower().split(".") for word in words if not _inside_head(part, word))


def _inside_head(part: str, word: str) -> bool:
    """`heads` and `multihead` speak of attention, not of the head that makes logits."""
    return word == "head" and ("heads" in part or "multihead" in part)
