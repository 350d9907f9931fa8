"""The sharded step without the machines: what it would wait for, from its order and what each bucket costs.

A rank does one thing after the other, as the order says; transfers pass the link one after the other, in the order in
which they were launched, each as soon as the last rank has launched it. The result is a list of `Span`s for every rank,
as torch.profiler sees them in a real step. For machines that are not here, one rank stands for all: the one with the
most work.

    python -m benchmarks.simulate --recipe interleaved --track short --gpus 8 64 --link 450GB
"""

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import tyro

from benchmarks.timeline import timeline_svg
from speedrun.errors import UserError
from speedrun.files import write_atomic
from speedrun.model.gpt import GPT, flops_per_token
from speedrun.optim.polynomial import multiplications
from speedrun.optim.sharded.order import ORDERS, Order, early_reductions
from speedrun.optim.sharded.plan import BucketPlan, ParamRef, param_refs, plan_buckets
from speedrun.recipes import get_recipe
from speedrun.training.config import Recipe
from speedrun.training.optimizers import build_optimizer
from speedrun.training.trace import Span


@dataclass(frozen=True)
class Link:
    """What connects a rank with the others."""

    bandwidth: float  # bytes per second
    latency: float = 0.0  # seconds for each hop of a collective
    approach: float = math.inf  # bytes per second on the way to it, where the next transfer moves while one passes


@dataclass(frozen=True)
class Cost:
    """Of one bucket, on the rank that has most of it."""

    reduce: float = 0.0  # bytes that pass its link
    gather: float = 0.0
    compute: float = 0.0  # seconds of training
    pack: float = 0.0  # seconds to put the gradients into one piece


@dataclass(frozen=True)
class Speed:
    """Of a processor, for buckets that were not measured."""

    flops: float  # per second, in the products of the orthogonaliser
    memory: float  # bytes per second


def traffic(plan: BucketPlan) -> tuple[float, float]:
    """Bytes that one rank sends for the reduction and for the all-gather, in a ring."""
    ranks, size = len(plan.slots), plan.chunk * plan.dtype.itemsize
    if plan.kind == "replicated":
        return 2 * (ranks - 1) / ranks * size, 0.0
    return (ranks - 1) * size, (ranks - 1) * size


def costs(plans: Sequence[BucketPlan], speed: Speed) -> dict[str, Cost]:
    """What each bucket would cost on a processor of this speed; weights, gradients and state pass its memory once."""
    found = {}
    for plan in plans:
        packing = 0.0 if plan.is_single else plan.numel * plan.dtype.itemsize / speed.memory
        found[plan.label] = Cost(*traffic(plan), busiest(plan, speed), packing)
    return found


def busiest(plan: BucketPlan, speed: Speed) -> float:
    """Seconds that the rank with the most work needs to train its part."""

    def seconds(ref: ParamRef, weights: int) -> float:
        p = ref.param
        flops = 2 * multiplications(len(p), p[0].numel(), 5, torch.bfloat16, p.device) if plan.kind == "owned" else 0
        # Weight and gradient read, two float32 moments read and written.
        return flops / speed.flops + weights * (2 * p.itemsize + 4 + 16) / speed.memory

    return max(sum(seconds(slot.ref, slot.numel) for slot in slots) for slots in plan.slots)


def measured(spans: Sequence[Span], plans: Sequence[BucketPlan], steps: int) -> dict[str, Cost]:
    """What each bucket cost in `steps` recorded steps, waiting left out, with the bytes it sends."""
    found = {}
    for plan in plans:
        mine = [s for s in spans if s.item == plan.label]
        packing = [s.end - s.start for s in mine if s.kind == "launch" and s.op == "reduce"]
        computing = sum(s.end - s.start for s in mine if s.kind == "compute")
        found[plan.label] = Cost(*traffic(plan), computing / steps, sum(packing) / max(1, len(packing)))
    return found


@dataclass(frozen=True)
class Rank:
    """One of those who step together."""

    costs: Mapping[str, Cost]
    launched: Mapping[str, float] = field(default_factory=dict)  # reductions begun in its backward pass, and when
    ready: float = 0.0  # when it begins with the order


def simulate(order: Order, ranks: Sequence[Rank], link: Link, size: int) -> list[list[Span]]:
    """What each rank does in one step. One rank may stand for all `size` of them, if they are alike."""
    spans: list[list[Span]] = [[] for _ in ranks]
    now = [rank.ready for rank in ranks]
    early = {label: max(rank.launched[label] for rank in ranks) for label in ranks[0].launched}
    free = near = min(early.values(), default=min(now))  # when the link, and the way to it, carry nothing any more
    arrival: dict[str, float] = {}

    def send(label: str, op: str, seconds: float) -> None:
        """Put a transfer into the queue of the link, which all ranks have launched after so many seconds."""
        nonlocal free, near
        cost = ranks[0].costs[label]
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
                spans[k].append(Span(kind, label, op, now[k], now[k] + duration))
                now[k] += duration

    for label, when in sorted(early.items(), key=lambda pair: pair[1]):
        send(label, "reduce", when)
    for op, label in order:
        costs = [rank.costs[label] for rank in ranks]
        if op in ("update", "finish"):
            spend("wait", label, op, [arrival[label] - t for t in now])
        if op == "update":
            spend("compute", label, op, [cost.compute for cost in costs])
        elif op == "gather":
            send(label, op, max(now))
        elif op == "reduce" and label not in early:
            spend("launch", label, op, [cost.pack for cost in costs])
            send(label, op, max(now))
    return [sorted(mine, key=lambda span: (span.start, span.end)) for mine in spans]


