"""A checkpoint is whole or not there: damage, kills and full disks never give a wrong load."""

import copy
import errno
import io
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from speedrun.errors import OtherVersion, UserError
from speedrun.files import sha256_file
from speedrun.train import checkpoint

FILES = (checkpoint.TENSORS, checkpoint.STATE, checkpoint.MANIFEST)


def content(step: int, size: int = 100) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and state that tell which step they belong to."""
    return {"weight": torch.full((size,), float(step)), "count": torch.tensor(step)}, {"mark": step, "lr": 0.1 * step}


def save(folder: Path, step: int, **options: Any) -> Path:
    return checkpoint.save(folder, step, *content(step), **options)


def belongs(found: checkpoint.Checkpoint | None) -> int:
    """The step of a checkpoint, having checked that all of it is of that step."""
    assert found is not None
    tensors, state = content(found.step, size=found.tensors["weight"].numel())
    assert found.state == state
    assert found.tensors.keys() == tensors.keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in tensors.items())
    return found.step


def flip(path: Path, at: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(data)


def no_notice(line: str) -> None:
    raise AssertionError(f"nothing should have been wrong: {line}")


# --- round trip -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int16,
                                   torch.int64, torch.uint8, torch.bool])  # fmt: skip
def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    given = {f"d{len(s)}": (100 * torch.randn(s)).to(dtype) for s in [(), (3,), (2, 5), (0, 4), (2, 1, 3)]}
    found = checkpoint.load(checkpoint.save(tmp_path, 7, given, {}))
    assert found.tensors.keys() == given.keys()
    for name, tensor in given.items():
        assert found.tensors[name].dtype == dtype
        assert torch.equal(found.tensors[name], tensor)


def test_layout_and_state(tmp_path: Path) -> None:
    state = {"a": 0.1, "b": [1, None, True], "c": {"d": 2.5e300, "é": "ü"}, "tuple": (1, 2)}
    path = checkpoint.save(tmp_path / "checkpoints", 500, {}, state)
    assert path == tmp_path / "checkpoints" / "step-000500"
    assert sorted(p.name for p in path.iterdir()) == sorted(FILES)
    assert (path.parent / "latest").read_text() == "step-000500\n"
    found = checkpoint.load(path.parent / "latest")
    assert found.step == 500
    assert found.state == {**state, "tuple": [1, 2]}
    assert found.path == path


def test_loaded_tensors_are_owned_and_aligned(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, {"odd": torch.arange(3, dtype=torch.uint8), "x": torch.randn(33)}, {})
    found = checkpoint.load(path)
    shutil.rmtree(path)
    for tensor in found.tensors.values():
        assert tensor.data_ptr() % 64 == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        tensor.add_(1)


def test_aliases_views_and_odd_strides(tmp_path: Path) -> None:
    base = torch.randn(6, 4)
    given = {
        "base": base,
        "same": base,
        "parameter": nn.Parameter(base),
        "top": base[:3],
        "bottom": base[3:],
        "overlap": base[2:5],
        "transposed": base.T,
        "column": base[:, 1],
        "expanded": base[0].expand(5, 4),
    }
    path = checkpoint.save(tmp_path, 1, given, {})
    found = checkpoint.load(path).tensors
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        assert torch.equal(found[name], tensor)
    found["base"].zero_()
    assert torch.equal(found["same"], base)
    assert (path / checkpoint.TENSORS).stat().st_size < 2500  # "same" and "parameter" are not written again


@pytest.mark.parametrize("state", [{1: 2}, {"a": {"b": {3: 4}}}, {"a": torch.zeros(2)}, {"a": np.int64(3)}])
def test_state_that_json_would_change_is_refused(tmp_path: Path, state: dict[Any, Any]) -> None:
    with pytest.raises(TypeError):
        checkpoint.save(tmp_path, 1, {}, state)
    assert list(tmp_path.iterdir()) == []


# --- which ones are kept --------------------------------------------------------------------------


def steps(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name != "latest")


def test_old_ones_go_and_keep_counts(tmp_path: Path) -> None:
    for step in (0, 10, 20, 1_000_000):
        save(tmp_path, step, keep=2)
    assert steps(tmp_path) == ["step-000020", "step-1000000"]
    save(tmp_path, 1_000_001, keep=1)
    assert steps(tmp_path) == ["step-1000001"]
    with pytest.raises(UserError, match="at least 1"):
        save(tmp_path, 30, keep=0)


def test_later_ones_are_another_continuation(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step, keep=3)
    save(tmp_path, 15, keep=1)
    assert steps(tmp_path) == ["step-000015", "step-000020", "step-000030"]
    checkpoint.drop_later(tmp_path, 15)
    assert steps(tmp_path) == ["step-000015"]
    assert belongs(checkpoint.newest_good(tmp_path, no_notice)) == 15


def test_a_failed_deletion_is_a_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    save(tmp_path, 1, keep=1)
    notices: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "rmtree", refuse)
        save(tmp_path, 2, keep=1, notice=notices.append)
    assert len(notices) == 1
    assert "step-000001 could not be deleted (Permission denied)" in notices[0]
    assert belongs(checkpoint.newest_good(tmp_path, no_notice)) == 2
    save(tmp_path, 3, keep=1)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-000003"]  # what was left is swept


# --- the same step again --------------------------------------------------------------------------


def test_same_step_is_replaced(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 5, {"x": torch.zeros(3)}, {"try": 1})
    checkpoint.save(tmp_path, 5, {"x": torch.ones(3)}, {"try": 2})
    assert steps(tmp_path) == ["step-000005"]
    found = checkpoint.newest_good(tmp_path, no_notice)
    assert found is not None
    assert found.state == {"try": 2}
    assert torch.equal(found.tensors["x"], torch.ones(3))


def test_replacing_has_no_moment_without_a_good_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after every rename and deletion there is a complete checkpoint of the step."""
    save(tmp_path, 5)
    seen = 0

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += 1
            assert belongs(checkpoint.newest_good(tmp_path, no_notice)) == 5
            result = original(*args, **kwargs)
            assert belongs(checkpoint.newest_good(tmp_path, no_notice)) == 5
            return result

        return wrapper

    for name in ("replace", "unlink", "rmdir", "mkdir"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    save(tmp_path, 5)
    assert seen > 5
    monkeypatch.undo()
    assert steps(tmp_path) == ["step-000005"]


def test_a_checkpoint_set_aside_by_a_killed_process_is_found_and_then_cleared(tmp_path: Path) -> None:
    path = save(tmp_path, 5)
    path.rename(path.with_name("step-000005.replaced-1"))
    assert belongs(checkpoint.newest_good(tmp_path, no_notice)) == 5
    save(tmp_path, 5)
    assert steps(tmp_path) == ["step-000005"]


def test_when_the_last_rename_fails_the_old_one_gets_its_name_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, 5)
    replace = os.replace

    def refuse(source: Any, target: Any) -> None:
        if Path(target) == path and ".tmp-" in str(source):
            raise OSError(errno.EIO, "Input/output error")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(UserError, match="Input/output"):
            save(tmp_path, 5)
    assert steps(tmp_path) == ["step-000005"]
    assert belongs(checkpoint.load(tmp_path / "latest")) == 5


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_is_told_and_the_older_one_is_used(tmp_path: Path, name: str) -> None:
    save(tmp_path, 10)
    newest = save(tmp_path, 20)
    flip(newest / name)
    with pytest.raises(UserError, match=name):
        checkpoint.load(newest)
    notices: list[str] = []
    assert belongs(checkpoint.newest_good(tmp_path, notices.append)) == 10
    assert len(notices) == 1
    assert str(newest) in notices[0]
    assert name in notices[0]
    assert "falling back to step 10" in notices[0]


