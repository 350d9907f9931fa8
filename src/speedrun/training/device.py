"""Which device, which arithmetic, which attention, how many threads, compiled or not: chosen here, with the reasons.

`choose()` decides once; `speedrun doctor` prints the same decisions.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from speedrun.checks import check_fields
from speedrun.errors import UserError, plural
from speedrun.model import Backend, GPTConfig, choose_backend, has_fp8_units
from speedrun.training import arithmetic
from speedrun.training.distributed import is_first, local_rank, neighbours
from speedrun.training.gpus import ATTENTION, GPUS
from speedrun.training.load import MOST_THREADS, thread_limit, usable_cores
from speedrun.training.telemetry import memory_bytes


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
    attention_warning: str | None = None
    memory: int | None = None
    """Bytes of the GPU's memory that may be used; None: all there is."""
    here: bool = True
    """False: a GPU by name, for a dry run."""
    fp8_units: bool = True
    """False: a GPU that multiplies 8-bit floats as wider ones."""

    @property
    def kernels(self) -> str:
        """What the memory of a compiled graph depends on, beside the recipe: what multiplies."""
        return self.attention if self.fp8_units else f"{self.attention}, 8-bit floats widened"

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

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
            f"arithmetic: {self.dtype_name} ({self.dtype_reason})",
            f"threads: {self.threads} ({self.threads_reason})",
            f"attention: {self.attention} ({self.attention_reason})",
            *([self.attention_warning] if self.attention_warning else []),
        ]


