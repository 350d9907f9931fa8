"""Device and arithmetic: what is chosen, and that finding out cannot hurt."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from speedrun import cli
from speedrun.data.shards import TokenFolder
from speedrun.errors import UserError
from speedrun.model import attention
from speedrun.training import device, distributed
from tests.model.test_attention import Falling, Older, hub, offline


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


class Gpus:
    """What torch.cuda says on a machine with so many GPUs; `current` is the one that this process computes on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, capability: tuple[int, int] = (9, 0)) -> None:
        self.current: int | None = None
        stand_ins: dict[str, Any] = {
            "is_available": lambda: True,
            "device_count": lambda: count,
            "set_device": lambda chosen: setattr(self, "current", chosen.index),
            "get_device_name": lambda which=None: f"GPU number {which}",
            "get_device_capability": lambda which=None: capability,
        }
        for name, function in stand_ins.items():
            monkeypatch.setattr(torch.cuda, name, function)


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int) -> None:
    variables = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("asked", ["auto", "cuda", "cuda:0"])
def test_every_rank_computes_on_the_gpu_of_its_local_rank(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus(monkeypatch, 4)
    for rank in range(4):
        as_rank(monkeypatch, rank, 4)
        chosen = device.choose(asked, threads=1, attention="sdpa")
        assert chosen.device == torch.device("cuda", rank)
        assert gpus.current == rank, "the current device, on which streams and events are made"
        assert ("LOCAL_RANK" in chosen.device_reason) == (asked == "cuda:0" and rank > 0)


def test_a_gpu_is_deterministic_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, 1)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        device.choose("cuda", threads=1, attention="sdpa")
        assert not torch.are_deterministic_algorithms_enabled()
        device.choose("cpu", "float32", threads=1, deterministic=True)
        assert not torch.are_deterministic_algorithms_enabled(), "a CPU is so anyway"
        chosen = device.choose("cuda", threads=1, attention="sdpa", deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
        assert chosen.device_reason.endswith(", deterministic")
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("asked", ["auto", "cuda", "cuda:0"])
def test_a_launcher_need_not_say_how_many_share_the_machine(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus(monkeypatch, 2)
    for rank in range(4):  # on two machines
        as_rank(monkeypatch, rank, 4)
        monkeypatch.delenv("LOCAL_WORLD_SIZE")
        monkeypatch.setenv("LOCAL_RANK", str(rank % 2))
        assert device.choose(asked, threads=1, attention="sdpa").device == torch.device("cuda", rank % 2)
        assert gpus.current == rank % 2
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match="3 processes were asked for, but torch sees 2 GPUs here"):
        device.choose(asked, threads=1)


def test_more_threads_than_openmp_grants_are_refused_where_products_would_be_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_THREAD_LIMIT", "1")
    for dtype in ("auto", "bfloat16"):
        with pytest.raises(UserError, match="threads is 2; it must be at most 1, the value of OMP_THREAD_LIMIT"):
            device.choose("cpu", dtype, threads=2)
    threads = torch.get_num_threads()
    assert device.choose("cpu", "float32", threads=threads).threads == threads


def test_one_process_may_name_its_gpu_also_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus(monkeypatch, 4)
    for _ in range(2):
        assert device.choose("cuda:3", threads=1, attention="sdpa").device == torch.device("cuda", 3)
        assert gpus.current == 3
        as_rank(monkeypatch, 0, 1)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("asked", ["auto", "cuda", "cuda:1"])
def test_more_processes_than_gpus_are_refused_by_all_of_them(
    asked: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = Gpus(monkeypatch, 2)
    as_rank(monkeypatch, rank, 3)
    sentence = "3 processes were asked for, but torch sees 2 GPUs here.*start at most 2, or pass --device cpu"
    with pytest.raises(UserError, match=sentence):
        device.choose(asked, threads=1)
    assert gpus.current is None
    assert device.choose("cpu", "float32", threads=1).device.type == "cpu"


def test_the_launcher_refuses_them_before_any_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, 1)
    with pytest.raises(UserError, match="2 processes were asked for, but torch sees 1 GPU here"):
        device.check_processes(2, "auto")
    device.check_processes(2, "cpu")
    device.check_processes(1, "cuda")


def test_bfloat16_is_refused_on_a_gpu_that_has_no_units_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, 1, capability=(7, 5))
    with pytest.raises(UserError, match=r"cuda:0 has no bf16 tensor cores .compute capability 7\.5.*float32"):
        device.choose("cuda", "bfloat16", threads=1)
    assert device.choose("cuda", threads=1, attention="sdpa").dtype == torch.float32
    Gpus(monkeypatch, 1, capability=(8, 0))
    assert device.choose("cuda", "bfloat16", threads=1, attention="sdpa").dtype == torch.bfloat16