def test_every_single_byte_of_the_tensors_counts(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, {"x": torch.arange(4)}, {})
    for at in range((path / checkpoint.TENSORS).stat().st_size):
        flip(path / checkpoint.TENSORS, at)
        with pytest.raises(UserError, match="sha256"):
            checkpoint.load(path)
        flip(path / checkpoint.TENSORS, at)
    checkpoint.load(path)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda file: file.unlink(), "is missing"),
        (lambda file: (file.unlink(), file.mkdir()), "is a folder|bytes|cannot be read"),
        (lambda file: file.write_bytes(file.read_bytes()[:-9]), "bytes|damaged"),
        (lambda file: file.write_bytes(b""), "bytes|damaged"),
    ],
    ids=["missing", "folder", "short", "empty"],
)
def test_each_kind_of_damage_has_its_sentence(
    tmp_path: Path, name: str, damage: Callable[[Path], Any], says: str
) -> None:
    path = save(tmp_path, 10)
    damage(path / name)
    with pytest.raises(UserError, match=f"{name}.* ({says})"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 2}, "manifest.json has format 2, but this version of speedrun reads formats up to 1"),
        ({"format": True}, "format"),
        ({"step": 11}, "step 11, not of its folder's"),
        ({"step": None}, "damaged at step: Expected `int`, got `null`"),
        ({"files": {}}, "does not list"),
        ({"files": {"../../etc/passwd": {"bytes": 1, "sha256": ""}}}, "does not list"),
        (
            {"files": {checkpoint.TENSORS: 1, checkpoint.STATE: 2}},
            r"damaged at files\[...\]: Expected `object`, got `int`",
        ),
        ({"wings": 2}, "has the field 'wings', which this version of speedrun does not know"),
    ],
)
def test_manifests_that_lie(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    manifest = save(tmp_path, 10) / checkpoint.MANIFEST
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **change}))
    with pytest.raises(UserError, match=says):
        checkpoint.load(manifest.parent)


