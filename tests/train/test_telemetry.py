"""Telemetry tells what the machine tells, and never fails."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from speedrun.train import telemetry


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
    monkeypatch.setattr(telemetry, "_PROC", tmp_path)
    monkeypatch.setattr(telemetry, "_SYS", tmp_path)
    monkeypatch.setenv("PATH", "")
    for function in (telemetry._physical_cores, telemetry._quota_cores, telemetry._temperature_c):
        assert function(tmp_path) is None
    assert telemetry._clock_mhz(tmp_path, tmp_path) is None
    snapshot = telemetry.snapshot()
    assert "memory_total_mib" not in snapshot
    assert "gpus" not in snapshot
    assert telemetry.summary(snapshot)
    assert telemetry.summary({}) == "unknown CPU"


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_temperature_is_the_hottest_of_the_processor(tmp_path: Path) -> None:
    write(tmp_path, "class/hwmon/hwmon0/name", "nvme\n")
    write(tmp_path, "class/hwmon/hwmon0/temp1_input", "90000\n")
    write(tmp_path, "class/hwmon/hwmon1/name", "k10temp\n")
    write(tmp_path, "class/hwmon/hwmon1/temp1_input", "61500\n")
    write(tmp_path, "class/hwmon/hwmon1/temp2_input", "nonsense\n")
    write(tmp_path, "class/thermal/thermal_zone0/type", "x86_pkg_temp\n")
    write(tmp_path, "class/thermal/thermal_zone0/temp", "58000\n")
    (tmp_path / "class/thermal/thermal_zone0/temp_folder").mkdir()
    assert telemetry._temperature_c(tmp_path) == 61.5


def test_clock_from_either_place(tmp_path: Path) -> None:
    write(tmp_path, "proc/cpuinfo", "processor\t: 0\ncpu MHz\t\t: 2000.5\nprocessor\t: 1\ncpu MHz\t\t: 3000.5\n")
    assert telemetry._clock_mhz(tmp_path / "proc", tmp_path) == 2500.5
    write(tmp_path, "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq", "1800000\n")
    assert telemetry._clock_mhz(tmp_path, tmp_path / "sys") == 1800.0


@pytest.mark.parametrize(("text", "cores"), [("150000 100000", 1.5), ("max 100000", None), ("", None)])
def test_quota_of_a_container(tmp_path: Path, text: str, cores: float | None) -> None:
    write(tmp_path, "fs/cgroup/cpu.max", text)
    assert telemetry._quota_cores(tmp_path) == cores


VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               10000.
Pages active:                            300000.
Pages inactive:                           20000.
Pages speculative:                         2000.
"""


def test_memory_of_a_mac() -> None:
    assert telemetry._mac_available_mib(VM_STAT) == 32000 * 16384 / 2**20
    assert telemetry._mac_available_mib("") is None


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


def test_nvidia_smi_is_parsed_and_gaps_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "NVIDIA H100 80GB HBM3, 550.54.15, 81559, 1024, 97, 1980, 2619, 655.31, 61"
    gap = "NVIDIA GB10, 580.95, [N/A], [N/A], 0, 208, [Not Supported], 4.5, 36"
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f"#!/bin/sh\nif [ \"$2\" = \"--format=csv,noheader,nounits\" ]; then\necho '{line}'\necho '{gap}'\nfi\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    snapshot = telemetry.snapshot()
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
    assert "GPU 0 NVIDIA H100 80GB HBM3 1980 MHz 655 W 61 C" in telemetry.summary(snapshot)


@pytest.mark.parametrize("script", ["exit 9", "echo garbage", "sleep 9"])
def test_nvidia_smi_that_fails_or_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script.replace('sleep', 'exec sleep')}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    ask = telemetry._ask
    monkeypatch.setattr(telemetry, "_ask", lambda *command, **_: ask(*command, timeout=0.5))
    found: dict[str, Any] = telemetry.snapshot()
    assert "gpus" not in found
