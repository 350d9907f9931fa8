"""Batches, against a plain walk that handles one token at a time."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from speedrun.data.loader import Batch, Loader, LoaderConfig
from speedrun.data.shards import write_shard
from speedrun.errors import UserError

BOS = 0
VOCAB = 6
Row = tuple[list[int], list[int], list[int]]  # inputs, targets, starts


def order_of(seed: int, epoch: int, what: int, count: int) -> list[int]:
    """The contract of a shuffled order: raw Philox numbers, sorted."""
    raw = np.random.Philox(np.random.SeedSequence([seed, epoch, what])).random_raw(count)
    return sorted(range(count), key=lambda i: int(raw[i]))


@dataclass
class PlainLoader:
    """What a loader means, without any haste."""

    shards: Sequence[Sequence[int]]
    config: LoaderConfig
    seed: int
    epoch: int = 0
    shard: int = 0
    position: int = 0
    news: list[str] = field(default_factory=list)

    @property
    def discard(self) -> bool:
        return self.config.packing == "documents" and self.config.tail == "discard"

    def documents(self) -> list[list[int]]:
        """Of the current shard, in the current epoch's order."""
        index = self.shard
        if self.config.shuffle == "documents":
            index = order_of(self.seed, self.epoch, len(self.shards), len(self.shards))[self.shard]
        documents: list[list[int]] = []
        for token in self.shards[index]:
            if token == BOS or not documents:
                documents.append([])
            documents[-1].append(token)
        if self.discard and documents and documents[0][0] != BOS:
            documents = documents[1:]
        if self.config.shuffle == "documents":
            documents = [documents[i] for i in order_of(self.seed, self.epoch, index, len(documents))]
        return documents

    def row(self, length: int) -> Row | None:
        """The next row of this shard, or None if it has none."""
        if self.discard:
            taken: list[int] = []
            starts: list[int] = []
            documents = self.documents()
            place = self.position
            while len(taken) < length + 1:
                if place == len(documents):
                    return None
                starts.append(len(taken))
                taken += documents[place][: self.config.max_doc_len][: length + 1 - len(taken)]
                place += 1
            self.position = place
            return taken[:-1], taken[1:], [start for start in starts if start < length]
        line = [(number, token) for number, d in enumerate(self.documents()) for token in d]
        part = line[self.position : self.position + length + 1]
        if len(part) < length + 1:
            return None
        self.position += length
        starts = [0]
        for offset in range(1, length):
            if part[offset][0] != part[offset - 1][0] or offset - starts[-1] == self.config.max_doc_len:
                starts.append(offset)
        tokens = [token for _, token in part]
        return tokens[:-1], tokens[1:], starts

    def next(self, rows: int, length: int) -> list[Row]:
        found: list[Row] = []
        barren = 0
        while len(found) < rows:
            row = self.row(length)
            if row is not None:
                found.append(row)
                barren = 0
                continue
            barren += 1
            if barren > 2 * len(self.shards) + 1:
                raise UserError("no row")
            self.shard, self.position = self.shard + 1, 0
            if self.shard == len(self.shards):
                self.epoch, self.shard = self.epoch + 1, 0
        return found

    def state(self) -> dict[str, int]:
        return {"epoch": self.epoch, "shard": self.shard, "position": self.position}


def rows_of(batch: Batch) -> list[Row]:
    starts = batch.doc_starts if batch.doc_starts is not None else [np.zeros(0)] * len(batch.inputs)
    return [
        (i, t, [int(x) for x in s])
        for i, t, s in zip(batch.inputs.tolist(), batch.targets.tolist(), starts, strict=True)
    ]


def same(batch: Batch, rows: list[Row]) -> bool:
    if batch.doc_starts is None:
        rows = [(inputs, targets, []) for inputs, targets, _ in rows]
    return rows_of(batch) == rows


def quiet(line: str) -> None:
    pass


