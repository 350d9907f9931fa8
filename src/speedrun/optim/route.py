"""Which parameter goes to which optimizer.

    plan = route(model)
    print(plan)                                                     # a table with the reason for each parameter
    optimizer = Combined(NorMuon(plan.muon, lr=0.02), Adam(plan.adam, lr=0.001))

Muon is for the matrices inside a network. Tables that are looked up, the head that makes logits, and everything with
fewer than two dimensions go to Adam. Where the choice is wrong, a name pattern overrides it:

    route(model, override={"*.gate.weight": "adam", "decoder.out*": "muon", "vision.*": "frozen"})

Fused matrices look like any other; their blocks are given in the same way:

    route(model, blocks={"*.qkv.weight": 3, "*.gqa.weight": [32, 16, 16]})
"""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from speedrun.optim.arguments import require_choice
from speedrun.optim.blocks import Blocks

Destination = Literal["muon", "adam", "frozen"]
TABLE_WORDS = ("embed", "wte", "wpe", "lookup")
HEAD_WORDS = ("head", "lm_head", "logits", "classifier", "unembed")


@dataclass(frozen=True)
class Route:
    name: str
    parameter: nn.Parameter
    to: Destination
    part: str  # the group it is in: matrices, banks, tables, head, low rank, vectors
    reason: str
    transposed: bool = False  # stored as inputs x outputs
    blocks: Blocks = 1


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

    def _groups(self, to: str) -> list[dict[str, Any]]:
        parts: dict[str, list[Route]] = {}
        for r in self.routes:
            if r.to == to:
                parts.setdefault(r.part, []).append(r)
        return [
            {"params": [(r.name, r.parameter) for r in routes], "part": part}
            | ({"matrix": "batch"} if part == "banks" and to == "muon" else {})
            | ({"transposed": [r.transposed for r in routes]} if any(r.transposed for r in routes) else {})
            | ({"blocks": [r.blocks for r in routes]} if any(r.blocks != 1 for r in routes) else {})
            for part, routes in parts.items()
        ]

    def __str__(self) -> str:
        rows = [("to", "parameter", "shape", "why")]
        rows += [(r.to, r.name, "x".join(map(str, r.parameter.shape)) or "scalar", r.reason) for r in self.routes]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows]
        for to in get_args(Destination):
            members = [r for r in self.routes if r.to == to]
            if members:
                total = sum(r.parameter.numel() for r in members)
                lines.append(f"{to}: {len(members)} tensors, {total:,} parameters")
        return "\n".join(lines)


def route(
    model: nn.Module, override: Mapping[str, Destination] | None = None, blocks: Mapping[str, Blocks] | None = None
) -> Plan:
    """Decide for every parameter of `model`; the last matching pattern of `override`, and of `blocks`, wins.

    ValueError when nothing is left for Muon, or when a pattern matches nothing: mistakes that would go unnoticed.
    """
    override, blocks = dict(override or {}), dict(blocks or {})
    for pattern, to in override.items():
        require_choice(f"override[{pattern!r}]", to, Destination)
    known = _Known.of(model)
    head, why_head, doubt = _output_layer(model, known)
    if doubt and not _last_match(doubt, override):
        warnings.warn(
            "route() found no output layer: no name says head, and no matrix has as many rows as an embedding table. "
            f"If {doubt} produces the outputs, pass override={{{doubt!r}: 'adam'}}, else {{{doubt!r}: 'muon'}}.",
            stacklevel=2,
        )
    routes = []
    for name, p in known.named:
        to, part, reason = _default(name, p, known)
        if p is head and to == "muon":
            to, part, reason = "adam", "head", why_head
        if id(p) in known.tied:
            reason += f", tied with {known.tied[id(p)]}"
        match = _last_match(name, override)
        if match is not None:
            wanted = override[match]
            if wanted == "muon" and p.ndim < 2:
                raise ValueError(
                    f"override[{match!r}] sends {name} to Muon, but it has {p.ndim} dimensions and Muon needs 2."
                )
            if wanted != to:
                part = "matrices" if wanted == "muon" else "others"
            to, reason = wanted, f"override {match!r}"
        routes.append(_as_muon_reads_it(Route(name, p, to, part, reason), known, blocks))
    plan = Plan(tuple(routes))
    _refuse_unused("override", override, [r.name for r in routes], routes[0].name if routes else "")
    _refuse_unused("blocks", blocks, [r.name for r in routes if r.to == "muon"], "")
    if not plan.muon:
        raise ValueError(
            f"No parameter is left for Muon, so this model would train with Adam alone:\n{plan}\n"
            'Send some there, e.g. route(model, override={"blocks.*weight": "muon"}), or use Adam by itself.'
        )
    return plan


@dataclass(frozen=True)
class _Known:
    """What follows from the types of a model's modules about its parameters, by their `id`."""

    named: list[tuple[str, nn.Parameter]]
    tables: dict[int, int]  # with their rows
    kernels: set[int]
    transposed: dict[int, str]  # with the name of the module's type
    tied: dict[int, str]  # with their other name

    @classmethod
    def of(cls, model: nn.Module) -> "_Known":
        named = list(model.named_parameters())
        first = {name for name, _ in named}
        modules = list(model.modules())
        return cls(
            named,
            {id(m.weight): m.num_embeddings for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag)},
            {id(m.weight) for m in modules if isinstance(m, _ConvNd)},
            {id(p): type(m).__name__ for m in modules for p in _transposed(m)},
            {id(p): name for name, p in model.named_parameters(remove_duplicate=False) if name not in first},
        )

    def outputs(self, p: Tensor) -> int:
        """Of a matrix."""
        return p.shape[1 if id(p) in self.transposed else 0]


