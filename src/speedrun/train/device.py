"""Which device, which arithmetic, which attention, how many threads, compiled or not: chosen here, with the reasons.

`choose()` decides once; `speedrun doctor` prints the same decisions.
"""

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from speedrun.checks import check_fields
from speedrun.errors import UserError
from speedrun.model.attention import Backend, choose_backend
from speedrun.train.distributed import local_rank, neighbours


@dataclass(frozen=True)
class CompilerConfig:
    coordinate_descent: bool = False
    """Let torch.compile search for better sizes of every GPU kernel, which takes many minutes before the clock starts.
    The C++ kernels of a CPU have no such sizes: there it changes nothing. Forbidden on the short track."""

    def __post_init__(self) -> None:
        check_fields(self, "compiler.")


@dataclass(frozen=True)
class Machine:
    device: torch.device
    device_reason: str
    dtype: torch.dtype
    dtype_reason: str
    threads: int
    threads_reason: str
    attention: Backend
    attention_reason: str

    @contextlib.contextmanager
    def arithmetic(self) -> Iterator[None]:
        """Inside, matmuls run in the chosen dtype; weights stay float32."""
        if self.dtype == torch.float32:
            yield
        else:
            with torch.autocast(self.device.type, self.dtype):
                yield

    def lines(self) -> list[str]:
        return [
            f"device: {self.device} ({self.device_reason})",
            f"arithmetic: {str(self.dtype).removeprefix('torch.')} ({self.dtype_reason})",
            f"threads: {self.threads} ({self.threads_reason})",
            f"attention: {self.attention} ({self.attention_reason})",
        ]