def test_a_manifest_of_another_step_is_found_out_under_any_name(tmp_path: Path) -> None:
    path = save(tmp_path, 10).rename(tmp_path / "a copy")
    assert belongs(checkpoint.load(path)) == 10
    manifest = json.loads((path / checkpoint.MANIFEST).read_text())
    (path / checkpoint.MANIFEST).write_text(json.dumps({**manifest, "step": 11}))
    with pytest.raises(UserError, match=r"state\.json is of step 10, manifest\.json of step 11"):
        checkpoint.load(path)


def test_a_pickle_in_disguise_is_never_executed(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    torch.save({"x": torch.ones(3)}, path / checkpoint.TENSORS)
    manifest = json.loads((path / checkpoint.MANIFEST).read_text())
    size, digest = (path / checkpoint.TENSORS).stat().st_size, sha256_file(path / checkpoint.TENSORS)
    manifest["files"][checkpoint.TENSORS] = {"bytes": size, "sha256": digest}
    (path / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="no safetensors file"):
        checkpoint.load(path)


def test_no_checkpoints_is_none_but_all_damaged_is_an_error(tmp_path: Path) -> None:
    assert checkpoint.newest_good(tmp_path / "nowhere", no_notice) is None
    (tmp_path / ".step-000030.tmp-1").mkdir()
    (tmp_path / "notes").mkdir()
    assert checkpoint.newest_good(tmp_path, no_notice) is None
    for step in (10, 20):
        flip(save(tmp_path, step) / checkpoint.STATE)
    notices: list[str] = []
    with pytest.raises(UserError, match=r"None of the checkpoints .*step-000010: state\.json"):
        checkpoint.newest_good(tmp_path, notices.append)
    assert len(notices) == 1


def test_a_person_pointing_at_the_wrong_place(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no checkpoint at"):
        checkpoint.load(tmp_path / "step-000001")
    (tmp_path / "latest").write_text("../../elsewhere")
    with pytest.raises(UserError, match="names no checkpoint"):
        checkpoint.load(tmp_path / "latest")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="in the way"):
        save(tmp_path / "file" / "checkpoints", 1)
    with pytest.raises(UserError, match="cannot be listed"):
        checkpoint.newest_good(tmp_path / "file", no_notice)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    save(tmp_path / "c", 1)
    (tmp_path / "c").chmod(0o500)
    try:
        with pytest.raises(UserError, match="permission denied"):
            save(tmp_path / "c", 2)
        assert belongs(checkpoint.newest_good(tmp_path / "c", no_notice)) == 1
    finally:
        (tmp_path / "c").chmod(0o700)


def mutate(data: bytes, rng: random.Random) -> bytes:
    kind = rng.randrange(5)
    if kind == 0:  # a few flipped bits
        changed = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        return bytes(changed)
    if kind == 1:
        return data[: rng.randrange(len(data))]
    if kind == 2:  # bytes put in or left out
        at, end = sorted(rng.choices(range(len(data)), k=2))
        return data[:at] + rng.choice([b"", b"\0" * 8, b"[" * 9, b'"', b"\xff\xfe", b"9" * 5000]) + data[end:]
    document = json.loads(data)
    holders: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, dict | list) and node:
            holders.append(node)
            for item in node.values() if isinstance(node, dict) else node:
                visit(item)

    visit(document)
    holder = rng.choice(holders)
    key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
    if kind == 3:
        others = [None, True, False, 0, 1, -1, 2**70, 0.5, float("nan"), "", "0" * 64, [], {}, [{}], {"a": 1}]
        holder[key] = rng.choice(others)
    else:
        del holder[key]
    return json.dumps(document).encode()


