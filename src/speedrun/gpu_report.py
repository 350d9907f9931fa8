"""The first minutes on a GPU: what could only be predicted before, measured: `speedrun doctor --gpu-report`.

speedrun doctor --gpu-report                                 `interleaved` of the short track, on one GPU
speedrun doctor --gpu-report --nproc 8                       on eight, over NCCL
speedrun doctor --gpu-report --recipe medium --track medium

Every kind of step of the recipe is compiled and run a few times on made-up tokens: seconds to compile, milliseconds,
kernel launches, host syncs, memory, each beside what `python -m benchmarks.gpu` predicted for it. Attention and the
8-bit head are compared with plain versions. The result is one Markdown file, to be attached to an issue.
"""

import dataclasses
import math
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from speedrun.data import TokenFolder
from speedrun.doctor import Finding
from speedrun.errors import UserError, plural
from speedrun.model import Backend, attend, fp8_linear, reference_attend
from speedrun.optim import Comm
from speedrun.templates import markdown
from speedrun.training import (
    Job,
    Machine,
    Options,
    Progress,
    Recipe,
    Stage,
    Trainer,
    compiled_graph,
    gib,
    made_up,
    memory_of,
    runlog,
    synchronize,
    telemetry,
    trace,
)
from speedrun.training import memory_table as table

LAUNCH = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")  # and their variants: ...ExC, ...Ex
SYNC = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
ATTENTION_LIMIT, FP8_LIMIT = 0.02, 0.08
"""Errors above these are wrong, relative to the norm: bfloat16 gives about 0.005, 8-bit floats 0.03 to 0.065."""
SEED = 0
UNKNOWN = "not predicted"


class Line(NamedTuple):
    what: str
    predicted: str
    measured: str


def report(
    recipe: Recipe, machine: Machine, options: Options, comm: Comm, findings: list[Finding], steps: int
) -> Iterator[tuple[str, list[Line], str]]:
    """(title, lines, all text so far) of each section as soon as it is measured. All ranks call it."""
    text = environment(recipe, machine, comm, findings)
    for title, measure in sections(recipe, machine, options, comm, steps):
        failed = None
        try:
            lines = measure()
        except Exception as e:  # whatever a compiler or a kernel may raise
            failed = f"failed: {type(e).__name__}: {first_line(e)}"
            lines = [Line("all of it", "", failed)]
        text += "\n" + section(title, lines)
        yield title, lines, text
        if failed and comm.size > 1:  # the other ranks may be anywhere in a step
            raise UserError(f"{title}: {failed}. The report ends there; --nproc 1 goes on after it.")


def first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")[:300]


def sections(
    recipe: Recipe, machine: Machine, options: Options, comm: Comm, steps: int
) -> Iterator[tuple[str, Callable[[], list[Line]]]]:
    """The title of each section, and what measures it."""
    yield "Attention and 8-bit head against plain versions, relative errors", partial(parity, recipe, machine)
    with tempfile.TemporaryDirectory() as folder:
        tokens = TokenFolder("made up", "", min(recipe.model.vocab_size, 2**16), 0, {}, path=Path(folder))
        nowhere = runlog.NullRunFolder(Path(folder))
        quiet = Progress(recipe.schedule.total, quiet=True)
        trainer = Trainer(Job(recipe, tokens, machine, options, nowhere, quiet, comm))
        for stage in kinds_of_steps(recipe):
            title = f"Step {stage.step}, {stage.batch_size} x {stage.seq_len} tokens"
            yield title, partial(step_lines, trainer, stage, steps)
        v = recipe.validation
        yield f"Validation, {v.batch_size} x {v.seq_len} tokens", partial(validation_lines, trainer)
        if comm.size > 1:
            yield "Order of transfers", partial(order_lines, trainer)


def environment(recipe: Recipe, machine: Machine, comm: Comm, findings: list[Finding]) -> str:
    gpu = torch.cuda.get_device_properties(machine.device) if machine.device.type == "cuda" else None
    where = f"{comm.size} x {gpu.name if gpu else machine.device}"
    about = [f"# {recipe.name} at {recipe.track} size on {where}", ""]
    about += [f"- {f.what}: {f.chosen} ({f.why})" for f in findings if not f.what.startswith("data")]
    if gpu:
        about.append(f"- GPU: {gpu.name}, compute capability {gpu.major}.{gpu.minor}, {gib(gpu.total_memory)}")
        about.append(f"- CUDA: {torch.version.cuda}")
    return "\n".join(about) + "\n"


def section(title: str, lines: list[Line]) -> str:
    rows = [(line.what, line.predicted or "-", line.measured or "-") for line in lines]
    return f"\n## {title}\n\n{markdown([('', 'predicted', 'measured'), *rows])}"


# -------------------------------------------------------------------- parity


