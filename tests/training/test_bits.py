"""The same seed gives the same bits: in two processes, compiled, with two threads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from speedrun.data.shards import TokenFolder

FLAGS = {
    "recipe": "adamw",
    "model.num_layers": "2",
    "model.dim": "64",
    "model.num_heads": "2",
    "model.embeddings.std": "0.5",
    "schedule.steps": "20",
    "schedule.batch_size": "8",
    "schedule.seq_len": "64",
    "validation.every": "10",
    "validation.batch_size": "8",
    "validation.seq_len": "64",
    "threads": "2",
    "sample": "False",
}


def run(tokens: TokenFolder, out: Path, noise: str) -> list[tuple[str, int, float]]:
    """A compiled run in a process of its own; `noise` moves its memory around without meaning anything."""
    command = [sys.executable, "-m", "speedrun", "train", "--data", str(tokens.path), "--out", str(out)]
    for name, value in FLAGS.items():
        command += [f"--{name}", value]
    subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, "SPEEDRUN_TEST_NOISE": noise}
    )
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(m["kind"], m["step"], m["loss"]) for m in lines if m["kind"] in ("train", "val")]


@pytest.mark.timeout(400)
def test_two_processes_with_one_seed_agree_to_the_last_bit(tokens: TokenFolder, tmp_path: Path) -> None:
    first = run(tokens, tmp_path / "a", "")
    second = run(tokens, tmp_path / "b", "x" * 100_003)
    assert len(first) == 20 + 3
    assert first == second
    files = [tmp_path / name / "checkpoints" / "step-000020" / "tensors.safetensors" for name in ("a", "b")]
    assert files[0].read_bytes() == files[1].read_bytes()