@pytest.mark.parametrize("name", [checkpoint.MANIFEST, checkpoint.STATE])
def test_fuzz_never_a_wrong_load(tmp_path: Path, name: str) -> None:
    rng = random.Random(name)
    save(tmp_path, 10)
    newest = save(tmp_path, 20)
    original = (newest / name).read_bytes()
    outcomes, refused = {10: 0, 20: 0}, 0
    for _ in range(1000):
        (newest / name).write_bytes(mutate(original, rng))
        notices: list[str] = []
        try:
            step = belongs(checkpoint.newest_good(tmp_path, notices.append))
        except OtherVersion:  # it looks like a newer version's, which is not passed over: a person must decide
            refused += 1
            continue
        assert len(notices) == (step == 10)
        outcomes[step] += 1
    assert outcomes[10] + refused > 900  # a few mutations change nothing that matters
    (newest / name).write_bytes(original)
    assert belongs(checkpoint.load(newest)) == 20


@pytest.mark.parametrize("change", [{"format": 7}, {"wings": 2}])
def test_a_checkpoint_of_a_newer_version_is_not_passed_over(tmp_path: Path, change: dict[str, Any]) -> None:
    save(tmp_path, 10)
    manifest = save(tmp_path, 20) / checkpoint.MANIFEST
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **change}))
    with pytest.raises(OtherVersion, match=r"step-000020/manifest.json has"):
        checkpoint.newest_good(tmp_path, notice=print)
    assert steps(tmp_path) == ["step-000010", "step-000020"]


