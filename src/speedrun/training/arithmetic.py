"""Which arithmetic a CPU is fast at: bfloat16 and float32 are tried on the shapes of the recipe.

The flags of a CPU do not tell: from one to the next bfloat16 takes between a third and five times the time of float32.
A trial takes a fraction of a second; its result is kept in `arithmetic.json` in the data folder, for this kind of CPU,
torch, number of threads and shapes.
"""

import dataclasses
import datetime
import functools
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from speedrun.checks import AboveZero, Positive
from speedrun.errors import OtherVersion, UserError
from speedrun.files import home, read_json, write_json
from speedrun.model import GPTConfig
from speedrun.training import telemetry
from speedrun.training.arithmetic_trial import FASTER, TRIALS

FILE = "arithmetic.json"
KEPT = 100  # trials in the file
LONGEST = 60.0  # seconds; a trial that takes longer has failed
FLOPS = 5e9  # of a step that is tried: tens of milliseconds
FEWEST_TOKENS = 128

ONEDNN_LIMIT = "ONEDNN_MAX_CPU_ISA"
WITHOUT_AMX = "AVX512_CORE_FP16"  # the widest instruction set without AMX


@dataclass(frozen=True)
class Shapes:
    """Of the step that is tried: one block, and of the head the share that a block has of it."""

    tokens: Positive
    width: Positive
    hidden: Positive
    vocab: Positive

    @classmethod
    def of(cls, model: GPTConfig, tokens: int) -> "Shapes":
        vocab = max(1, model.vocab_size // model.num_layers)
        per_token = 6 * model.dim * (4 * model.dim + 2 * model.mlp_dim + vocab)
        return cls(max(FEWEST_TOKENS, min(tokens, int(FLOPS / per_token))), model.dim, model.mlp_dim, vocab)


@dataclass(frozen=True)
class Tried:
    """A trial, and what it is valid for."""

    machine: str
    """The kind of CPU."""
    torch: str
    threads: Positive
    shapes: Shapes
    taken: datetime.date
    float32: tuple[AboveZero, ...] = ()
    """CPU seconds of each trial."""
    bfloat16: tuple[AboveZero, ...] = ()
    failed: str | None = None
    """Why there are no seconds."""
    limit: str | None = None
    """Instruction set that oneDNN had to be limited to, or the trial would have died."""

    def __post_init__(self) -> None:
        if len(self.float32) != len(self.bfloat16) or bool(self.float32) == bool(self.failed):
            raise ValueError(f"{len(self.float32)} and {len(self.bfloat16)} seconds, failed: {self.failed}")

    @property
    def bfloat16_wins(self) -> bool:
        """Whether bfloat16 was clearly faster in every trial."""
        pairs = list(zip(self.float32, self.bfloat16, strict=True))
        return len(pairs) == TRIALS and all(b <= FASTER * f for f, b in pairs)

    def __str__(self) -> str:
        if self.failed:
            return f"bfloat16 was tried here, and {self.failed}"
        float32, bfloat16 = (1000 * statistics.median(times) for times in (self.float32, self.bfloat16))
        return f"tried on {self.taken}: a small step takes {float32:.0f} ms of CPU time, {bfloat16:.0f} in bfloat16"


@dataclass(frozen=True)
class Trials:
    trials: tuple[Tried, ...] = ()


def choose_on_cpu(model: GPTConfig, tokens: int, threads: int) -> tuple[torch.dtype, str]:
    """(arithmetic, why), from an earlier trial or from one that is made now."""
    shapes, notes = Shapes.of(model, tokens), []
    file = home() / FILE
    stored: tuple[Tried, ...] = ()
    try:
        stored = read_json(file, Trials, "It is written anew.").trials if file.exists() else ()
    except OtherVersion:
        notes.append(f"{file} is of another version and written anew")
    except UserError as e:
        notes.append(str(e).rstrip("."))
    wanted = (processor(), str(torch.__version__), threads, shapes)
    found = next((t for t in stored if (t.machine, t.torch, t.threads, t.shapes) == wanted), None)
    if found is None:
        found = tried(shapes, threads)
        try:
            write_json(file, msgspec.to_builtins(Trials((*stored, found)[-KEPT:])))
        except UserError as e:
            notes.append(f"this cannot be kept for the next time: {str(e).rstrip('.')}")
    if found.limit:
        os.environ.setdefault(ONEDNN_LIMIT, found.limit)
    return torch.bfloat16 if found.bfloat16_wins else torch.float32, "; ".join([str(found), *notes])


def tried(shapes: Shapes, threads: int) -> Tried:
    """Try both here and now, in a child process."""
    seconds: dict[str, tuple[float, ...]] = {}
    failed, limit = _try(shapes, threads, seconds), None
    if failed and lists_amx() and ONEDNN_LIMIT not in os.environ:
        limit = WITHOUT_AMX
        failed = _try(shapes, threads, seconds, {ONEDNN_LIMIT: limit})
    today = datetime.datetime.now(datetime.UTC).date()
    return Tried(processor(), str(torch.__version__), threads, shapes, today, **seconds, failed=failed, limit=limit)


def _try(
    shapes: Shapes, threads: int, seconds: dict[str, tuple[float, ...]], more: Mapping[str, str] | None = None
) -> str | None:
    """Fill in the seconds of each arithmetic, or say why there are none."""
    sizes = map(str, (*dataclasses.astuple(shapes), threads))
    command = [sys.executable, "-m", "speedrun.training.arithmetic_trial", *sizes]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=LONGEST, env={**os.environ, **(more or {})}
        )
    except subprocess.TimeoutExpired:
        return f"the trial was not over after {LONGEST:g} s"
    if done.returncode < 0:
        return f"the trial was ended by {signal.Signals(-done.returncode).name}"
    if done.returncode:
        return f"the trial failed ({(done.stderr.strip().splitlines() or ['no message'])[-1]})"
    seconds.update({name: tuple(times) for name, times in json.loads(done.stdout).items()})
    return None


def lists_amx() -> bool:
    return "amx_bf16" in cpu_flags()


@functools.cache
def amx_works() -> bool:
    """Whether a CPU that lists AMX can use it. Call before the first bf16 matmul.

    Some virtual machines list AMX, even grant it, and then kill the process that uses it, so it is tried in a child
    process. When the child dies, torch's bf16 matmuls are kept off AMX in this process and in those it starts.
    """
    if ONEDNN_LIMIT in os.environ:  # already chosen, perhaps this function in a parent process
        return os.environ[ONEDNN_LIMIT].upper() in ("ALL", "DEFAULT", "AVX512_CORE_AMX", "AVX512_CORE_AMX_FP16")
    trial = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); (a @ a).sum().item()"
    if subprocess.run([sys.executable, "-c", trial], capture_output=True, check=False).returncode >= 0:
        return True
    os.environ[ONEDNN_LIMIT] = WITHOUT_AMX
    return False


def cpu_flags() -> set[str]:
    """Instruction-set flags as Linux reports them; empty where it cannot be known."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((set(line.split()[2:]) for line in lines if line.startswith(("flags", "Features"))), set())


@functools.cache
def processor() -> str:
    """What tells one kind of CPU from another: its name, what it can do, and what oneDNN may use of that."""
    flags = hashlib.sha256(" ".join(sorted(cpu_flags())).encode()).hexdigest()[:12]
    return f"{telemetry.cpu_model()}, flags {flags}, {os.environ.get(ONEDNN_LIMIT, 'no')} limit"