configs = st.builds(
    LoaderConfig,
    packing=st.sampled_from(["stream", "documents"]),
    shuffle=st.sampled_from(["documents", None]),
    tail=st.sampled_from(["split", "discard"]),
    max_doc_len=st.integers(1, 9),
)
token_lists = st.lists(st.lists(st.sampled_from([BOS, *range(VOCAB)]), max_size=60).map(tuple), min_size=1, max_size=3)
sizes = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 12)), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sequence[Sequence[int]]], list[Path]]:
    """Shards for one example of many; each overwrites those before."""
    folder = tmp_path_factory.mktemp("shards")

    def write(shards: Sequence[Sequence[int]]) -> list[Path]:
        paths = [folder / f"train_{number:06d}.bin" for number in range(len(shards))]
        for path, tokens in zip(paths, shards, strict=True):
            write_shard(path, np.array(tokens, dtype=np.uint16))
        return paths

    return write


many = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def open_loader(paths: list[Path], config: LoaderConfig, seed: int = 0, **more: Any) -> Loader:
    return Loader(paths, config, bos=BOS, vocab_size=VOCAB, seed=seed, **({"notice": quiet} | more))


@many
@given(shards=token_lists, config=configs, seed=st.integers(0, 3), calls=sizes)
def test_batches_are_those_of_the_plain_walk(
    written: Callable[..., list[Path]],
    shards: list[tuple[int, ...]],
    config: LoaderConfig,
    seed: int,
    calls: list[tuple[int, int]],
) -> None:
    loader = open_loader(written(shards), config, seed)
    plain = PlainLoader(shards, config, seed)
    for rows, length in calls:
        before = loader.state_dict()
        try:
            expected = plain.next(rows, length)
        except UserError:
            with pytest.raises(UserError, match=f"No row of {length} tokens"):
                loader.next(rows, length)
            assert loader.state_dict() == before
            return
        batch = loader.next(rows, length)
        assert same(batch, expected)
        assert batch.state == loader.state_dict() == plain.state()
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64
        assert batch.inputs.shape == batch.targets.shape == (rows, length)
        assert batch.inputs.is_contiguous()
        assert batch.targets.is_contiguous()