MADE_FOR = "Flash Attention 3 is made for this GPU, but cannot be used: "
NONE = MADE_FOR + "none of the hub's builds works (kernels-community/flash-attn3: "


@pytest.mark.parametrize(
    ("capability", "asked", "get_kernel", "says"),
    [
        ((7, 5), "fa3", None, "Flash Attention 3 needs an NVIDIA Hopper GPU, compute capability 9.x (7.5 here); here"),
        ((7, 5), "varlen", None, "torch's varlen_attn needs an NVIDIA GPU, compute capability 8.0 or later (7.5 here)"),
        ((8, 9), "fa3", None, "Flash Attention 3 needs an NVIDIA Hopper GPU, compute capability 9.x (8.9 here); here"),
        ((9, 0), "fa3", None, MADE_FOR + "the package `kernels` cannot be imported"),
        ((9, 0), "fa3", offline, NONE + "ConnectionError: cannot reach huggingface.co; varunneal/"),
        ((9, 0), "fa3", lambda repo, **_: Older(), NONE + "TypeError: another version, whose flash_attn_varlen_func"),
        ((9, 0), "fa3", lambda repo, **_: Falling(), NONE + "RuntimeError: CUDA error: no kernel image is available;"),
    ],
    ids=["old", "old, varlen", "Ada", "no package", "no network", "another version", "raises"],
)
def test_an_attention_that_this_gpu_cannot_have_costs_a_sentence(
    capability: tuple[int, int],
    asked: str,
    get_kernel: Any,
    says: str,
    tokens: TokenFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Gpus(monkeypatch, 1, capability)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    hub(monkeypatch, get_kernel)
    try_out, cpu = attention.try_out, torch.device("cpu")
    monkeypatch.setattr(attention, "try_out", lambda name, device, *rest: try_out(name, cpu, *rest))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "--recipe", "adamw", "--data", str(tokens.path), "--attention", asked]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"speedrun: Attention '{asked}' was asked for, but {says}"), err
    assert list(tmp_path.iterdir()) == []


