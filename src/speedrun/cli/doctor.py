"""`speedrun doctor`: what this machine will use and why, and what is missing."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch

from speedrun import gpu_report
from speedrun.checks import Positive
from speedrun.cli.common import MachineOptions, flat, grid, parse, say
from speedrun.doctor import Finding, examine
from speedrun.errors import UserError
from speedrun.files import write_atomic
from speedrun.recipes import DEFAULT, get_recipe
from speedrun.training import Machine, Options, Recipe, check_processes, distributed, memory_of, problems_of, run


@dataclass(frozen=True)
class Doctor:
    """What this machine will use and why; what is missing."""

    gpu_report: bool = False
    """Run a few steps of each kind of a recipe on made-up tokens, and write predicted beside measured values. Meant
    for a machine with a GPU."""
    recipe: str = "interleaved"
    """With --gpu-report: whose steps; `speedrun recipes` lists them."""
    track: str = "short"
    """With --gpu-report: in which size."""
    steps: Positive = 5
    """With --gpu-report: timed steps of each kind."""
    nproc: Positive = 1
    """With --gpu-report: processes, one for each GPU."""
    compile: bool = True
    """With --gpu-report: use torch.compile."""
    out: Path = Path("gpu-report.md")
    """With --gpu-report: the file, to be attached to an issue."""
    machine: Annotated[MachineOptions, flat] = field(default_factory=MachineOptions)


def main(args: Sequence[str]) -> int:
    given: Doctor = parse(Doctor, "doctor", args, about="What this machine will use and why; what is missing.")
    recipe = get_recipe(given.recipe, given.track) if given.gpu_report else get_recipe(DEFAULT, "pocket")
    for name in () if given.gpu_report else ("recipe", "track", "steps", "nproc", "compile", "out"):
        if (value := getattr(given, name)) != getattr(Doctor, name):
            flag = "--no-compile" if name == "compile" else f"--{name} {value}"
            raise UserError(f"{flag} goes with --gpu-report; drop it.")
    if given.gpu_report and given.machine.device == "auto" and not torch.cuda.is_available():
        raise UserError(
            "--gpu-report is for a machine with a GPU, and torch sees none here; --device cpu --track pocket tries it "
            "on the CPU."
        )
    if given.gpu_report and (given.out.is_dir() or not given.out.parent.is_dir()):
        raise UserError(f"--out {given.out} is a folder, or in a folder that does not exist; name a file.")
    if given.nproc != 1 and distributed.ranks() == 1:
        check_processes(given.nproc, given.machine.device)
        run.check_ranks(recipe, given.nproc)
        return distributed.launch(given.nproc, ["doctor", *args])
    machine = given.machine.choose(recipe)
    findings = examine(machine)
    if not given.gpu_report or distributed.is_first():
        width = max(len(finding.what) for finding in findings)
        for f in findings:
            why = f" ({f.why})" if f.good else f": {f.why}"
            say(f"{'ok' if f.good else '--'}  {f.what:{width}}  {f.chosen}{why}")
    if given.gpu_report:
        write_report(given, recipe, machine, findings)
    return 0


def write_report(given: Doctor, recipe: Recipe, machine: Machine, findings: list[Finding]) -> None:
    options = Options(compile=given.compile)
    if machine.device.type != "cuda":  # there the trainer checks its memory
        for problem in problems_of(memory_of(recipe, machine, options, given.nproc), recipe):
            raise UserError(problem)
    with distributed.joined(machine.device) as (comm, _):
        for title, lines, text in gpu_report.report(recipe, machine, options, comm, findings, given.steps):
            if comm.rank == 0:
                write_atomic(given.out, text)  # it grows: a crash keeps what was measured before
                say(f"\n{title}")
                grid(lines)
    if distributed.is_first():
        say(f"report       {given.out}")
