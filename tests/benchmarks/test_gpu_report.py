"""The report of a first run on a GPU, on one that is made of fake tensors: at native size, with its predictions."""

from pathlib import Path

import pytest

from tests.benchmarks.test_gpu import answers, environment  # noqa: F401 - a fixture

REPORT = """
import contextlib, json, sys, torch
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch
from benchmarks.gpu import pretend
pretend.start("h100")
from benchmarks.gpu import stages
from benchmarks.gpu.launches import Launches, fake_gpu
from speedrun import gpu_report
from speedrun.model.gpt import GPT
from speedrun.optim.sharded import Comm
from speedrun.recipes import get_recipe
from speedrun.training.config import Options
from speedrun.training.device import Machine
from speedrun.training.step import Trainer

def trainer(*args):
    with torch.device("cuda:0"):
        return Trainer(*args)

class Profiled(contextlib.nullcontext):  # the real one takes minutes for a step of fake tensors
    events = lambda self: [SimpleNamespace(name="cudaLaunchKernel")] * 7

stages.install_stand_in()
machine = Machine(torch.device("cuda:0"), "", torch.bfloat16, "", 1, "", "fa3", "")
with (
    fake_gpu(), Launches(),
    patch.object(GPT, "to", lambda model, _: model),
    patch("speedrun.training.step.compiled", lambda model, *_: (model, None)),
    patch.object(gpu_report, "Trainer", trainer),
    patch.object(gpu_report, "profile", lambda **_: Profiled(Profiled())),
    patch("speedrun.training.memory.row_bytes", lambda *_: 2**20),  # it has fake tensors of its own
    patch("speedrun.model.attention.cu_seqlens_of", lambda _: torch.zeros(7, dtype=torch.int32, device="cuda:0")),
    patch.object(gpu_report, "reference_attend", lambda q, k, v, **_: q + k + v),
):
    recipe = get_recipe("interleaved", sys.argv[2])
    if sys.argv[2] == "short":
        gpu_report.kinds_of_steps = lambda recipe: [recipe.schedule.at(0)]  # a native step takes many seconds
    *_, (_, _, text) = gpu_report.report(recipe, machine, Options(), Comm(), [], 1)
    Path(sys.argv[1]).write_text(text)
print(json.dumps({}))
"""


def report(environment: dict[str, str], folder: Path, track: str) -> str:  # noqa: F811
    script, out = folder / "report.py", folder / "report.md"
    script.write_text(REPORT)
    answers(environment, str(script), str(out), track)
    return out.read_text()


def test_a_report_of_a_gpu_that_is_not_there(environment, tmp_path: Path) -> None:  # noqa: F811
    text = report(environment, tmp_path, "pocket")
    assert text.startswith("# interleaved at pocket size on 1 x NVIDIA H100 80GB HBM3")
    assert "compute capability 9.0, 79.6 GiB" in text
    for stage in ("Step 0, 8 x", "Step 209, 16 x", "Step 417, 24 x", "Step 418, 24 x", "Validation, 64 x 128"):
        assert f"## {stage}" in text
    assert "| passes over the model | - | 1 of 24 rows |" in text
    assert "| kernel launches | not predicted | 7 |" in text


@pytest.mark.slow
def test_a_report_at_native_size_has_predictions(environment, tmp_path: Path) -> None:  # noqa: F811
    text = report(environment, tmp_path, "short")
    assert "8-bit head, dW" in text
    assert "| passes over the model | - | 2 of 4 rows |" in text
    assert "not predicted" not in text
