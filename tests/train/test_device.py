"""Device and arithmetic: what is chosen, and that finding out cannot hurt."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from speedrun.train import device


@pytest.mark.parametrize(("dies", "works"), [(True, False), (False, True)])
def test_amx_is_tried_in_a_process_that_may_die(
    dies: bool, works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some virtual machines list AMX and kill whoever uses it."""
    stand_in = tmp_path / "python"
    stand_in.write_text("#!/bin/sh\n" + ("kill -ILL $$\n" if dies else "exit 0\n"))
    stand_in.chmod(0o755)
    monkeypatch.setattr(device, "cpu_flags", lambda: {"amx_bf16"})
    monkeypatch.setattr("sys.executable", str(stand_in))
    monkeypatch.setenv(device.ONEDNN_LIMIT, "")  # so that it is put back whatever happens below
    monkeypatch.delenv(device.ONEDNN_LIMIT)
    device.amx_works.cache_clear()
    chosen = device.choose("cpu", threads=1)
    assert chosen.dtype == (torch.bfloat16 if works else torch.float32)
    assert ("illegal instruction" in chosen.dtype_reason) == dies
    assert os.environ.get(device.ONEDNN_LIMIT) == (None if works else "AVX512_CORE_FP16")
    device.amx_works.cache_clear()
    assert device.amx_works() == works, "a child process reads the answer from its environment"
    device.amx_works.cache_clear()


def test_coordinate_descent_is_asked_of_this_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(device, "compiler_problem", lambda: None)
    monkeypatch.setattr(torch, "compile", lambda model, **how: asked.append(how["options"]) or model)
    cpu = torch.device("cpu")
    for config in (None, device.CompilerConfig(), device.CompilerConfig(coordinate_descent=True)):
        device.compiled(nn.Identity(), True, cpu, config)
    assert asked == [None, None, {"coordinate_descent_tuning": True}]
    assert torch._inductor.config.coordinate_descent_tuning is False


def test_coordinate_descent_compiles_on_a_cpu() -> None:
    if device.compiler_problem():
        pytest.skip("no C++ compiler")
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    call, why_not = device.compiled(model, True, torch.device("cpu"), device.CompilerConfig(coordinate_descent=True))
    assert why_not is None
    x = torch.randn(4, 8)
    torch.testing.assert_close(call(x), model(x))
