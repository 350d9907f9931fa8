"""What the hardware is and what it is doing, for the run folder.

A time means little without the machine it was taken on: how many cores were really usable, what else was
running, how hot and how fast the chip was. Whatever a machine does not tell is left out of the answer, and
nothing here can make a run fail. `nvidia-smi` takes a good part of a second: ask outside the clock.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

_MIB = 1024 * 1024
_PROC = Path("/proc")
_SYS = Path("/sys")

# Drivers whose temperatures are the processor's; others are disks, network cards, batteries.
_CPU_SENSORS = re.compile(r"coretemp|k10temp|zenpower|cpu_?thermal|x86_pkg_temp|cpu\S*|soc\S*", re.IGNORECASE)

# nvidia-smi's name of a field: ours
_GPU_FIELDS = {
    "name": "name",
    "driver_version": "driver",
    "memory.total": "memory_total_mib",
    "memory.used": "memory_used_mib",
    "utilization.gpu": "utilisation_percent",
    "clocks.sm": "sm_clock_mhz",
    "clocks.mem": "memory_clock_mhz",
    "power.draw": "power_watt",
    "temperature.gpu": "temperature_c",
}


def snapshot() -> dict[str, Any]:
    """The machine right now. Every key but `taken` may be absent."""
    return _present(
        {
            "taken": datetime.now(UTC).isoformat(timespec="seconds"),
            "cpu_model": cpu_model(),
            "cpu_logical_cores": _usable_cores(),
            "cpu_physical_cores": _physical_cores(),
            "cpu_quota_cores": _quota_cores(),
            "cpu_clock_mhz": _clock_mhz(),
            "cpu_temperature_c": _temperature_c(),
            "load_average": _load_average(),
            **_memory_mib(),
            "process_mib": _process_mib(),
            **_torch_cuda(),
            "gpus": _nvidia_smi(),
        }
    )


def peak_memory_mib(device: torch.device | str) -> dict[str, float]:
    """The most memory this process ever had: resident, and what torch took on `device` if that is a GPU."""
    device = torch.device(device)
    peak: dict[str, float] = {}
    resident = _peak_resident_mib()
    if resident is not None:
        peak["resident"] = resident
    if device.type == "cuda" and torch.cuda.is_available():
        peak["cuda_allocated"] = torch.cuda.max_memory_allocated(device) / _MIB
        peak["cuda_reserved"] = torch.cuda.max_memory_reserved(device) / _MIB
    return peak


def memory_bytes(device: torch.device, root: Path = _SYS) -> int | None:
    """All memory that a run on `device` may use: the GPU's, or the machine's, or less where a container is limited."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    limits = [mib * _MIB for mib in (_memory_mib()["memory_total_mib"],) if mib is not None]
    granted = _read(root / "fs/cgroup/memory.max") or ""
    limits += [int(granted)] if granted.isdigit() else []
    return int(min(limits)) if limits else None


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


def _present(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value not in (None, {}, [])}


def _read(path: Path) -> str | None:
    """A small file of /proc or /sys. Sensors can be listed and yet refuse to be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def _read_number(path: Path) -> float | None:
    try:
        return float(_read(path) or "")
    except ValueError:
        return None


def _ask(*command: str, timeout: float = 5.0) -> str | None:
    """What a program prints; None when it is absent, fails or hangs."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


# --- the processor --------------------------------------------------------------------------------


def cpu_model() -> str | None:
    if sys.platform == "darwin":
        return _ask("sysctl", "-n", "machdep.cpu.brand_string")
    names = _field(_read(_PROC / "cpuinfo") or "", "model name", "Model", "cpu model", "Hardware")
    return names or platform.processor() or platform.machine() or None


def _field(text: str, *names: str) -> str | None:
    """The first `name : value` of a text like /proc/cpuinfo; earlier names win."""
    for name in names:
        found = re.search(rf"^{re.escape(name)}\s*:\s*(\S.*)$", text, re.MULTILINE)
        if found:
            return found[1].strip()
    return None


def _usable() -> set[int] | None:
    """Which cores this process may run on, where the system can say so."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def _usable_cores() -> int | None:
    usable = _usable()
    return len(usable) if usable is not None else os.cpu_count()


def _physical_cores(root: Path = _SYS) -> int | None:
    if sys.platform == "darwin":
        answer = _ask("sysctl", "-n", "hw.physicalcpu") or ""
        return int(answer) if answer.isdigit() else None
    # Logical cores of one physical core list the same siblings.
    siblings = {_read(root / f"devices/system/cpu/cpu{n}/topology/thread_siblings_list") for n in _usable() or ()} - {
        None
    }
    return len(siblings) or None


def _quota_cores(root: Path = _SYS) -> float | None:
    """A container's limit, in cores: the system may show all cores and grant two."""
    quota, _, period = (_read(root / "fs/cgroup/cpu.max") or "").partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _load_average() -> list[float] | None:
    try:
        return list(os.getloadavg())
    except (OSError, AttributeError):
        return None


