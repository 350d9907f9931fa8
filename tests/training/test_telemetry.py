"""Telemetry tells what the machine tells, and never fails."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from speedrun.training import telemetry


def test_snapshot_of_this_machine() -> None:
    snapshot = telemetry.snapshot()
    json.dumps(snapshot, allow_nan=False)
    assert None not in snapshot.values()
    assert 1 <= snapshot["cpu_logical_cores"] <= (os.cpu_count() or 1)
    assert "\n" not in telemetry.summary(snapshot)
    if sys.platform in ("linux", "darwin"):
        assert 0 < snapshot["memory_available_mib"] <= snapshot["memory_total_mib"]
        assert 10 < snapshot["process_mib"] < snapshot["memory_total_mib"]
        assert str(snapshot["cpu_logical_cores"]) in telemetry.summary(snapshot)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs affinity")
def test_cores_are_those_this_process_may_use() -> None:
    all_of_them = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(all_of_them)})
    try:
        snapshot = telemetry.snapshot()
        assert snapshot["cpu_logical_cores"] == 1
        assert snapshot.get("cpu_physical_cores", 1) == 1
    finally:
        os.sched_setaffinity(0, all_of_them)


def test_a_machine_that_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError("not for you")

    for name in ("cpu_count", "cpu_freq", "sensors_temperatures", "getloadavg", "virtual_memory", "Process"):
        monkeypatch.setattr(psutil, name, refused, raising=False)
    monkeypatch.setattr(telemetry, "_PROC", tmp_path)
    assert telemetry._quota_cores(tmp_path) is None
    snapshot = telemetry.snapshot()
    assert snapshot.keys() <= {"taken", "cpu_model", "cpu_logical_cores", "cpu_quota_cores"}
    assert telemetry.summary(snapshot)
    assert telemetry.summary({}) == "unknown CPU"


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_temperature_is_the_hottest_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    sensors = {"nvme": [90.0], "k10temp": [61.5, 58.0], "x86_pkg_temp": [60.0]}
    found = {chip: [SimpleNamespace(current=c) for c in degrees] for chip, degrees in sensors.items()}
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: found, raising=False)
    assert telemetry.snapshot()["cpu_temperature_c"] == 61.5


@pytest.mark.parametrize(("text", "least"), [("1000000", 1000000), ("max", 2**30), ("", 2**30)])
def test_memory_of_a_container(tmp_path: Path, text: str, least: int) -> None:
    write(tmp_path, "fs/cgroup/memory.max", text)
    there = telemetry.memory_bytes(torch.device("cpu"), tmp_path)
    assert there == least if text.isdigit() else there > least


@pytest.mark.parametrize(("text", "cores"), [("150000 100000", 1.5), ("max 100000", None), ("", None)])
def test_quota_of_a_container(tmp_path: Path, text: str, cores: float | None) -> None:
    write(tmp_path, "fs/cgroup/cpu.max", text)
    assert telemetry._quota_cores(tmp_path) == cores


def test_units_of_the_peak_on_a_mac(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(telemetry, "_PROC", tmp_path)
    kib_or_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for platform, unit in (("darwin", 2**20), ("linux", 2**10)):
        monkeypatch.setattr(sys, "platform", platform)
        assert telemetry.peak_memory_mib("cpu")["resident"] == pytest.approx(kib_or_bytes / unit, rel=0.05)


def test_peak_memory_grows_with_the_process_and_is_its_own() -> None:
    size = 64 * 2**20
    held = torch.ones(size, dtype=torch.uint8)
    peak = telemetry.peak_memory_mib(torch.device("cpu"))
    assert peak.keys() == {"resident"}
    assert peak["resident"] > 64
    del held
    assert telemetry.peak_memory_mib("cpu")["resident"] >= peak["resident"] - 1


def test_the_peak_is_this_programs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system keeps one per program; getrusage counts what started it as well."""
    write(tmp_path, "self/status", "Name:\tpython\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\n")
    monkeypatch.setattr(telemetry, "_PROC", tmp_path)
    assert telemetry.peak_memory_mib("cpu") == {"resident": 2.0}


def test_gpus_are_asked_by_nvml_and_gaps_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = SimpleNamespace(
        NVML_CLOCK_SM="sm",
        NVML_CLOCK_MEM="mem",
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda k: k,
        nvmlDeviceGetName=lambda k: ("NVIDIA H100 80GB HBM3", "NVIDIA GB10")[k],
        nvmlSystemGetDriverVersion=lambda: "550.54.15",
        nvmlDeviceGetMemoryInfo=lambda k: SimpleNamespace(total=81559 * 2**20, used=2**30) if k == 0 else 1 / 0,
        nvmlDeviceGetUtilizationRates=lambda k: SimpleNamespace(gpu=97 * (1 - k)),
        nvmlDeviceGetClockInfo=lambda k, kind: {"sm": 1980, "mem": 2619}[kind],
        nvmlDeviceGetPowerUsage=lambda k: 655310,
        nvmlDeviceGetTemperature=lambda k, _: 61,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    snapshot = telemetry.snapshot()
    json.dumps(snapshot, allow_nan=False)
    first, second = snapshot["gpus"]
    assert first == {
        "name": "NVIDIA H100 80GB HBM3",
        "driver": "550.54.15",
        "memory_total_mib": 81559.0,
        "memory_used_mib": 1024.0,
        "utilisation_percent": 97.0,
        "sm_clock_mhz": 1980.0,
        "memory_clock_mhz": 2619.0,
        "power_watt": 655.31,
        "temperature_c": 61.0,
    }
    assert "memory_total_mib" not in second
    assert second["utilisation_percent"] == 0.0
    assert "GPU 0 NVIDIA H100 80GB HBM3 1980 MHz 655 W 61 C" in telemetry.summary(snapshot)


def test_a_driver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("NVML: driver not loaded")

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(nvmlInit=fails))
    assert "gpus" not in telemetry.snapshot()