def test_deeply_nested_json_is_damage_not_a_crash(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    (path / checkpoint.MANIFEST).write_bytes(b'{"a":' * 100_000)
    with pytest.raises(UserError, match="nested too deeply"):
        checkpoint.load(path)


# --- kill -9 and full disks -----------------------------------------------------------------------

KILLS = """
import os, random, shutil, signal, sys, time
from pathlib import Path
import torch
from test_checkpoint import belongs, content
from speedrun.train import checkpoint

torch.set_num_threads(1)  # no thread pool, so that forking is safe
folder, rng, first, told = Path(sys.argv[1]), random.Random(1), 1, 0
begin = time.perf_counter()
checkpoint.save(folder / "trial", 1, *content(1, size=50_000))
shutil.rmtree(folder / "trial")
patience = 6 * (time.perf_counter() - begin)
for attempt in range(int(sys.argv[2])):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        for step in range(first, first + 10_000):
            for _ in range(2):  # the second time it replaces the first
                checkpoint.save(folder, step, *content(step, size=50_000), keep=2)
                os.write(writer, step.to_bytes(4, "little"))
        os._exit(1)
    os.close(writer)
    time.sleep(rng.uniform(0.0, patience))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    saved = os.read(reader, 1 << 20)
    os.close(reader)
    last = int.from_bytes(saved[-4:], "little") if saved else first - 1
    notices = []
    found = checkpoint.newest_good(folder, notices.append)
    assert not notices, notices
    if last:
        assert belongs(found) in (last, last + 1), (found.step, last)
    if found is not None:
        first = belongs(found) + 1
        told += bool(saved)
assert told > 0, "nothing was ever saved between kills"
for step in (first, first + 1):  # what a kill left of the step before goes with that step
    checkpoint.save(folder, step, *content(step), keep=2)
left = sorted(os.listdir(folder))
assert len(left) == 3 and not any(name.startswith(".") for name in left), left
print("steps", first)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and kill")
def test_kill_9_at_random_moments(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path), "15"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


class FullDisk:
    """Lets `left` calls that need space succeed; the next one finds the disk full."""

    def __init__(self, left: int, patch: pytest.MonkeyPatch) -> None:
        self.left = left
        self.struck = False
        for owner, name in ((os, "mkdir"), (os, "replace"), (os, "fsync"), (tempfile, "mkstemp")):
            patch.setattr(owner, name, self.limited(getattr(owner, name)))
        save_file, fdopen = checkpoint.save_file, os.fdopen

        def torn_save_file(tensors: Any, path: Path, **options: Any) -> None:
            if self.full():
                path.write_bytes(b"half of it")
                raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
            save_file(tensors, path, **options)

        class TornFile(io.FileIO):
            def write(self, data: Any) -> int:
                super().write(bytes(data)[: len(data) // 2])
                raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(checkpoint, "save_file", torn_save_file)
        patch.setattr(os, "fdopen", lambda fd, mode: TornFile(fd, mode) if self.full() else fdopen(fd, mode))

    def full(self) -> bool:
        if self.struck:
            return False  # one failure at a time: what cleans up after it may work
        self.left -= 1
        self.struck = self.left < 0
        return self.struck

    def limited(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            harmless = original.__name__ == "mkdir" and os.path.isdir(args[0])  # it is there already
            if not harmless and self.full():
                raise OSError(errno.ENOSPC, "No space left on device")
            return original(*args, **kwargs)

        return call


@pytest.mark.parametrize("step", [20, 10], ids=["next step", "same step"])
def test_disk_full_at_each_call_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    refused = 0
    for calls in itertools.count():
        folder = tmp_path / str(calls)
        save(folder, 10)
        notices: list[str] = []
        with monkeypatch.context() as patch:
            disk = FullDisk(calls, patch)
            try:
                save(folder, step, keep=1, notice=notices.append)
            except UserError as e:
                refused += 1
                notices.append(str(e))
        assert any("disk is full" in n or "No space left" in n for n in notices) == disk.struck
        assert belongs(checkpoint.newest_good(folder, no_notice)) in (10, step)
        save(folder, step, keep=1)
        assert sorted(os.listdir(folder)) == ["latest", f"step-{step:06d}"]
        if not disk.struck:
            break
    assert refused >= 15


REALLY_FULL = """
import os, sys
from pathlib import Path
from test_checkpoint import belongs, content, no_notice
from speedrun.errors import UserError
from speedrun.train import checkpoint

folder, filler = Path(sys.argv[1]) / "checkpoints", Path(sys.argv[1]) / "filler"
checkpoint.save(folder, 1, *content(1, size=10_000))
refused = saved = 0
for spare in range(0, 24):
    with open(filler, "wb", buffering=0) as f:
        try:
            while True:
                f.write(bytes(4096))
        except OSError:
            f.truncate(max(0, f.tell() - 4096 * spare))
    before = belongs(checkpoint.newest_good(folder, no_notice))
    try:
        checkpoint.save(folder, before + 1, *content(before + 1, size=10_000), keep=1)
        saved += 1
    except UserError as e:
        assert "disk is full" in str(e), e
        refused += 1
    assert belongs(checkpoint.newest_good(folder, no_notice)) in (before, before + 1)
    filler.unlink()
assert refused >= 5 and saved >= 5, (refused, saved)
"""


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """On a memory disk of 1 MiB, seen by this one process, with 0, 4, 8, ... KiB left."""
    mount = f'mount -t tmpfs -o size=1m none "{tmp_path}"'
    if sys.platform != "linux" or shutil.which("unshare") is None:
        pytest.skip("needs a private mount")
    if subprocess.run(["unshare", "--mount", "sh", "-c", mount], capture_output=True).returncode != 0:
        pytest.skip("may not mount")
    script = f'{mount} && exec "$0" -c "$1" "$2"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, sys.executable, REALLY_FULL, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


# --- optimizers -----------------------------------------------------------------------------------


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 13), nn.GELU(), nn.LayerNorm(13), nn.Linear(13, 5))


def names_of(module: nn.Module) -> dict[nn.Parameter, str]:
    return {p: name for name, p in module.named_parameters()}


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    losses = []
    for step in steps:
        x = torch.randn(11, 7, generator=torch.Generator().manual_seed(step))
        loss = module(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return losses


def through_a_file(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> checkpoint.Checkpoint:
    tensors, state = checkpoint.flatten_optimizer(optimizer, names_of(module))
    tensors |= {f"model.{name}": p for name, p in module.named_parameters()}
    return checkpoint.load(checkpoint.save(folder, 5, tensors, {"optimizer": state}))


def restore(saved: checkpoint.Checkpoint, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(saved.tensors[f"model.{name}"])
    checkpoint.restore_optimizer(optimizer, names_of(module), saved.tensors, saved.state["optimizer"])


Maker = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
MAKERS: dict[str, Maker] = {
    "fused": lambda p: torch.optim.AdamW(p, lr=0.02, betas=(0.8, 0.95), fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.02, amsgrad=True, foreach=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.02), foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.02),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.02),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_optimizer_continues_to_the_last_bit(tmp_path: Path, make: Maker) -> None:
    straight = model()
    optimizer = make(list(straight.parameters()))
    train(straight, optimizer, range(5))
    saved = through_a_file(tmp_path, straight, optimizer)
    expected = train(straight, optimizer, range(5, 10))

    resumed = model(seed=1)
    optimizer = make(list(resumed.parameters()))
    restore(saved, resumed, optimizer)
    for per_parameter in optimizer.state.values():
        for tensor in per_parameter.values():
            if isinstance(tensor, Tensor):
                assert tensor.data_ptr() % 64 == 0
    assert all(torch.equal(a, b) for a, b in zip(expected, train(resumed, optimizer, range(5, 10)), strict=True))
    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def two_groups(module: nn.Module, turned: bool = False) -> torch.optim.Optimizer:
    """Matrices and vectors with different settings, in either order."""
    groups = [
        {"params": [p for p in module.parameters() if p.dim() == 2], "lr": 0.02, "weight_decay": 0.1},
        {"params": [p for p in module.parameters() if p.dim() < 2], "lr": 0.05, "betas": (0.7, 0.9)},
    ]
    if turned:
        groups = [{**g, "params": g["params"][::-1]} for g in groups[::-1]]
    return torch.optim.AdamW(groups, lr=1.0, fused=True)


def test_groups_and_parameters_in_another_order(tmp_path: Path) -> None:
    straight = model()
    optimizer = two_groups(straight)
    train(straight, optimizer, range(5))
    for group in optimizer.param_groups:
        group["lr"] *= 0.5  # as a schedule would
        group["initial_lr"] = 1.0
    saved = through_a_file(tmp_path, straight, optimizer)
    expected = train(straight, optimizer, range(5, 10))

    resumed = model(seed=1)
    optimizer = two_groups(resumed, turned=True)
    restore(saved, resumed, optimizer)
    vectors, matrices = optimizer.param_groups
    assert (vectors["lr"], vectors["betas"], matrices["lr"]) == (0.025, (0.7, 0.9), 0.01)
    assert isinstance(vectors["betas"], tuple)
    assert matrices["initial_lr"] == 1.0
    assert all(torch.equal(a, b) for a, b in zip(expected, train(resumed, optimizer, range(5, 10)), strict=True))


def test_a_group_split_in_two_keeps_its_settings_but_two_cannot_become_one(tmp_path: Path) -> None:
    module = model()
    optimizer = two_groups(module)
    train(module, optimizer, range(2))
    saved = through_a_file(tmp_path, module, optimizer)
    each = torch.optim.AdamW([{"params": [p]} for p in module.parameters()], lr=9.0, fused=True)
    restore(saved, module, each)
    assert [g["lr"] for g in each.param_groups] == [0.02 if p.dim() == 2 else 0.05 for p in module.parameters()]
    with pytest.raises(UserError, match="different settings"):
        restore(saved, module, torch.optim.AdamW(module.parameters(), fused=True))


def test_before_the_first_step(tmp_path: Path) -> None:
    fresh = model()
    optimizer = MAKERS["fused"](list(fresh.parameters()))
    saved = through_a_file(tmp_path, fresh, optimizer)
    expected = train(fresh, optimizer, range(3))

    used = model(seed=1)
    optimizer = MAKERS["fused"](list(used.parameters()))
    train(used, optimizer, range(4))  # its state must go again
    restore(saved, used, optimizer)
    assert not optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(expected, train(used, optimizer, range(3)), strict=True))


def test_state_that_exists_is_overwritten_in_place(tmp_path: Path) -> None:
    """State may be a view into a larger buffer, which must see the restored values."""
    module = model()
    optimizer = MAKERS["fused"](list(module.parameters()))
    train(module, optimizer, range(2))
    saved = through_a_file(tmp_path, module, optimizer)
    first = next(module.parameters())
    buffer = torch.zeros(2, *first.shape)
    optimizer.state[first]["exp_avg"] = buffer[1]
    restore(saved, module, optimizer)
    assert torch.equal(buffer[1], saved.tensors["optim.0.weight.exp_avg"])
    assert not buffer[0].any()


class Odd(torch.optim.Optimizer):
    """State of other dtypes and kinds than torch's own optimizers have."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "note": None})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {
                    "low": torch.randn_like(p).bfloat16(),
                    "remainder": torch.full(p.shape, -5, dtype=torch.int16),
                    "count": 3,
                    "nothing": None,
                    "rows": torch.arange(p.shape[0]),
                    "scale": torch.tensor(0.1, dtype=torch.float64),
                }


