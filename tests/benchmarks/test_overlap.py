"""The benchmark of the sharded step runs: every order, DDP, and what is simulated of them."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_order_is_measured_and_simulated() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.overlap", "--rounds", "1", "--width", "64", "--rows", "1"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    table, simulated = done.stdout.split("simulated from")
    assert re.findall(r"^  (\w+) +\d+\.\d", table, re.M) == ["sequential", "interleaved", "eager", "ddp"]
    assert re.findall(r"^  (\w+) +\d+\.\d ms, measured", simulated, re.M) == ["sequential", "interleaved", "eager"]
