"""A GPU that is not there: torch, Inductor and Triton are told of one, and fake tensors live on it.

`start(name)` runs first thing in a process; `preloaded_environment` is what that process must be started with.
"""

import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speedrun.training.gpus import GPU, GPUS

SOURCE = Path(__file__).with_name("guard.cpp")
KIB, MIB = 2**10, 2**20


@dataclass(frozen=True)
class Chip:
    """What else Inductor and Triton ask a GPU for: numbers of NVIDIA's data sheets and CUDA programming guide."""

    multi_processor_count: int
    shared_memory_per_block_optin: int
    shared_memory_per_multiprocessor: int
    max_threads_per_multi_processor: int
    L2_cache_size: int
    clock_rate: int  # kHz, as the next one
    memory_clock_rate: int
    memory_bus_width: int
    regs_per_multiprocessor: int = 65536
    max_threads_per_block: int = 1024
    warp_size: int = 32
    is_integrated: bool = False


CHIPS = {
    "h100": Chip(132, 227 * KIB, 228 * KIB, 2048, 50 * MIB, 1_980_000, 2_619_000, 5120),
    "a100": Chip(108, 163 * KIB, 164 * KIB, 2048, 40 * MIB, 1_410_000, 1_593_000, 5120),
    "4090": Chip(128, 99 * KIB, 100 * KIB, 1536, 72 * MIB, 2_520_000, 10_501_000, 384),
}


@dataclass(frozen=True)
class Device(Chip, GPU):
    """What torch gives as the properties of a GPU."""

    @property
    def gcnArchName(self) -> str:
        return f"sm_{self.capability}"


class Absent(Exception):
    """What this machine lacks for the bench, as a sentence."""


def preloaded_environment(folder: Path) -> dict[str, str]:
    """The environment of a process that can `start`; the guard is built into `folder` once."""
    import torch

    try:
        import triton  # noqa: F401
    except ImportError as e:
        raise Absent("triton is not installed (pip install triton)") from e
    compiler = shutil.which("g++")
    if compiler is None:
        raise Absent("there is no g++ to build the guard with")
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = folder / f"guard-{key}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        site, unfinished = Path(torch.__file__).parent, library.with_suffix(f".{os.getpid()}")
        include = [f"-I{site}/include", f"-I{site}/include/torch/csrc/api/include"]
        linked = [f"-L{site}/lib", f"-Wl,-rpath,{site}/lib", "-ltorch_cpu", "-lc10"]
        flags = ["-O1", "-shared", "-fPIC", "-std=c++20"]
        done = subprocess.run(
            [compiler, *flags, *include, str(SOURCE), "-o", str(unfinished), *linked], capture_output=True, text=True
        )
        if done.returncode:
            raise Absent(f"g++ could not build the guard: {done.stderr.strip().splitlines()[0]}")
        unfinished.replace(library)
    return {**os.environ, "LD_PRELOAD": str(library)}


def start(name: str) -> Device:
    """From here on torch believes that it has this GPU. Fake tensors alone may be put on it."""
    import torch
    import torch._dynamo.device_interface as interface
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor
    import triton
    from torch._inductor.runtime import triton_helpers
    from torch._subclasses.fake_tensor import FakeTensorMode
    from triton.backends.compiler import GPUTarget

    device = Device(**vars(GPUS[name]), **vars(CHIPS[name]))
    torch.set_num_threads(1)
    # These two would run kernels while they compile.
    inductor.shape_padding = False
    inductor.joint_graph_constant_folding = False
    inductor.compile_threads = 1
    inductor.fx_graph_cache = False
    inductor.use_static_triton_launcher = False  # its kernels do not tell their shared memory
    functorch.enable_autograd_cache = False
    functorch.force_non_lazy_backward_lowering = True  # nothing is run, so no backward pass will ask for its graph

    state = torch.zeros(16, dtype=torch.uint8)
    stream = type("Stream", (), {"cuda_stream": 0, "device": torch.device("cuda:0"), "stream_id": 0, "device_index": 0})
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda i: None,
        "_lazy_init": lambda: None,
        "_exchange_device": lambda i: 0,
        "_maybe_exchange_device": lambda i: 0,
        "_get_device_properties": lambda i: device,
        "get_device_properties": lambda *_: device,
        "get_device_capability": lambda *_: (device.major, device.minor),
        "get_device_name": lambda *_: device.name,
        "is_bf16_supported": lambda *_, **__: True,
        "synchronize": lambda *_: None,
        "reset_peak_memory_stats": lambda *_: None,
        "max_memory_allocated": lambda *_: 0,
        "max_memory_reserved": lambda *_: 0,
        "current_stream": lambda *_: stream(),
        "get_rng_state": lambda *_: state,
        "set_rng_state": lambda *_: None,
    }
    for attribute, answer in answers.items():
        setattr(torch.cuda, attribute, answer)
    torch.version.cuda = "13.0"
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[assignment]
    interface.CudaInterface.get_raw_stream = staticmethod(lambda i=0: 0)
    interface.CudaInterface.Worker.get_device_properties = staticmethod(lambda *_: device)
    interface.CudaInterface.Worker.current_device = staticmethod(lambda: 0)

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", device.capability, device.warp_size)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, index: int = 0) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda:0")

        def is_active(self) -> bool:
            return True

    triton.runtime.driver.set_active(Driver())
    triton_helpers.set_driver_to_gpu = lambda: None  # it would look for libcuda
    return device
