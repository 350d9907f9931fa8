"""The sharded step without the machines: what it would wait for, from its order and what each item costs.

A rank does one thing after the other, as the order says; transfers pass the link one after the other, in the order in
which they were launched, each as soon as the last rank has launched it. The result is a list of `Span`s for every rank,
as a real step records them. For machines that are not here, one rank stands for all: the one with the most work.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from speedrun.optim.interleave import Interleaved, Span
from speedrun.optim.pipeline import Item, Matrices, Order, Rows, Team
from speedrun.optim.polynomial import multiplications


@dataclass(frozen=True)
class Link:
    """What connects a rank with the others."""

    bandwidth: float  # bytes per second
    latency: float = 0.0  # seconds for each hop of a collective
    approach: float = math.inf  # bytes per second on the way to it, where the next transfer moves while one passes


@dataclass(frozen=True)
class Cost:
    """Of one item, on the rank that has most of it."""

    reduce: float = 0.0  # bytes that pass its link
    gather: float = 0.0
    compute: float = 0.0  # seconds of training
    pack: float = 0.0  # seconds to fill the buffer of a transfer, or to empty it


@dataclass(frozen=True)
class Speed:
    """Of a processor, for items that nobody has measured."""

    flops: float  # per second, in the products of the orthogonaliser
    memory: float  # bytes per second


def traffic(item: Item) -> tuple[float, float]:
    """Bytes that one rank sends for an item's reduction and for its gather, in a ring."""
    ranks, size = item.team.size, item.refs[0].param.itemsize
    if isinstance(item, Matrices):
        return ((ranks - 1) * item.chunk * size,) * 2
    if isinstance(item, Rows):
        return ((ranks - 1) * item.per * item.ref.param[0].numel() * size,) * 2
    return 2 * (ranks - 1) / ranks * size * sum(ref.param.numel() for ref in item.refs), 0.0


def costs(optimizer: Interleaved, speed: Speed) -> dict[str, Cost]:
    """What each item would cost on a processor of this speed; weights, gradients and state pass its memory once."""
    found = {}
    for item in optimizer.items:
        reduce, gather = traffic(item)
        largest = max(reduce, gather)
        found[item.label] = Cost(reduce, gather, busiest(item, speed), largest / speed.memory)
    return found


def busiest(item: Item, speed: Speed) -> float:
    """Seconds that the rank with the most work needs to train its part."""

    def touched(weights: int, size: int) -> float:
        return weights * (2 * size + 4 + 16) / speed.memory  # weight, gradient, two float32 moments read and written

    if isinstance(item, Matrices):
        load = [0.0] * item.team.size
        for ref in item.refs:
            p = ref.param
            flops = 2 * multiplications(len(p), p[0].numel(), 5, torch.bfloat16, p.device)
            load[item.owner[p]] += flops / speed.flops + touched(p.numel(), p.itemsize)
        return max(load)
    if isinstance(item, Rows):
        return touched(item.per * item.ref.param[0].numel(), item.ref.param.itemsize)
    return touched(sum(ref.param.numel() for ref in item.refs), item.refs[0].param.itemsize)


def measured(spans: Sequence[Span], items: Sequence[Item], steps: int) -> dict[str, Cost]:
    """What each item cost in so many recorded steps, waiting left out, with the bytes it sends."""
    found = {}
    for item in items:
        mine = [s for s in spans if s.item == item.label]
        packing = [s.end - s.start for s in mine if s.kind in ("launch", "copy")]
        computing = sum(s.end - s.start for s in mine if s.kind == "compute")
        found[item.label] = Cost(*traffic(item), computing / steps, sum(packing) / max(1, len(packing)))
    return found


@dataclass(frozen=True)
class Rank:
    """One of those who step together."""

    costs: Mapping[str, Cost]
    launched: Mapping[str, float] = field(default_factory=dict)  # reductions begun in its backward pass, and when
    ready: float = 0.0  # when it begins with the order


def simulate(order: Order, team: Sequence[Rank], link: Link, size: int) -> list[list[Span]]:
    """What each of the team does in one step. One rank may stand for all `size` of them, if they are alike."""
    spans: list[list[Span]] = [[] for _ in team]
    now = [rank.ready for rank in team]
    early = {label: max(rank.launched[label] for rank in team) for label in team[0].launched}
    free = near = min(early.values(), default=min(now))  # when the link, and the way to it, carry nothing any more
    arrival: dict[str, float] = {}

    def send(label: str, op: str, seconds: float) -> None:
        """Put a transfer into the queue of the link, which all ranks have launched after so many seconds."""
        nonlocal free, near
        cost = team[0].costs[label]
        amount = cost.reduce if op == "reduce" else cost.gather
        arrival[label] = seconds
        if amount:
            near = max(near, seconds) + amount / link.approach
            begin = max(free, near)
            hops = (size - 1) * (2 if op == "reduce" and not cost.gather else 1)
            arrival[label] = free = begin + amount / link.bandwidth + hops * link.latency
            for mine in spans:
                mine.append(Span("transfer", label, op, begin, free))

    def spend(kind: str, label: str, op: str, seconds: Sequence[float]) -> None:
        for k, duration in enumerate(seconds):
            if duration > 0:
                spans[k].append(Span(kind, label, op, now[k], now[k] + duration))  # type: ignore[arg-type]
                now[k] += duration

    for label, when in sorted(early.items(), key=lambda pair: pair[1]):
        send(label, "reduce", when)
    for op, label in order:
        costs = [rank.costs[label] for rank in team]
        packing = [cost.pack if op == "reduce" or cost.gather else 0.0 for cost in costs]
        if op in ("update", "finish"):
            spend("wait", label, op, [arrival[label] - t for t in now])
        if op == "update":
            spend("compute", label, op, [cost.compute for cost in costs])
        elif op == "finish":
            spend("copy", label, op, packing)
        elif label not in early or op == "gather":
            spend("launch", label, op, packing)
            send(label, op, max(now))
    return [sorted(mine, key=lambda span: (span.start, span.end)) for mine in spans]


def on_ranks(optimizer: Interleaved, ranks: int, buckets: int = 2, replicate_below: int = 1024) -> Interleaved:
    """The same optimizer dealt out to so many ranks that are not there; meta tensors will do."""
    early = {ref.param for item in optimizer.early for ref in item.refs}
    optimizer.team = Team(None, 0, ranks)
    optimizer.items = optimizer._build(buckets, replicate_below)
    optimizer.item = {item.label: item for item in optimizer.items}
    optimizer.early = [item for item in reversed(optimizer.items) if item.refs[0].param in early]
    return optimizer


__all__ = ["Cost", "Link", "Rank", "Speed", "costs", "measured", "on_ranks", "simulate", "traffic"]
