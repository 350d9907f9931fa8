"""GPUs by name, which need not be here: for a dry run, and for benchmarks/gpu.

`python -m benchmarks.gpu --write` compiles every stage of every native recipe for them, on a machine that has none, and
keeps what it counted in gpus.json beside this file. memory.py looks it up.
"""

from dataclasses import dataclass
from pathlib import Path

from speedrun.model.attention import Backend

TABLE = Path(__file__).with_name("gpus.json")


@dataclass(frozen=True)
class GPU:
    """What Inductor and Triton ask a GPU for. Numbers of NVIDIA's data sheets and of the CUDA programming guide."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    total_memory: int
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

    @property
    def capability(self) -> int:
        return 10 * self.major + self.minor

    @property
    def gcnArchName(self) -> str:
        return f"sm_{self.capability}"


KIB, MIB = 2**10, 2**20
GPUS = {
    "h100": GPU(
        "NVIDIA H100 80GB HBM3", 9, 0, 132, 85_520_809_984, 227 * KIB, 228 * KIB, 2048, 50 * MIB,
        1_980_000, 2_619_000, 5120,
    ),
    "a100": GPU(
        "NVIDIA A100-SXM4-80GB", 8, 0, 108, 85_174_845_440, 163 * KIB, 164 * KIB, 2048, 40 * MIB,
        1_410_000, 1_593_000, 5120,
    ),
    "4090": GPU(
        "NVIDIA GeForce RTX 4090", 8, 9, 128, 25_386_352_640, 99 * KIB, 100 * KIB, 1536, 72 * MIB,
        2_520_000, 10_501_000, 384,
    ),
}  # fmt: skip
ATTENTION: dict[str, Backend] = {"h100": "fa3", "a100": "varlen", "4090": "varlen"}


def kernels(attention: str, fp8_units: bool) -> str:
    """What computes: attention's name, and whether products of 8-bit floats are made of wider ones."""
    return attention if fp8_units else f"{attention}, 8-bit floats widened"


def kernels_of(name: str) -> str:
    return kernels(ATTENTION[name], GPUS[name].capability >= 89)
