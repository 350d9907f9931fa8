"""GPUs by name, which need not be here: for a dry run, and for benchmarks/gpu.

`python -m benchmarks.gpu --write` compiles every stage of every native recipe for them, on a machine that has none, and
keeps what it counted in gpus.json beside this file. memory.py looks it up.
"""

from dataclasses import dataclass
from pathlib import Path

from speedrun.model import Backend

TABLE = Path(__file__).with_name("gpus.json")


@dataclass(frozen=True)
class GPU:
    """What a dry run asks. Numbers of NVIDIA's data sheets."""

    name: str
    major: int
    minor: int
    total_memory: int

    @property
    def capability(self) -> int:
        return 10 * self.major + self.minor


GPUS = {
    "h100": GPU("NVIDIA H100 80GB HBM3", 9, 0, 85_520_809_984),
    "a100": GPU("NVIDIA A100-SXM4-80GB", 8, 0, 85_174_845_440),
    "4090": GPU("NVIDIA GeForce RTX 4090", 8, 9, 25_386_352_640),
}
ATTENTION: dict[str, Backend] = {"h100": "fa3", "a100": "varlen", "4090": "varlen"}