def parity(recipe: Recipe, machine: Machine) -> list[Line]:
    found = attention_errors(machine.attention, machine, recipe.model.head_dim, recipe.model.attention.scale)
    lines = [judged(f"attention by {machine.attention}, {what}", e, ATTENTION_LIMIT) for what, e in found]
    if recipe.model.head.fp8:
        lines += [judged(f"8-bit head, {what}", e, FP8_LIMIT) for what, e in fp8_errors(recipe, machine)]
    return lines


def judged(what: str, error: float, limit: float) -> Line:
    return Line(what, f"below {limit:g}", f"{error:.2g}" + ("" if error < limit else " **wrong**"))


def relative(found: Tensor, expected: Tensor) -> float:
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm())


def attention_errors(
    backend: Backend, machine: Machine, width: int, scale: float | None, length: int = 512
) -> Iterator[tuple[str, float]]:
    """Output and gradients of two rows of three documents each, with a short and a long window and without any."""
    generator = torch.Generator().manual_seed(SEED)
    q, k, v, g = (
        torch.randn(2, length, 2, width, generator=generator).to(machine.device, machine.dtype) for _ in range(4)
    )
    documents = torch.zeros(2, length, dtype=torch.long, device=machine.device)
    documents[0, 100:], documents[0, 333:], documents[1, 7:], documents[1, 200:] = 1, 2, 1, 2
    for window in (64, 300, None):
        results = []
        for function in (partial(attend, backend=backend), reference_attend):
            leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
            y = function(*leaves, doc_ids_BT=documents, window=window, scale=scale)
            results.append([y.detach(), *torch.autograd.grad(y, leaves, g)])
        for what, ours, plain in zip(("output", "dq", "dk", "dv"), *results, strict=True):
            yield f"window {window}: {what}", relative(ours, plain)


def fp8_errors(recipe: Recipe, machine: Machine, rows: int = 2048) -> Iterator[tuple[str, float]]:
    """Product and gradients at the recipe's width, vocabulary and scales, for numbers as large as in training."""
    c, generator = recipe.model, torch.Generator().manual_seed(SEED)
    x = torch.randn(rows, c.dim, generator=generator).to(machine.device, torch.bfloat16)  # of norm sqrt(width)
    w = (0.005 * torch.randn(c.vocab_size, c.dim, generator=generator)).to(machine.device)
    g = torch.softmax(torch.randn(rows, c.vocab_size, generator=generator), -1).to(machine.device, torch.bfloat16)
    x.requires_grad_()
    w.requires_grad_()
    out = fp8_linear(x, w, *c.head.fp8_scales)
    found = [out.detach(), *torch.autograd.grad(out, (x, w), g)]
    x64, w64, g64 = (t.detach().float() for t in (x, w, g))
    for what, ours, plain in zip(
        ("product", "dx", "dW"), found, (x64 @ w64.t(), g64 @ w64, g64.t() @ x64), strict=True
    ):
        yield what, relative(ours, plain)


# -------------------------------------------------------------------- steps


def kinds_of_steps(recipe: Recipe) -> list[Stage]:
    """One stage of each compiled graph and batch; those that differ in windows alone are alike here."""
    found: dict[tuple[object, ...], Stage] = {}
    for stage in recipe.schedule.visits():
        found.setdefault((stage.batch_size, stage.seq_len, len(stage.mtp_weights), stage.tied), stage)
    return list(found.values())