def cpu_flags() -> set[str]:
    """Instruction-set flags as Linux reports them; empty where it cannot be known."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((set(line.split()[2:]) for line in lines if line.startswith(("flags", "Features"))), set())


ONEDNN_LIMIT = "ONEDNN_MAX_CPU_ISA"


@functools.cache
def amx_works() -> bool:
    """Whether a CPU that lists AMX can use it. Call before the first bf16 matmul.

    Some virtual machines list AMX, even grant it, and then kill the process that uses it, so it is tried in a child
    process. When the child dies, torch's bf16 matmuls are kept off AMX in this process and in those it starts.
    """
    if ONEDNN_LIMIT in os.environ:  # somebody has chosen already, perhaps this function in a parent process
        return os.environ[ONEDNN_LIMIT].upper() in ("ALL", "DEFAULT", "AVX512_CORE_AMX", "AVX512_CORE_AMX_FP16")
    trial = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); (a @ a).sum().item()"
    if subprocess.run([sys.executable, "-c", trial], capture_output=True, check=False).returncode >= 0:
        return True
    os.environ[ONEDNN_LIMIT] = "AVX512_CORE_FP16"  # the widest without AMX
    return False


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def choose(
    device: str = "auto",
    dtype: str = "auto",
    threads: int | None = None,
    attention: str = "auto",
    head_width: int | None = None,
) -> Machine:
    """Decide where and how to compute; set torch's current device and thread count before anything uses them.

    Values other than 'auto' are obeyed or refused. `head_width` is the model's, where it is known: not every attention
    kernel takes every width.
    """
    chosen, why = _choose_device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
        why = torch.cuda.get_device_name(chosen) + why
    arithmetic, why_dtype = _choose_dtype(chosen, dtype)
    if threads is not None and threads < 1:
        raise UserError(f"threads is {threads}; it must be at least 1.")
    backend, why_backend = choose_backend(attention, chosen, arithmetic, head_width)
    cores, here = usable_cores(), neighbours()
    why_threads = "as asked" if threads else f"{cores} usable cores" + (f" for {here} processes" if here > 1 else "")
    threads = threads or max(1, cores // here)
    torch.set_num_threads(threads)
    return Machine(chosen, why, arithmetic, why_dtype, threads, why_threads, backend, why_backend)


def _choose_device(asked: str) -> tuple[torch.device, str]:
    """(device, why). Each process of a machine takes the GPU of its LOCAL_RANK, also if one is named by its number."""
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    kind, colon, number = asked.partition(":")
    if asked == "auto":
        kind = next((k for k in ("cuda", "mps") if available[k]), "cpu")
    elif kind not in available or (colon and not (kind == "cuda" and number.isdecimal())):
        raise UserError(f"Unknown device {asked!r}; choose auto, cpu, cuda, cuda:N or mps.")
    if not available[kind]:
        raise UserError(
            f"Device {asked!r} was asked for, but torch {torch.__version__} sees none here; try --device cpu."
        )
    why = "as asked" if asked != "auto" else "Apple GPU found" if kind == "mps" else "no CUDA or Apple GPU found"
    if kind != "cuda":
        return torch.device(kind), why
    there, here = torch.cuda.device_count(), neighbours()
    if number and int(number) >= there:
        raise UserError(f"There is no device {asked!r}; torch sees {there}, counted from 0.")
    check_processes(here, asked)
    index = local_rank() if here > 1 or not number else int(number)
    moved = number and index != int(number)
    why = f"; {asked!r} would put all {here} processes on one GPU, so each takes that of its LOCAL_RANK"
    return torch.device("cuda", index), why if moved else ""


def check_settings(device: str, dtype: str, processes: int) -> None:
    """Refuse what `choose` would refuse in every process, without taking hold of a GPU."""
    check_processes(processes, device)
    _choose_dtype(_choose_device(device)[0], dtype)


def check_processes(count: int, device: str) -> None:
    """Refuse more processes on this machine than it has GPUs, if that is what they would compute on."""
    if count < 1:
        raise UserError(f"--nproc is {count}; it must be at least 1.")
    if not (device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())):
        return
    there = torch.cuda.device_count()
    if count > there:
        raise UserError(
            f"{count} processes were asked for, but torch sees {there} GPU{'s' * (there != 1)} here, and each process "
            f"needs one of its own; start at most {there}, or pass --device cpu."
        )


def has_bf16(device: torch.device) -> bool:
    """Tensor cores for bfloat16: Ampere and later."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _choose_dtype(device: torch.device, asked: str) -> tuple[torch.dtype, str]:
    if asked not in ("auto", "float32", "bfloat16"):
        raise UserError(f"Unknown dtype {asked!r}; choose auto, float32 or bfloat16.")
    if asked != "auto":
        if device.type == "cpu" and asked == "bfloat16" and "amx_bf16" in cpu_flags():
            amx_works()
        if device.type == "cuda" and asked == "bfloat16" and not has_bf16(device):
            major, minor = torch.cuda.get_device_capability(device)
            raise UserError(
                f"--dtype bfloat16 was asked for, but {torch.cuda.get_device_name(device)} has no bf16 tensor cores "
                f"(compute capability {major}.{minor}, bf16 begins with 8.0); pass --dtype float32."
            )
        return getattr(torch, asked), "as asked"
    if device.type == "cuda":
        if has_bf16(device):
            return torch.bfloat16, "this GPU has bf16 tensor cores"
        return torch.float32, "this GPU has no bf16 tensor cores"
    if device.type == "mps":
        return torch.float32, "the safe choice on an Apple GPU"
    if "amx_bf16" not in cpu_flags():
        return torch.float32, "this CPU has no bf16 matrix units, so bf16 would be slower"
    if not amx_works():
        return torch.float32, "this CPU lists bf16 matrix units, but using them is an illegal instruction here"
    return torch.bfloat16, "this CPU has bf16 matrix units"


def compiler_problem() -> str | None:
    """Why torch.compile cannot work here, or None. On a CPU inductor needs a C++ compiler."""
    if torch.cuda.is_available():
        return None
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        get_cpp_compiler()
    except (ImportError, RuntimeError) as e:
        return f"no working C++ compiler ({type(e).__name__})"
    return None


Loss = Callable[..., torch.Tensor]


def compiled(
    model: nn.Module, wanted: bool, device: torch.device, config: CompilerConfig | None = None
) -> tuple[Loss, str | None]:
    """(callable, None) when compiled, (the model itself, reason) when not."""
    if not wanted:
        return model, "turned off"
    if device.type == "mps":
        return model, "torch.compile is not reliable on Apple GPUs"
    problem = compiler_problem()
    if problem:
        return model, problem
    torch._dynamo.config.recompile_limit = 64  # one graph for every stage of a schedule; all are made in the warm-up
    # Given to this one graph instead of set for the process: another model in it may want it otherwise.
    options: dict[str, Any] = {"coordinate_descent_tuning": True}
    tuned = config is not None and config.coordinate_descent
    call: Any = torch.compile(model, dynamic=False, fullgraph=True, options=options if tuned else None)
    return call, None
