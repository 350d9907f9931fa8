"""What the hardware is and what it is doing, for the run folder.

A time means little without the machine it was taken on: how many cores were really usable, what else was
running, how hot and how fast the chip was. Whatever a machine does not tell is left out of the answer, and
nothing here can make a run fail. psutil knows most of it, and nvidia-ml-py (in the `gpu` extra) the NVIDIA GPUs.
"""

import contextlib
import importlib
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from speedrun.training.load import usable_cores

_MIB = 1024 * 1024
_PROC = Path("/proc")
_SYS = Path("/sys")

# Drivers whose temperatures are the processor's; others are disks, network cards, batteries.
_CPU_SENSORS = re.compile(r"coretemp|k10temp|zenpower|cpu_?thermal|x86_pkg_temp|cpu\S*|soc\S*", re.IGNORECASE)


def snapshot() -> dict[str, Any]:
    """The machine right now. Every key but `taken` may be absent."""
    return {
        "taken": datetime.now(UTC).isoformat(timespec="seconds"),
        **_told(
            cpu_model=cpu_model,
            cpu_logical_cores=usable_cores,
            cpu_physical_cores=lambda: min(psutil.cpu_count(logical=False), usable_cores()),
            cpu_quota_cores=_quota_cores,
            cpu_clock_mhz=lambda: round(psutil.cpu_freq().current, 1) or None,
            cpu_temperature_c=_temperature_c,
            load_average=lambda: list(psutil.getloadavg()),
            memory_total_mib=lambda: psutil.virtual_memory().total / _MIB,
            memory_available_mib=lambda: psutil.virtual_memory().available / _MIB,
            process_mib=lambda: psutil.Process().memory_info().rss / _MIB,
            gpus=_gpus,
        ),
        **_torch_cuda(),
    }


def _told(**questions: Callable[[], Any]) -> dict[str, Any]:
    """The answers of those that have one."""
    answers = {}
    for key, question in questions.items():
        with contextlib.suppress(Exception):
            answers[key] = question()
    return {key: value for key, value in answers.items() if value not in (None, [])}


def peak_memory_mib(device: torch.device | str) -> dict[str, float]:
    """The most memory this process ever had: resident, and what torch took on `device` if that is a GPU."""
    device = torch.device(device)
    peak = {"resident": _peak_resident_mib()}
    if device.type == "cuda" and torch.cuda.is_available():
        peak["cuda_allocated"] = torch.cuda.max_memory_allocated(device) / _MIB
        peak["cuda_reserved"] = torch.cuda.max_memory_reserved(device) / _MIB
    return peak


def memory_bytes(device: torch.device, root: Path = _SYS) -> int:
    """All memory that a run on `device` may use: the GPU's, or the machine's, or less where a container is limited."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    there: int = psutil.virtual_memory().total
    granted = _read(root / "fs/cgroup/memory.max")
    return min(there, int(granted)) if granted.isdigit() else there


def summary(snapshot: dict[str, Any]) -> str:
    """One line for the log."""
    parts = [str(snapshot.get("cpu_model", "unknown CPU"))]
    if "cpu_logical_cores" in snapshot:
        physical = f" ({snapshot['cpu_physical_cores']} physical)" if "cpu_physical_cores" in snapshot else ""
        parts.append(f"{snapshot['cpu_logical_cores']} cores{physical}")
    for key, text in (
        ("cpu_quota_cores", "quota {:g} cores"),
        ("cpu_clock_mhz", "{:.0f} MHz"),
        ("cpu_temperature_c", "{:.0f} C"),
    ):
        if key in snapshot:
            parts.append(text.format(snapshot[key]))
    if "load_average" in snapshot:
        parts.append(f"load {snapshot['load_average'][0]:.2f}")
    if "memory_available_mib" in snapshot and "memory_total_mib" in snapshot:
        free, total = snapshot["memory_available_mib"] / 1024, snapshot["memory_total_mib"] / 1024
        parts.append(f"{free:.1f} of {total:.1f} GiB free")
    if "process_mib" in snapshot:
        parts.append(f"process {snapshot['process_mib']:.0f} MiB")
    for n, gpu in enumerate(snapshot.get("gpus", [])):
        told = [f"GPU {n} {gpu.get('name', 'unknown')}"]
        for key, unit in (("sm_clock_mhz", "MHz"), ("power_watt", "W"), ("temperature_c", "C")):
            if key in gpu:
                told.append(f"{gpu[key]:.0f} {unit}")
        parts.append(" ".join(told))
    return ", ".join(parts)


def _read(path: Path) -> str:
    """A small file of /proc or /sys; nothing where there is none."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def cpu_model() -> str | None:
    if sys.platform == "darwin":
        name = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(name, capture_output=True, text=True, check=False).stdout.strip() or None
    text = _read(_PROC / "cpuinfo")
    for name in ("model name", "Model", "cpu model", "Hardware"):
        found = re.search(rf"^{name}\s*:\s*(\S.*)$", text, re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine() or None


def _quota_cores(root: Path = _SYS) -> float | None:
    """A container's limit, in cores: the system may show all cores and grant two."""
    quota, _, period = _read(root / "fs/cgroup/cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _temperature_c() -> float | None:
    """The hottest of the processor's sensors."""
    found = psutil.sensors_temperatures().items()
    return max((s.current for chip, sensors in found if _CPU_SENSORS.fullmatch(chip) for s in sensors), default=None)


def _peak_resident_mib() -> float:
    # Linux first says it for this program alone; getrusage would start from the size of its parent.
    own = re.search(r"^VmHWM:\s*(\d+) kB", _read(_PROC / "self/status"), re.MULTILINE)
    if own:
        return int(own[1]) / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / _MIB if sys.platform == "darwin" else peak / 1024  # bytes there, KiB elsewhere


def _gpus() -> list[dict[str, Any]]:
    """All NVIDIA GPUs of the machine. Other than torch, this starts no context on one."""
    nvml: Any = importlib.import_module("pynvml")
    nvml.nvmlInit()

    def told(gpu: Any) -> dict[str, Any]:
        return _told(
            name=lambda: nvml.nvmlDeviceGetName(gpu),
            driver=nvml.nvmlSystemGetDriverVersion,
            memory_total_mib=lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).total / _MIB,
            memory_used_mib=lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used / _MIB,
            utilisation_percent=lambda: float(nvml.nvmlDeviceGetUtilizationRates(gpu).gpu),
            sm_clock_mhz=lambda: float(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)),
            memory_clock_mhz=lambda: float(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM)),
            power_watt=lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
            temperature_c=lambda: float(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
        )

    return [told(nvml.nvmlDeviceGetHandleByIndex(k)) for k in range(nvml.nvmlDeviceGetCount())]


def _torch_cuda() -> dict[str, Any]:
    # Not "available": asking a GPU that this process does not use would start a context on it.
    if not torch.cuda.is_initialized():
        return {}
    return {
        "cuda_device": torch.cuda.current_device(),
        "cuda_allocated_mib": torch.cuda.memory_allocated() / _MIB,
        "cuda_reserved_mib": torch.cuda.memory_reserved() / _MIB,
    }
