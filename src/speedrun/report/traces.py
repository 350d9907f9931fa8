"""What ranks wait for: in recorded steps, or in steps foretold for machines that are not here.

speedrun train --nproc 2 --trace --order plain --out before
speedrun train --nproc 2 --trace --out after
speedrun trace show before after --plot timeline.svg
speedrun trace simulate --recipe interleaved --track short --gpus 8 --link 450GB
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from speedrun.errors import UserError
from speedrun.files import explained, write_atomic
from speedrun.model.gpt import GPT, flops_per_token
from speedrun.optim.config import build_optimizer
from speedrun.optim.interleave import Interleaved, Span
from speedrun.optim.pipeline import ORDERS
from speedrun.optim.simulate import Link, Rank, Speed, costs, on_ranks
from speedrun.optim.simulate import simulate as foretell
from speedrun.recipes import get_recipe
from speedrun.report.timeline import timeline_svg
from speedrun.train import trace
from speedrun.train.config import Recipe

Say = Callable[[str], Any]
Plot = Annotated[Path | None, tyro.conf.arg(metavar="FILE.svg", help_behavior_hint="")]


@dataclass(frozen=True)
class Show:
    """How long each rank computed and waited, and a picture of one step."""

    traces: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PATH ...")]
    """Trace files, or run folders that have one; several are drawn over one time scale."""
    step: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Which step to draw; default: the one of median length."""
    plot: Plot = None
    """Draw that step into this file."""


def show(given: Show, say: Say) -> int:
    panels = []
    for path in given.traces:
        found = trace.read(path)
        about = found.about
        title = f"{about.get('recipe', '?')}, {len(found.ranks)} ranks, {about.get('order', '?')} order"
        say(f"{path}: {title}, {len(found.ranks[0])} steps")
        say("  rank   step ms  compute  launch    wait    copy   waiting/step  waiting/after backward")
        for rank, steps in enumerate(found.ranks):
            s = trace.summarize(steps)
            ms = "".join(f"{1e3 * s.parts[kind]:8.2f}" for kind in trace.KINDS)
            say(f"  {rank:4}  {1e3 * s.step:8.2f} {ms}   {100 * s.exposed:10.1f} %  {100 * s.exposed_after:18.1f} %")
        step = median_step(found.ranks[0]) if given.step is None else given.step
        if step not in found.ranks[0]:
            known = sorted(found.ranks[0])
            raise UserError(f"--step {step} was not recorded in {path}; it has {known[0]} to {known[-1]}.")
        panels.append((f"{title}, step {step}", found.ranks, step))
    if given.plot is not None:
        with explained(given.plot):
            write_atomic(given.plot, timeline_svg(panels).encode())
        say(f"drawn in {given.plot}")
    return 0


def median_step(steps: trace.Steps) -> int:
    length = {step: max(s.end for s in spans) - min(s.start for s in spans) for step, spans in steps.items()}
    return sorted(length, key=lambda step: length[step])[len(length) // 2]


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
    plot: Plot = None
    """Draw the steps of the first number of ranks into this file."""


def simulate(given: Simulate, say: Say) -> int:
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
            s = trace.summarize({0: [span for span in spans if span.kind != "transfer"]})
            ms = [1e3 * x for x in (backward, s.after, s.parts["compute"] - backward, s.parts["wait"])]
            line = f"  {ranks:5}  {name:12}  {ms[0]:11.3f}  {ms[1]:11.3f}  {ms[2]:12.3f}  {ms[3]:10.3f}"
            say(f"{line}  {100 * s.exposed_after:20.1f} %")
            if ranks == given.gpus[0]:
                panels.append((f"{recipe.name} at {recipe.track} size, {ranks} ranks, {name} order", [{0: spans}], 0))
    if given.plot is not None:
        with explained(given.plot):
            write_atomic(given.plot, timeline_svg(panels).encode())
        say(f"drawn in {given.plot}")
    return 0


def step_on(recipe: Recipe, order: str, ranks: int, link: Link, speed: Speed, buckets: int) -> tuple[list[Span], float]:
    """One foretold step and the seconds of its backward pass, in which the reductions of tables begin."""
    with torch.device("meta"):
        model = GPT(recipe.model, 16)
        if recipe.optim.weights != "float32":
            model.store_matrices(torch.bfloat16)
    made: list[Interleaved] = []

    def together(members: Sequence[Any]) -> Interleaved:
        made.append(on_ranks(Interleaved(model, members, order=order), ranks, buckets))
        return made[0]

    build_optimizer(model.named_parameters(), recipe.optim, together)
    stage = recipe.schedule.at(0)
    tokens = stage.tokens / ranks
    backward = 2 / 3 * tokens * flops_per_token(recipe.model, stage.length) / speed.flops
    # Gradients of tables come all through the backward pass: those near the head first, the embedding's last of all.
    early = [item.label for item in made[0].early]
    when = {label: -backward * (1 - (k + 1) / len(early)) for k, label in enumerate(early)}
    table = ORDERS[order](made[0].items)
    spans = foretell(table, [Rank(costs(made[0], speed), when)], link, ranks)[0]
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