def _clock_mhz(proc: Path = _PROC, root: Path = _SYS) -> float | None:
    """The mean clock of all cores."""
    clocks = [float(mhz) for mhz in re.findall(r"^cpu MHz\s*:\s*(\d+\.?\d*)", _read(proc / "cpuinfo") or "", re.M)]
    if not clocks:
        files = sorted(root.glob("devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq"))
        clocks = [khz / 1000 for khz in map(_read_number, files) if khz]
    return round(sum(clocks) / len(clocks), 1) if clocks else None


def _temperature_c(root: Path = _SYS) -> float | None:
    """The hottest of the processor's sensors; the files hold thousandths of a degree."""
    files = [
        file
        for chip in root.glob("class/hwmon/hwmon*")
        if _CPU_SENSORS.fullmatch(_read(chip / "name") or "")
        for file in chip.glob("temp*_input")
    ] + [
        zone / "temp"
        for zone in root.glob("class/thermal/thermal_zone*")
        if _CPU_SENSORS.fullmatch(_read(zone / "type") or "")
    ]
    degrees = [value / 1000 for value in map(_read_number, files) if value is not None]
    return max(degrees, default=None)


# --- memory ---------------------------------------------------------------------------------------


def _memory_mib() -> dict[str, float | None]:
    if sys.platform == "darwin":
        total = _ask("sysctl", "-n", "hw.memsize") or ""
        return {
            "memory_total_mib": int(total) / _MIB if total.isdigit() else None,
            "memory_available_mib": _mac_available_mib(_ask("vm_stat") or ""),
        }
    text = _read(_PROC / "meminfo") or ""
    return {
        "memory_total_mib": _kib_line(text, "MemTotal"),
        "memory_available_mib": _kib_line(text, "MemAvailable"),
    }


def _kib_line(text: str, name: str) -> float | None:
    """`name:  1234 kB` as MiB."""
    kib = re.fullmatch(r"(\d+) kB", _field(text, name) or "")
    return int(kib[1]) / 1024 if kib else None


def _mac_available_mib(vm_stat: str) -> float | None:
    """What macOS can hand out at once: free, inactive and speculative pages."""
    page = re.search(r"page size of (\d+) bytes", vm_stat)
    pages = [re.search(rf"^Pages {kind}:\s*(\d+)", vm_stat, re.M) for kind in ("free", "inactive", "speculative")]
    if page is None or pages[0] is None:
        return None
    return sum(int(found[1]) for found in pages if found) * int(page[1]) / _MIB


def _process_mib() -> float | None:
    if sys.platform == "darwin":
        kib = _ask("ps", "-o", "rss=", "-p", str(os.getpid())) or ""
        return int(kib) / 1024 if kib.isdigit() else None
    return _kib_line(_read(_PROC / "self/status") or "", "VmRSS")


def _peak_resident_mib() -> float | None:
    # Linux first says it for this program alone; getrusage would start from the size of whoever started it.
    own = _kib_line(_read(_PROC / "self/status") or "", "VmHWM")
    if own is not None:
        return own
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / _MIB if sys.platform == "darwin" else peak / 1024  # bytes there, KiB elsewhere


# --- GPUs -----------------------------------------------------------------------------------------


def _nvidia_smi() -> list[dict[str, Any]]:
    answer = _ask("nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits")
    return _parse_nvidia_smi(answer or "")


def _parse_nvidia_smi(answer: str) -> list[dict[str, Any]]:
    gpus = []
    for line in answer.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(_GPU_FIELDS):
            continue
        gpu: dict[str, Any] = {}
        for key, cell in zip(_GPU_FIELDS.values(), cells, strict=True):
            if key in ("name", "driver"):
                gpu[key] = cell
            elif re.fullmatch(r"-?\d+(\.\d+)?", cell):  # others read [N/A] or [Not Supported]
                gpu[key] = float(cell)
        gpus.append(gpu)
    return gpus


def _torch_cuda() -> dict[str, Any]:
    # Not "available": asking a GPU that this process does not use would start a context on it.
    if not torch.cuda.is_initialized():
        return {}
    return {
        "cuda_device": torch.cuda.current_device(),
        "cuda_allocated_mib": torch.cuda.memory_allocated() / _MIB,
        "cuda_reserved_mib": torch.cuda.memory_reserved() / _MIB,
    }