@many
@given(shards=token_lists, config=configs, calls=sizes, cut=st.integers(0, 4), ranks=st.integers(1, 5))
def test_shares_and_restored_states_give_the_same_rows(
    written: Callable[..., list[Path]],
    shards: list[tuple[int, ...]],
    config: LoaderConfig,
    calls: list[tuple[int, int]],
    cut: int,
    ranks: int,
) -> None:
    paths = written(shards)
    whole = open_loader(paths, config)
    try:
        batches = [whole.next(rows, length) for rows, length in calls]
    except UserError:
        return
    for (rows, length), batch in zip(calls, batches, strict=True):
        for begin, end in itertools.pairwise(rows * rank // ranks for rank in range(ranks + 1)):
            share = batch.rows(begin, end)
            assert rows_of(share) == rows_of(batch)[begin:end]
            assert share.inputs.shape == (end - begin, length)
            assert share.state == batch.state
    cut = min(cut, len(calls) - 1)
    resumed = open_loader(paths, config)
    resumed.load_state_dict(batches[cut].state)
    for (rows, length), batch in zip(calls[cut + 1 :], batches[cut + 1 :], strict=True):
        again = resumed.next(rows, length)
        assert rows_of(again) == rows_of(batch)
        assert again.state == batch.state


def test_a_discarding_loader_by_hand(make_shards: Callable[..., list[Path]]) -> None:
    # documents:      (skipped)  A              B        C  D
    paths = make_shards([[9, 9, 0, 1, 2, 3, 4, 5, 0, 6, 7, 0, 0, 8, 8, 8]])
    config = LoaderConfig("documents", None, "discard", max_doc_len=4)
    loader = Loader(paths, config, bos=0, vocab_size=10, seed=0, notice=quiet)
    first = loader.next(1, 5)
    # A is cut to 4 tokens; of B 2 complete the 6 tokens of the row, the second only as a target.
    assert first.inputs.tolist() == [[0, 1, 2, 3, 0]]
    assert first.targets.tolist() == [[1, 2, 3, 0, 6]]
    assert [s.tolist() for s in first.doc_starts or ()] == [[0, 4]]
    assert first.state == {"epoch": 0, "shard": 0, "position": 2}
    # The rest of B is lost; C and D have 5 tokens together, too few for a row of 5, enough for one of 4.
    second = loader.next(1, 4)
    assert second.inputs.tolist() == [[0, 0, 8, 8]]
    assert second.targets.tolist() == [[0, 8, 8, 8]]
    assert [s.tolist() for s in second.doc_starts or ()] == [[0, 1]]
    # Nothing is left, so a new epoch begins.
    third = loader.next(1, 3)
    assert third.inputs.tolist() == [[0, 1, 2]]
    assert third.targets.tolist() == [[1, 2, 3]]
    assert third.state == {"epoch": 1, "shard": 0, "position": 1}


def test_a_document_that_is_only_a_target_has_no_start(make_shards: Callable[..., list[Path]]) -> None:
    paths = make_shards([[0, 1, 2, 0, 3, 3, 3]])
    loader = Loader(paths, LoaderConfig("documents", None, "discard"), bos=0, vocab_size=10, seed=0)
    batch = loader.next(1, 3)
    assert batch.targets.tolist() == [[1, 2, 0]]
    assert [s.tolist() for s in batch.doc_starts or ()] == [[0]]


def test_long_documents_are_split_into_pieces(make_shards: Callable[..., list[Path]]) -> None:
    paths = make_shards([[0, 1, 1, 1, 1, 1, 1, 0, 2, 2, 2, 2, 2]])
    loader = Loader(paths, LoaderConfig("documents", None, "split", 3), bos=0, vocab_size=9, seed=0)
    batch = loader.next(2, 6)
    assert batch.inputs.tolist() == [[0, 1, 1, 1, 1, 1], [1, 0, 2, 2, 2, 2]]
    assert [s.tolist() for s in batch.doc_starts or ()] == [[0, 3], [0, 1, 4]]


def test_one_epoch_uses_every_token_once_and_every_true_successor(
    make_shards: Callable[..., list[Path]],
) -> None:
    documents = [[0, *range(10 * n + 1, 10 * n + 1 + n % 7)] for n in range(40)]
    stream = [token for document in documents for token in document]
    paths = make_shards([stream])
    loader = Loader(paths, LoaderConfig(), bos=0, vocab_size=1000, seed=5, notice=quiet)
    rows, inputs, targets = (len(stream) - 1) // 8, [], []
    for _ in range(rows):
        batch = loader.next(1, 8)
        inputs += batch.inputs[0].tolist()
        targets += batch.targets[0].tolist()
    assert inputs[1:] == targets[:-1]
    walked = [*inputs, targets[-1]]
    seen = [[0, *map(int, part.split())] for part in " ".join(map(str, walked)).replace(" 0", "|")[2:].split("|")]
    assert all(document in documents for document in seen[:-1])
    assert len({tuple(document) for document in seen if len(document) > 1}) >= 30
    assert walked != stream[: len(walked)]  # shuffled, after all
    assert loader.state_dict()["epoch"] == 0


def test_an_epoch_ends_with_one_line_and_another_order(make_shards: Callable[..., list[Path]]) -> None:
    paths = make_shards([[0, *[n] * 5] * 1 for n in range(1, 6)])
    said: list[str] = []
    loader = open_loader(paths, LoaderConfig(), notice=said.append)
    orders = [[int(loader.next(1, 5).inputs[0, 1]) for _ in range(5)] for _ in range(4)]
    assert all(sorted(order) == [1, 2, 3, 4, 5] for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    assert said == [f"all training tokens were used; epoch {epoch} begins" for epoch in (1, 2, 3)]


def test_a_batch_may_take_rows_of_two_shards(make_shards: Callable[..., list[Path]]) -> None:
    paths = make_shards([[0, 1, 1, 1, 1], [0, 2, 2, 2, 2]])
    loader = open_loader(paths, LoaderConfig("documents", None))
    assert loader.next(3, 2).inputs.tolist() == [[0, 1], [1, 1], [0, 2]]


def test_seeds_differ_and_repeat(make_shards: Callable[..., list[Path]]) -> None:
    paths = make_shards([[t for n in range(50) for t in (0, 1 + n % 5)]])
    first, again, other = (open_loader(paths, LoaderConfig(), seed).next(4, 20).inputs for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_inputs_and_targets_are_separate_memory(make_shards: Callable[..., list[Path]]) -> None:
    loader = open_loader(make_shards([[0, 1, 2, 3, 4, 5]]), LoaderConfig(shuffle=None))
    batch = loader.next(1, 4)
    batch.targets.fill_(-1)
    assert batch.inputs.tolist() == [[0, 1, 2, 3]]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("tail", ["split", "discard"])
def test_rows_longer_than_any_shard_are_an_error_not_a_hang(make_shards: Callable[..., list[Path]], tail: str) -> None:
    paths = make_shards([[0, 1, 2, 3], [0, 1], []])
    loader = open_loader(paths, LoaderConfig("documents", tail=tail))  # type: ignore[arg-type]
    loader.next(1, 3)
    with pytest.raises(UserError, match=r"No row of 4 tokens .* takes 5 tokens .* largest of 3 has 4"):
        loader.next(2, 4)
    loader.next(2, 3)


def test_wrong_values_are_told(make_shards: Callable[..., list[Path]], tmp_path: Path) -> None:
    paths = make_shards([[0, 1, 2, 3, 7]])
    with pytest.raises(UserError, match="max_doc_len is 0"):
        LoaderConfig(max_doc_len=0)
    with pytest.raises(UserError, match="packing is 'rows'"):
        LoaderConfig(packing="rows")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no shards"):
        open_loader([], LoaderConfig())
    with pytest.raises(UserError, match="no shard"):
        open_loader([tmp_path / "lost.bin"], LoaderConfig())
    with pytest.raises(UserError, match="token 7 at position 4"):
        open_loader(paths, LoaderConfig()).next(1, 4)
    for state in ({}, {"epoch": 0, "shard": 1, "position": 0}, {"epoch": -1, "shard": 0, "position": 0}):
        with pytest.raises(UserError, match=r"state of a loader|not in these 1 shards"):
            open_loader(paths, LoaderConfig()).load_state_dict(state)


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_shuffled_rows_are_the_rows_of_the_shuffled_documents_in_another_order(
    make_shards: Callable[..., list[Path]], packing: str
) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, VOCAB, size=4_000)
    tokens[np.unique(rng.integers(0, 4_000, size=80))] = 0
    paths = make_shards([tokens.tolist()])
    plain = open_loader(paths, LoaderConfig(packing=packing, shuffle="documents", max_doc_len=7))
    dealt = open_loader(paths, LoaderConfig(packing=packing, shuffle="sequences", max_doc_len=7))
    count = (len(tokens) - 1) // 10

    def everything(loader: Loader) -> list[tuple[object, ...]]:
        batches = [loader.next(4, 10) for _ in range(count // 4)]
        return [
            (
                tuple(b.inputs[i].tolist()),
                tuple(b.targets[i].tolist()),
                b.doc_starts and tuple(b.doc_starts[i].tolist()),
            )
            for b in batches
            for i in range(4)
        ]

    in_line, shuffled = everything(plain), everything(dealt)
    assert shuffled != in_line
    assert len(set(shuffled) - set(in_line)) <= count % 4  # the few rows that the other one did not get to
    neighbours = {(a, b) for a, b in itertools.pairwise(in_line)}
    assert sum((a, b) in neighbours for a, b in itertools.pairwise(shuffled)) < 0.05 * count


def test_shuffled_rows_continue_from_a_saved_place(make_shards: Callable[..., list[Path]]) -> None:
    tokens = [0 if i % 37 == 0 else 1 + i * i % 5 for i in range(500)]
    config = LoaderConfig(shuffle="sequences")
    whole = open_loader(make_shards([tokens, tokens[::-1]]), config)
    rows = [rows_of(whole.next(4, 12)) for _ in range(60)]  # several epochs
    other = open_loader(whole.shards, config)
    for _ in range(25):
        state = other.next(4, 12).state
    resumed = open_loader(whole.shards, config)
    resumed.load_state_dict(state)
    assert [rows_of(resumed.next(4, 12)) for _ in range(35)] == rows[25:]