def test_a_gpu_made_for_flash_attention_without_it_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, 1)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setitem(sys.modules, "kernels", None)
    monkeypatch.setattr(attention, "try_out", lambda *_: None)
    chosen = device.choose("cuda", threads=1)
    *_, line, warning = chosen.lines()
    assert line == "attention: varlen (Flash Attention 3 does not work here)"
    assert warning.startswith("WARNING: Flash Attention 3 is made for this GPU, but cannot be used: the package")
    assert "pip install 'speedrun[gpu]'" in warning
    assert warning.endswith("attention is computed by varlen instead")
    assert len(chosen.lines()) == 1 + len(device.choose("cuda", threads=1, attention="varlen").lines())


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--nproc", "3"], "speedrun: 3 processes were asked for, but torch sees 2 GPUs here"),
        (["--nproc", "3", "--device", "cuda:1"], "speedrun: 3 processes were asked for, but torch sees 2 GPUs here"),
        (["--nproc", "3", "--dry-run"], "speedrun: 3 processes were asked for, but torch sees 2 GPUs here"),
        (["--nproc", "9", "--dry-run", "--device", "cpu"], "speedrun: There are 9 ranks, but a step has only 8 rows"),
        (["--nproc", "9", "--device", "cpu"], "speedrun: There are 9 ranks, but a step has only 8 rows"),
        (["--dtype", "bfloat16"], "speedrun: --dtype bfloat16 was asked for, but GPU number cuda:0 has no bf16"),
        (["--device", "cuda:2"], "speedrun: There is no device 'cuda:2'; torch sees 2, counted from 0."),
    ],
)
def test_on_the_command_line_they_cost_a_sentence(
    flags: list[str],
    says: str,
    tokens: TokenFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Gpus(monkeypatch, 2, capability=(7, 5))
    monkeypatch.chdir(tmp_path)
    commands = [["train"]] if {"--dry-run", "--nproc"} & {*flags} else [["train"], ["race", "--target", "3"]]
    for command in commands:
        assert cli.main([*command, "--recipe", "adamw", "--data", str(tokens.path), *flags]) == 2
        out, err = capsys.readouterr()
        assert (out, err.startswith(says), err.count("\n")) == ("", True, 1), err
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [["train"], ["race", "--target", "3"]])
@pytest.mark.parametrize("flags", [[], ["--nproc", "2"]])
@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("cuda", "speedrun: Device 'cuda' was asked for, but torch "),
        ("cuda:1", "speedrun: Device 'cuda:1' was asked for, but torch "),
        ("cudax", "speedrun: Unknown device 'cudax'; choose"),
    ],
)
def test_without_a_gpu_it_is_not_their_number_that_is_wrong(
    device: str,
    says: str,
    flags: list[str],
    command: list[str],
    tokens: TokenFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    line = [*command, "--recipe", "adamw", "--data", str(tokens.path), "--device", device, *flags]
    assert cli.main(line) == 2
    _, err = capfd.readouterr()
    assert next(text for text in err.splitlines() if text.startswith("speedrun: ")).startswith(says), err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("place", "backend", "bound"),
    [("cuda:1", "auto", True), ("cuda:1", "nccl", True), ("cuda:1", "gloo", False), ("cpu", "auto", False)],
)
def test_the_process_group_is_bound_to_the_gpu_of_its_rank(
    place: str, backend: str, bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL otherwise guesses it, from the rank or from the first tensor."""
    asked: dict[str, Any] = {}

    class Enough(Exception):
        pass

    def init_process_group(*_: object, **options: Any) -> None:
        asked.update(options)
        raise Enough

    as_rank(monkeypatch, 1, 2)
    monkeypatch.setattr(distributed, "meeting_point", lambda *_, **__: torch.distributed.HashStore())
    monkeypatch.setattr(distributed.dist, "init_process_group", init_process_group)
    with pytest.raises(Enough), distributed.joined(torch.device(place), backend=backend):
        pass
    assert asked["device_id"] == (torch.device(place) if bound else None)


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'; it must be a whole number, at least 1"),
        ({"RANK": "0"}, "WORLD_SIZE is ''"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is '2'; it must be a whole number from 0 to 1"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE is '0'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "7"}, "LOCAL_RANK is '7'"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_PORT is ''; it must be a whole number from 1 to 65535"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "99999"}, "MASTER_PORT is '99999'"),
    ],
)
def test_nonsense_in_the_environment_is_named(
    variables: dict[str, str],
    says: str,
    tokens: TokenFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Gpus(monkeypatch, 2)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    place = "cpu" if "MASTER_PORT" in says else "cuda"
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "--recipe", "adamw", "--data", str(tokens.path), "--device", place]) == 2
    _, err = capsys.readouterr()
    assert err.startswith(f"speedrun: The environment variable {says}"), err
    assert list(tmp_path.iterdir()) == []


def test_a_local_rank_without_a_rank_is_somebody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus(monkeypatch, 1)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert device.choose("cuda", threads=1, attention="sdpa").device == torch.device("cuda", 0)
    assert gpus.current == 0
