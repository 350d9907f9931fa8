"""Batches made ahead of time, and the batches of a validation."""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from speedrun.data.loader import Batch, Loader, LoaderConfig, Prefetcher, validation_batches
from speedrun.data.shards import write_shard
from speedrun.errors import UserError

pytestmark = pytest.mark.timeout(60)  # what is tested here must never hang


@pytest.fixture
def loaders(make_shards: Callable[..., list[Path]]) -> Callable[[], Loader]:
    paths = make_shards([[token for n in range(60) for token in (0, *range(1, 2 + n % 9))]])

    def make() -> Loader:
        return Loader(paths, LoaderConfig("documents"), bos=0, vocab_size=10, seed=0, notice=lambda line: None)

    return make


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("speedrun-prefetch")]


def test_the_same_batches_in_the_same_order(loaders: Callable[[], Loader]) -> None:
    plan = [(2, 8), (1, 16), (3, 5), (2, 8), (4, 4)]
    plain = loaders()
    with closing(Prefetcher(loaders(), plan)) as prefetcher:
        for rows, length in plan:
            expected, batch = plain.next(rows, length), prefetcher.next()
            assert batch.inputs.tolist() == expected.inputs.tolist()
            assert batch.state == expected.state
    assert threads() == []


def test_the_last_consumed_state_continues(loaders: Callable[[], Loader]) -> None:
    with closing(Prefetcher(loaders(), [(2, 8)] * 6)) as prefetcher:
        batches = [prefetcher.next() for _ in range(6)]
    with closing(Prefetcher(loaders(), [(2, 8)] * 6)) as prefetcher:
        for _ in range(3):
            state = prefetcher.next().state
    resumed = loaders()
    resumed.load_state_dict(state)
    assert [resumed.next(2, 8).inputs.tolist() for _ in range(3)] == [b.inputs.tolist() for b in batches[3:]]


def test_an_error_arrives_where_the_batch_would_have(loaders: Callable[[], Loader]) -> None:
    with closing(Prefetcher(loaders(), [(1, 8), (1, 10_000), (1, 8)])) as prefetcher:
        prefetcher.next()
        for _ in range(2):
            with pytest.raises(UserError, match="No row of 10000 tokens"):
                prefetcher.next()


def test_an_error_in_the_plan_arrives_too(loaders: Callable[[], Loader]) -> None:
    def plan() -> Iterator[tuple[int, int]]:
        yield 1, 8
        raise ZeroDivisionError("in the schedule")

    with closing(Prefetcher(loaders(), plan())) as prefetcher:
        prefetcher.next()
        with pytest.raises(ZeroDivisionError, match="in the schedule"):
            prefetcher.next()


def test_the_end_is_an_error_not_a_hang(loaders: Callable[[], Loader]) -> None:
    with closing(Prefetcher(loaders(), [(1, 8)] * 2)) as prefetcher:
        prefetcher.next()
        prefetcher.next()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="All batches of the plan"):
                prefetcher.next()


def test_closing_early_ends_the_thread(loaders: Callable[[], Loader]) -> None:
    prefetcher = Prefetcher(loaders(), ((1, 8) for _ in range(10**9)))
    prefetcher.next()
    prefetcher.close()
    prefetcher.close()
    assert threads() == []
    with pytest.raises(RuntimeError, match="after shutdown"):
        prefetcher.next()


# --- validation ---


def collect(batches: Iterator[Batch], rows: int, length: int) -> list[tuple[int, int]]:
    """(input, target) wherever a target counts; checks that the shape is always the same."""
    pairs = []
    for batch in batches:
        assert batch.inputs.shape == batch.targets.shape == (rows, length)
        inputs, targets = batch.inputs.flatten().tolist(), batch.targets.flatten().tolist()
        pairs += [(i, t) for i, t in zip(inputs, targets, strict=True) if t != -1]
        assert all(i == 0 for i, t in zip(inputs, targets, strict=True) if t == -1)
    return pairs


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    streams=st.lists(st.lists(st.integers(0, 5), max_size=30), min_size=1, max_size=3),
    rows=st.integers(1, 3),
    length=st.integers(1, 9),
    data=st.data(),
)
def test_every_token_after_the_first_is_predicted_once(
    tmp_path: Path, streams: list[list[int]], rows: int, length: int, data: st.DataObject
) -> None:
    paths = [tmp_path / f"val_{number:06d}.bin" for number in range(len(streams))]
    for path, stream in zip(paths, streams, strict=True):
        write_shard(path, np.array(stream, dtype=np.uint16))
    line = [token for stream in streams for token in stream]
    limit = data.draw(st.none() | st.integers(1, max(1, len(line))))
    max_doc_len = data.draw(st.none() | st.integers(1, 10))  # None: separators and row starts alone
    batches = validation_batches(
        paths,
        batch_size=rows,
        seq_len=length,
        bos=0,
        vocab_size=6,
        packing="documents",
        max_doc_len=max_doc_len,
        tokens=limit,
    )
    if len(line) < 2 or (limit or 1) > len(line) - 1:
        with pytest.raises(UserError, match="Validation on"):
            list(batches)
        return
    kept = list(batches)
    wanted = len(line) - 1 if limit is None else limit
    assert collect(iter(kept), rows, length) == list(itertools.pairwise(line))[:wanted]
    for batch in kept:
        assert batch.doc_starts is not None
        rows = batch.inputs.tolist(), batch.targets.tolist(), batch.doc_starts
        for inputs, targets, starts in zip(*rows, strict=True):
            expected = [0]
            for offset in range(1, length):
                padded = targets[offset] == -1
                begins = targets[offset - 1] != -1 if padded else inputs[offset] == 0
                if begins or offset - expected[-1] == max_doc_len:
                    expected.append(offset)
            assert starts.tolist() == expected


def test_stream_packing_has_no_starts(tmp_path: Path) -> None:
    write_shard(tmp_path / "val_000000.bin", np.array([0, 1, 2, 0, 3]))
    (batch,) = validation_batches(
        [tmp_path / "val_000000.bin"], batch_size=2, seq_len=3, bos=0, vocab_size=6, packing="stream", max_doc_len=9
    )
    assert batch.doc_starts is None
    assert batch.inputs.tolist() == [[0, 1, 2], [0, 0, 0]]
    assert batch.targets.tolist() == [[1, 2, 0], [3, -1, -1]]


def test_a_validation_longer_than_the_split_is_told(tmp_path: Path) -> None:
    write_shard(tmp_path / "val_000000.bin", np.array([0, 1, 2]))
    with pytest.raises(UserError, match="on 3 predicted tokens is not possible: the split has 2"):
        next(
            validation_batches(
                [tmp_path / "val_000000.bin"],
                batch_size=1,
                seq_len=4,
                bos=0,
                vocab_size=6,
                packing="stream",
                max_doc_len=9,
                tokens=3,
            )
        )