def test_dtypes_and_plain_values_survive(tmp_path: Path) -> None:
    module = nn.Linear(3, 4)
    module.weight = nn.Parameter(module.weight.detach().T.contiguous().T)  # state follows the strides
    optimizer = Odd(module.parameters())
    optimizer.step()
    before = copy.deepcopy({names_of(module)[p]: s for p, s in optimizer.state.items()})
    saved = through_a_file(tmp_path, module, optimizer)
    again = Odd(module.parameters())
    restore(saved, module, again)
    for p, name in names_of(module).items():
        assert again.state[p].keys() == before[name].keys()
        for key, value in before[name].items():
            found = again.state[p][key]
            if isinstance(value, Tensor):
                assert found.dtype == value.dtype
                assert torch.equal(found, value)
            else:
                assert found == value
        assert again.state[p]["low"].stride() == p.stride()


def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    module = model()
    optimizer = MAKERS["fused"](list(module.parameters()))
    train(module, optimizer, range(2))
    names = names_of(module)
    tensors, state = checkpoint.flatten_optimizer(optimizer, names)
    tensors = {name: t.clone() for name, t in tensors.items()}
    train(module, optimizer, range(2, 4))
    before = copy.deepcopy(optimizer.state_dict())

    def refused(says: str, tensors: dict[str, Tensor], state: dict[str, Any], names: Any = names) -> None:
        with pytest.raises(UserError, match=says):
            checkpoint.restore_optimizer(optimizer, names, tensors, state)
        now = optimizer.state_dict()
        assert now["param_groups"] == before["param_groups"]
        for index, per_parameter in before["state"].items():
            for key, value in per_parameter.items():
                assert torch.equal(now["state"][index][key], value)

    fewer = copy.deepcopy(state)
    del fewer["state"]["3.bias"]
    refused("no optimizer state for 3.bias", tensors, fewer)
    more = copy.deepcopy(state)
    more["state"]["9.bias"] = more["state"]["3.bias"]
    refused("state for 9.bias, which the model lacks", tensors, more)
    shape = copy.deepcopy(state)
    shape["state"]["3.bias"]["shape"] = [6]
    refused(r"3.bias has shape \[5\], in the checkpoint \[6\]", tensors, shape)
    name = "optim.3.bias.exp_avg"
    refused(f"lacks the tensor '{name}'", {n: t for n, t in tensors.items() if n != name}, state)
    refused("exp_avg.*of 3.bias is torch.float32", {**tensors, name: tensors[name].double()}, state)
    refused(r"exp_avg.*of 3.bias is .* \[6\]", {**tensors, name: torch.zeros(6)}, state)
    checkpoint.restore_optimizer(optimizer, names, tensors, state)


