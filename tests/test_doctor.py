"""What the doctor finds: the same choices as training makes, and a way to get what is missing."""

import dataclasses
import importlib.metadata
from pathlib import Path

import pytest
import torch

from speedrun import doctor
from speedrun.doctor import Finding, examine
from speedrun.training.device import choose


def found(**asked: object) -> dict[str, Finding]:
    return {finding.what: finding for finding in examine(choose(**{"threads": 1, **asked}))}  # type: ignore[arg-type]


def test_it_tells_what_training_would_choose() -> None:
    machine = choose(threads=1)
    findings = found()
    assert findings["device"].chosen == str(machine.device)
    assert findings["arithmetic"].chosen == str(machine.dtype).removeprefix("torch.")
    assert findings["threads"].chosen == "1"
    assert findings["attention"].chosen == machine.attention
    assert findings["attention"].why == machine.attention_reason
    assert findings["torch"].chosen == torch.__version__
    assert all(finding.chosen and finding.why for finding in findings.values())


def test_it_obeys_what_is_asked() -> None:
    findings = found(device="cpu", dtype="bfloat16")
    assert findings["arithmetic"].chosen == "bfloat16"
    assert findings["arithmetic"].why == "as asked"
    assert found(device="cpu", attention="sdpa")["attention"].why == "as asked"


def test_an_attention_that_should_work_and_does_not_is_no_good_finding() -> None:
    machine = dataclasses.replace(choose(threads=1), attention_warning="WARNING: pip install 'speedrun[gpu]'")
    finding = next(f for f in examine(machine) if f.what == "attention")
    assert (finding.why, finding.good) == ("WARNING: pip install 'speedrun[gpu]'", False)


def test_missing_data_comes_with_the_way_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEEDRUN_HOME", str(tmp_path))
    findings = found()
    assert not findings["data: pocket"].good
    assert "speedrun data prepare" in findings["data: pocket"].why
    assert not findings["data: short, medium"].good
    assert "speedrun data fetch fineweb10B" in findings["data: short, medium"].why
    assert findings["data folder"].chosen == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_missing_pip_comes_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert not found()["pip"].good
    assert "python -m ensurepip" in found()["pip"].why


def test_a_missing_compiler_comes_with_the_way_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "compiler_problem", lambda: "no working C++ compiler")
    compiler = found()["compiler"]
    assert not compiler.good
    assert compiler.chosen == "eager"
    assert "install g++" in compiler.why