def choose(
    device: str = "auto",
    dtype: str = "auto",
    threads: int | None = None,
    attention: str = "auto",
    model: GPTConfig | None = None,
    tokens: int = 2048,
    *,
    memory: float | None = None,
    deterministic: bool = False,
) -> Machine:
    """Decide where and how to compute; set torch's current device and thread count before anything uses them.

    Values other than 'auto' are obeyed or refused. `model` is what will be computed, on `tokens` at a time: not
    every attention kernel takes every width, and which arithmetic is faster on a CPU depends on the shapes. `memory` is
    in GB of 1e9 bytes. `deterministic` is for GPUs: a CPU is so anyway.
    """
    chosen, why = _choose_device(device)
    if deterministic and chosen.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it is first used
        torch.use_deterministic_algorithms(True)
        why += ", deterministic"
    limit = _choose_memory(memory, chosen)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
        if limit:
            torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(chosen).total_memory)
        why = torch.cuda.get_device_name(chosen) + why
    most = MOST_THREADS if dtype == "float32" else thread_limit()
    if threads is not None and not 1 <= threads <= most:
        upper = f"at most {most}" + ", the value of OMP_THREAD_LIMIT" * (most < MOST_THREADS)
        raise UserError(f"threads is {threads}; it must be {'at least 1' if threads < 1 else upper}.")
    cores, here = usable_cores(), neighbours()
    why_threads = "as asked" if threads else plural(cores, "usable core") + f" for {here} processes" * (here > 1)
    threads = threads or max(1, cores // here)
    check_dtype(chosen, dtype)
    if dtype == "auto":
        found, why_dtype = _choose_dtype(chosen, threads, model, tokens)
    else:
        found, why_dtype = getattr(torch, dtype), "as asked"
    kernel = choose_backend(attention, chosen, found, None if model is None else model.head_dim)
    torch.set_num_threads(threads)
    units = chosen.type != "cuda" or has_fp8_units(chosen)
    return Machine(chosen, why, found, why_dtype, threads, why_threads, *kernel, limit, fp8_units=units)


def by_name(name: str, memory: float | None, dtype: str, attention: str) -> Machine:
    """A GPU that is not here, for a dry run; what it takes is what `choose` would take there by itself."""
    gpu = GPUS[name]
    if dtype not in ("auto", "bfloat16"):
        raise UserError(f"--dtype {dtype} was not measured for --device {name}; drop it, or pass bfloat16.")
    backend = ATTENTION[name]
    if attention not in ("auto", backend):
        raise UserError(f"--attention {attention} was not measured for --device {name}; drop it, or pass {backend}.")
    limit = _checked_memory(memory, gpu.total_memory, gpu.name)
    why = "not here: from the table of compiled graphs"
    memory_there = limit or gpu.total_memory
    return Machine(
        torch.device("cuda"), gpu.name, torch.bfloat16, why, 1, why, backend, why, None, memory_there, here=False,
        fp8_units=gpu.capability >= 89,
    )  # fmt: skip


def _choose_memory(asked: float | None, device: torch.device) -> int | None:
    if asked is None:
        return None
    if device.type != "cuda":
        raise UserError(f"--memory {asked:g} is for a GPU, and the device is {device}; drop it.")
    return _checked_memory(asked, memory_bytes(device) or 0, torch.cuda.get_device_name(device))


def _checked_memory(asked: float | None, there: int, name: str) -> int | None:
    if asked is not None and not 1 <= asked * 1e9 <= there:
        raise UserError(
            f"--memory is {asked:g} GB, but {name} has {there / 1e9:.1f}; choose more than 0 and at most that."
        )
    return None if asked is None else int(asked * 1e9)


def _choose_device(asked: str) -> tuple[torch.device, str]:
    """(device, why). Each process of a machine takes the GPU of its LOCAL_RANK, also if one is named by its number."""
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    kind, colon, number = asked.partition(":")
    if asked == "auto":
        kind = next((k for k in ("cuda", "mps") if available[k]), "cpu")
    elif kind not in available or (colon and not (kind == "cuda" and number.isdecimal())):
        named = f"; with --dry-run also {', '.join(GPUS)}" if asked not in GPUS else f". {asked} goes with --dry-run"
        raise UserError(f"Unknown device {asked!r}; choose auto, cpu, cuda, cuda:N or mps{named}.")
    if not available[kind]:
        raise _absent(asked)
    why = "as asked" if asked != "auto" else "Apple GPU found" if kind == "mps" else "no CUDA or Apple GPU found"
    if kind != "cuda":
        return torch.device(kind), why
    there, here = torch.cuda.device_count(), max(neighbours(), local_rank() + 1)
    if number and int(number) >= there:
        raise UserError(f"There is no device {asked!r}; torch sees {there}, counted from 0.")
    check_processes(here, asked)
    index = local_rank() if here > 1 or not number else int(number)
    moved = number and index != int(number)
    why = f"; {asked!r} would put all {here} processes on one GPU, so each takes that of its LOCAL_RANK"
    return torch.device("cuda", index), why if moved else ""


def _absent(asked: str) -> UserError:
    return UserError(f"Device {asked!r} was asked for, but torch {torch.__version__} sees none here; try --device cpu.")


def check_settings(device: str, dtype: str, processes: int) -> None:
    """Refuse what `choose` would refuse in every process, without taking hold of a GPU."""
    check_processes(processes, device)
    check_dtype(_choose_device(device)[0], dtype)


def check_processes(count: int, device: str) -> None:
    """Refuse more processes on this machine than it has GPUs, if that is what they would compute on."""
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    named = device.partition(":")[0] == "cuda"
    if named and not there:
        raise _absent(device)
    if (named or (device == "auto" and there)) and count > there:
        raise UserError(
            f"{count} processes were asked for, but torch sees {plural(there, 'GPU')} here, and each process "
            f"needs one of its own; start at most {there}, or pass --device cpu."
        )


def has_bf16(device: torch.device) -> bool:
    """Tensor cores for bfloat16: Ampere and later."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def check_dtype(device: torch.device, asked: str) -> None:
    """Refuse an arithmetic that the device does not have, and keep a CPU alive that dies of the one it lists."""
    if asked not in ("auto", "float32", "bfloat16"):
        raise UserError(f"Unknown dtype {asked!r}; choose auto, float32 or bfloat16.")
    if asked == "bfloat16" and device.type == "cpu" and arithmetic.lists_amx():
        arithmetic.amx_works()
    if asked == "bfloat16" and device.type == "cuda" and not has_bf16(device):
        major, minor = torch.cuda.get_device_capability(device)
        raise UserError(
            f"--dtype bfloat16 was asked for, but {torch.cuda.get_device_name(device)} has no bf16 tensor cores "
            f"(compute capability {major}.{minor}, bf16 begins with 8.0); pass --dtype float32."
        )


def _choose_dtype(device: torch.device, threads: int, model: GPTConfig | None, tokens: int) -> tuple[torch.dtype, str]:
    if device.type == "cuda":
        if has_bf16(device):
            return torch.bfloat16, "this GPU has bf16 tensor cores"
        return torch.float32, "this GPU has no bf16 tensor cores"
    if device.type == "mps":
        return torch.float32, "the safe choice on an Apple GPU"
    if model is None:
        return torch.float32, "the safe choice on a CPU"
    if not is_first():
        return torch.float32, "until rank 0 says which one"
    return arithmetic.choose_on_cpu(model, tokens, threads)


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