def test_a_parameter_without_a_name_and_state_of_nobody_are_bugs() -> None:
    module = model()
    optimizer = MAKERS["fused"](list(module.parameters()))
    with pytest.raises(ValueError, match="no name"):
        checkpoint.flatten_optimizer(optimizer, {})
    optimizer.state["global"] = {"x": 1}  # type: ignore[index]
    with pytest.raises(TypeError, match="in none of its groups"):
        checkpoint.flatten_optimizer(optimizer, names_of(module))


# --- random generators ----------------------------------------------------------------------------


def draw() -> tuple[Any, ...]:
    return (
        torch.rand(3).tolist(),
        [random.random(), random.gauss(0, 1), random.getrandbits(99)],
        [*np.random.rand(2), *np.random.randn(3)],
    )


def test_random_generators_go_on_where_they_were(tmp_path: Path) -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    for warm_up in range(2):  # after an odd number of normal draws both gauss caches are full
        draw()
        path = checkpoint.save(tmp_path, warm_up, checkpoint.rng_state(), {})
        expected = draw()
        draw()
        checkpoint.set_rng_state(checkpoint.load(path).tensors)
        assert draw() == expected


def test_a_random_state_that_does_not_fit() -> None:
    state = checkpoint.rng_state()
    with pytest.raises(UserError, match=r"lacks the tensor 'rng\.numpy'"):
        checkpoint.set_rng_state({name: t for name, t in state.items() if name != "rng.numpy"})
    with pytest.raises(UserError, match="does not fit this Python"):
        checkpoint.set_rng_state({**state, "rng.python": state["rng.python"][:100]})
    checkpoint.set_rng_state(state)