# ------------------------------------------------------------------------------------------- the command


@dataclass(frozen=True)
class Simulate:
    """What the sharded step would wait for on machines that are not here."""

    recipe: str = "interleaved"
    """Whose model and optimizers."""
    track: str = "short"
    """At the size of which track."""
    gpus: tuple[int, ...] = (8,)
    """How many ranks; several numbers give several lines."""
    link: str = "450GB"
    """Bytes per second that a rank can send, with kB, MB, GB or TB."""
    latency: float = 5e-6
    """Seconds for each hop of a collective."""
    flops: float = 300e12
    """Floating-point operations per second of one rank, in matrix products."""
    memory: str = "2TB"
    """Bytes per second of a rank's memory."""
    buckets: int = 2
    """In how many parts the matrices travel."""
    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE.svg", help_behavior_hint="")] = None
    """Draw the steps of the first number of ranks into this file."""


def run(given: Simulate, say: Callable[[str], object] = print) -> None:
    recipe = get_recipe(given.recipe, given.track)
    link, speed = (
        Link(bytes_of(given.link, "--link"), given.latency),
        Speed(given.flops, bytes_of(given.memory, "--memory")),
    )
    for name, value in (("latency", given.latency), ("flops", given.flops), ("buckets", given.buckets)):
        if value < (0 if name == "latency" else 1):
            raise UserError(f"--{name} is {value:g}; it must be {'at least 0' if name == 'latency' else 'positive'}.")
    say(f"{recipe.name} at {recipe.track} size; link {given.link}/s, latency {given.latency:g} s, "
        f"{given.flops:g} FLOP/s, memory {given.memory}/s: assumed, not measured")  # fmt: skip
    say("  ranks  order         backward ms  after it ms  computing ms  waiting ms  waiting/after backward")
    panels = []
    for ranks in given.gpus:
        if ranks < 2:
            raise UserError(f"--gpus is {ranks}; one rank waits for nobody, so give at least 2.")
        for name in ORDERS:
            spans, backward = step_on(recipe, name, ranks, link, speed, given.buckets)
            after = max(s.end for s in spans if s.kind != "transfer")
            computing, waiting = (sum(s.end - s.start for s in spans if s.kind == kind) for kind in ("compute", "wait"))
            ms = [1e3 * x for x in (backward, after, computing - backward, waiting)]
            line = f"  {ranks:5}  {name:12}  {ms[0]:11.3f}  {ms[1]:11.3f}  {ms[2]:12.3f}  {ms[3]:10.3f}"
            say(f"{line}  {100 * waiting / after:20.1f} %")
            if ranks == given.gpus[0]:
                panels.append((f"{recipe.name} at {recipe.track} size, {ranks} ranks, {name} order", [spans]))
    if given.plot is not None:
        write_atomic(given.plot, timeline_svg(panels))
        say(f"drawn in {given.plot}")


def step_on(recipe: Recipe, order: str, ranks: int, link: Link, speed: Speed, buckets: int) -> tuple[list[Span], float]:
    """One simulated step and the seconds of its backward pass, in which the reductions of tables begin."""
    with torch.device("meta"):
        model = GPT(recipe.model, 16)
        if recipe.optim.weights != "float32":
            model.store_matrices(torch.bfloat16)
    members = build_optimizer(model.named_parameters(), model.param_roles(), recipe.optim).members()
    plans = plan_buckets(param_refs(members, {}), ranks, buckets)
    stage = recipe.schedule.at(0)
    tokens = stage.tokens / ranks
    backward = 2 / 3 * tokens * flops_per_token(recipe.model, stage.seq_len) / speed.flops
    # Gradients of tables come all through the backward pass: those near the head first, the embedding's last of all.
    early = early_reductions(plans, order)
    when = {label: -backward * (1 - (k + 1) / len(early)) for k, label in enumerate(early)}
    spans = simulate(ORDERS[order](plans), [Rank(costs(plans, speed), when)], link, ranks)[0]
    return [Span("compute", "model", "backward", -backward, 0.0), *spans], backward


def bytes_of(text: str, option: str) -> float:
    """`450GB` as a number."""
    match = re.fullmatch(r"([0-9.]+)\s*([kMGT]?)B?", text)
    try:
        value = float(match[1]) if match else 0.0
    except ValueError:
        value = 0.0
    if not match or value <= 0:
        raise UserError(f"{option} is {text!r}; it must be bytes per second, like 450GB or 12.5MB.")
    return value * {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[match[2]]


def main() -> None:
    try:
        run(tyro.cli(Simulate, description=__doc__))
    except UserError as e:
        sys.exit(str(e))


if __name__ == "__main__":
    main()