def step_lines(trainer: Trainer, stage: Stage, steps: int) -> list[Line]:
    device, recipe = trainer.device, trainer.recipe
    generator = torch.Generator().manual_seed(SEED)
    gentle = dataclasses.replace(stage, lr=1e-3)
    batch = made_up(trainer.job, stage.batch_size, stage.seq_len, generator)

    def once() -> float:
        synchronize(device)
        began = time.perf_counter()
        trainer.step(gentle, batch)
        synchronize(device)
        return time.perf_counter() - began

    first = once()
    once()  # Adam may have sat out the first one
    reset_peak(device)
    seconds = statistics.median(once() for _ in range(steps))
    peak = peak_memory(device)
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device.type == "cuda")]) as profiled:
        trainer.step(gentle, batch)
    launches, syncs = counted(profiled)
    waited = ", ".join(f"{n} x {name}" for name, n in syncs.items()) or "none"

    rows = -(-stage.batch_size // trainer.comm.size)
    at_once = min(trainer.micro_batch_size or trainer.fitting.get(stage.shape, rows), rows)
    passes = math.ceil(rows / at_once)
    graph = compiled_graph(recipe, stage, trainer.job.machine.kernels) if trainer.job.options.compile else None
    kernels, waits, held, moved, rate = UNKNOWN, UNKNOWN, UNKNOWN, 0.0, ""
    if graph is not None:
        both = graph["forward"], graph["backward"]
        inside = passes * sum(part["launches"] for part in both)
        known = around(recipe, trainer.comm.size, passes)
        kernels = " or ".join(f"{inside + row['launches']:,}" for row in known) or UNKNOWN
        # torch waits for a copy from memory that is not pinned, too: the profiler sees both.
        waits = " or ".join(f"{row['syncs'] + row['copies']}" for row in known) or UNKNOWN
        moved = sum(part["bytes"] for part in both) * rows / graph["rows"]
        rate = f"if so, {moved / seconds / 1e9:,.0f} GB/s"
        memory = memory_of(recipe, trainer.job.machine, trainer.job.options, trainer.comm.size)
        held = gib(memory.fixed - memory.warm_up + graph["peak"] * at_once / graph["rows"])
    gpu = device.type == "cuda"
    return [
        Line("first step, with compiling" if trainer.job.options.compile else "first step", "", f"{first:.1f} s"),
        Line("step", "", f"{1000 * seconds:.1f} ms, {stage.tokens / seconds:,.0f} tokens per second"),
        Line("passes over the model", "", f"{passes} of {plural(at_once, 'row')}"),
        Line("bytes that kernels touch", f"{moved / 1e9:.1f} GB" if moved else UNKNOWN, rate),
        Line("kernel launches", kernels, f"{launches:,}" if gpu else "no GPU"),
        Line("host syncs", waits, waited if gpu else "no GPU"),
        Line("memory at most", held, peak),
    ]


def around(recipe: Recipe, ranks: int, passes: int) -> list[dict[str, Any]]:
    """What is known of a step of a native recipe beside the compiled model, of each kind: Adam may sit out.

    Every pass copies a batch and adds up gradients, so steps with another number of passes are not comparable.
    """
    where = f"step of {recipe.name}, {f'{ranks} ranks' if ranks > 1 else '1 GPU'}"
    named = [row for row in table() if row["name"] == where or row["name"].startswith(f"{where},")]
    return [row for row in named if row["passes"] == passes]


def validation_lines(trainer: Trainer) -> list[Line]:
    recipe, device = trainer.recipe, trainer.device
    v, stage = recipe.validation, recipe.schedule.after(recipe.schedule.total)
    trainer.model.apply_yarn(stage.window_history)
    batch = made_up(trainer.job, v.batch_size, v.seq_len, torch.Generator().manual_seed(SEED))
    took = []
    reset_peak(device)
    for _ in range(2):
        began = time.perf_counter()
        with torch.no_grad():
            trainer.micro_loss(batch, stage).item()
        took.append(time.perf_counter() - began)
    peak, held = peak_memory(device), UNKNOWN
    memory = memory_of(recipe, trainer.job.machine, trainer.job.options, trainer.comm.size)
    if trainer.job.options.compile and compiled_graph(recipe, stage, trainer.job.machine.kernels, training=False):
        held = gib(memory.fixed - memory.warm_up - memory.gradients + memory.validation)
    return [
        Line("first batch", "", f"{took[0]:.1f} s"),
        Line("batch", "", f"{1000 * took[1]:.1f} ms"),
        Line("memory at most", held, peak),
    ]


def order_lines(trainer: Trainer) -> list[Line]:
    """The collectives of one step as each rank launched them: in another order on one of them NCCL would hang."""
    stage = trainer.recipe.schedule.at(0)
    batch = made_up(trainer.job, stage.batch_size, stage.seq_len, torch.Generator().manual_seed(SEED))
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        trainer.step(dataclasses.replace(stage, lr=1e-3), batch)
    spans = trace.spans(profiled)
    # The agreement has its own process group.
    launched = [f"{span.op} {span.item}" for span in spans if span.kind == "launch" and span.item != "agreement"]
    waited = sum(span.end - span.start for span in spans if span.kind == "wait")
    gathered = trainer.comm.all_gather_object((launched, waited))
    alike = all(theirs == launched for theirs, _ in gathered)
    return [
        Line("the same on all ranks", "yes", "yes" if alike else "**no**"),
        Line("order", "", ", ".join(launched)),
        Line("host waits", "", ", ".join(f"{1000 * wait:.1f} ms" for _, wait in gathered)),
    ]


def counted(profiled: profile) -> tuple[int, dict[str, int]]:
    """(launches, syncs by name) of what was profiled."""
    names = Counter(event.name for event in profiled.events() or ())
    launches = sum(count for name, count in names.items() if name.startswith(LAUNCH))
    return launches, {name: names[name] for name in SYNC if names[name]}


def peak_memory(device: torch.device) -> str:
    """Since the last reset, on a GPU; elsewhere of the whole process."""
    found = telemetry.peak_memory_mib(device)
    mib = found.get("cuda_allocated", found.get("resident"))
    return "unknown" if mib is None else gib(mib * 2**20)


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