def _last_match(name: str, patterns: Mapping[str, Any]) -> str | None:
    return next((pattern for pattern in list(patterns)[::-1] if fnmatchcase(name, pattern)), None)


def _refuse_unused(what: str, patterns: Mapping[str, Any], names: list[str], example: str) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            nothing = "no parameter that Muon trains" if what == "blocks" else "no parameter"
            like = f"; their names are like {example or names[0]!r}" if example or names else ""
            raise ValueError(f"{what}[{pattern!r}] matches {nothing}{like}.")


def _as_muon_reads_it(route: Route, known: _Known, blocks: Mapping[str, Blocks]) -> Route:
    """With `transposed` and `blocks`, which are added to the reason."""
    if route.to != "muon":
        return route
    reason, turned = route.reason, known.transposed.get(id(route.parameter))
    if turned:
        reason += f", stored transposed ({turned})"
    match = _last_match(route.name, blocks)
    if match is not None:
        reason += f", blocks {blocks[match]}"
    own = 1 if match is None else blocks[match]
    own = (own, 1) if type(own) is int and own != 1 else own  # so that a list of them is not taken for heights
    return replace(route, reason=reason, transposed=bool(turned), blocks=own)


def _output_layer(model: nn.Module, known: _Known) -> tuple[Tensor | None, str, str]:
    """The matrix that produces the outputs where no name says so, and how it was found; or a name that may be it."""
    named, tables = known.named, known.tables
    if any(_has(name, HEAD_WORDS) for name, p in named if p.ndim == 2) or any(i in tables for i in known.tied):
        return None, "", ""
    heights = set(tables.values()) | {p.shape[0] for name, p in named if p.ndim == 2 and _has(name, TABLE_WORDS)}
    matrices = [(n, p) for n, p in named if p.ndim == 2 and id(p) not in tables and not _has(n, TABLE_WORDS)]
    found = [p for _, p in matrices if known.outputs(p) in heights]
    if len(found) == 1:
        rows = known.outputs(found[0])
        return found[0], f"{rows} rows, as many as an embedding table", ""
    last: nn.Module = model
    while isinstance(last, nn.Sequential) and len(last):
        last = next((m for m in reversed(list(last)) if any(True for _ in m.parameters())), last[-1])
    matrix = isinstance(last, nn.Linear) or any(True for _ in _transposed(last))
    if isinstance(model, nn.Sequential) and matrix and len(named) > len(list(last.parameters())):
        return last.weight, "last layer of a Sequential", ""  # type: ignore[return-value]
    return None, "", matrices[-1][0] if matrices else ""


def _default(name: str, p: nn.Parameter, known: _Known) -> tuple[Destination, str, str]:
    if not p.requires_grad:
        return "frozen", "frozen", "requires no gradient"
    if p.ndim < 2:
        return "adam", "vectors", "fewer than two dimensions"
    if name.endswith("bias"):
        return "adam", "vectors", "a bias"
    if any(part.lower().startswith("lora_") for part in name.split(".")):
        # LoRA (Hu et al., https://arxiv.org/abs/2106.09685): the product of the factors would change by
        # sqrt(rows / rank) more than a step of Muon is meant to change a matrix.
        return "adam", "low rank", "low-rank factor (LoRA)"
    if id(p) in known.tables:
        return "adam", "tables", "embedding table"
    if _has(name, HEAD_WORDS):
        return "adam", "head", "its name says head"
    if _has(name, TABLE_WORDS):
        return "adam", "tables", "its name says table"
    bank = p.ndim == 3 and id(p) not in known.kernels
    rows, cols = p.shape[-2:] if bank else (p.shape[0], p[:1].numel())
    if min(rows, cols) <= 1:
        return "adam", "vectors", "a single row or column"
    if bank:
        return "muon", "banks", f"bank of {len(p)} matrices, each orthogonalised by itself"
    if id(p) in known.kernels:
        return "muon", "matrices", "convolution kernel, flattened to (outputs, everything else)"
    return "muon", "matrices", "hidden matrix" if p.ndim == 2 else "hidden matrix, flattened from more dimensions"


def _transposed(module: nn.Module) -> Iterator[Tensor]:
    """The weights of a module that are stored as inputs x outputs: those of transformers' Conv1D, of its experts
    that say `is_transposed`, and of transposed convolutions."""
    named_so = any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)  # torch's is Conv1d, and has no `nf`
    weight = getattr(module, "weight", None)
    if named_so and hasattr(module, "nf") and isinstance(weight, Tensor) and weight.ndim == 2:
        yield weight
    elif isinstance(module, _ConvTransposeNd) and module.groups == 1:
        yield module.weight
    elif getattr(module, "is_transposed", False) is True:
        yield from (p for p in module.parameters(recurse=False) if p.ndim == 3)


def _has(name: str, words: tuple[str, ...]) -> bool:
    return any(word in part for part in name.lower().split(".") for word in words if not _inside_head(part, word))


def _inside_head(part: str, word: str) -> bool:
    """`heads` and `multihead` are words of attention, not of the head that makes logits."""
    return word == "head" and ("heads" in part or "multihead" in part)
