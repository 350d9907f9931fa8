"""The loop on a tiny model: what it promises about results, memory, interruptions and the clock."""

import copy
import dataclasses
import math
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._inductor.exc import InductorError

from speedrun.data.loader import Batch, Loader
from speedrun.data.shards import TokenFolder, write_shard
from speedrun.errors import UserError
from speedrun.model import flash
from speedrun.model.gpt import Documents
from speedrun.optim.finite import NonFiniteGradient
from speedrun.training import checkpoint
from speedrun.training.device import choose
from speedrun.training.loop import Loop
from speedrun.training.runlog import read_metrics, read_result
from speedrun.training.schedule import Stage
from speedrun.training.step import Trainer, share
from speedrun.training.validate import validate, validation_batches
from speedrun.training.warmup import warm_up
from tests.conftest import make_token_folder
from tests.model.kernels import Kernels
from tests.training import tiny
from tests.training.tiny import tiny_trainer


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def losses(folder: Path) -> list[tuple[str, int, float]]:
    return [(m["kind"], m["step"], m["loss"]) for m in read_metrics(folder) if m["kind"] in ("train", "val")]


def batch_for(trainer: Trainer) -> Batch:
    loader = Loader(trainer.job.tokens.shards("train"), trainer.recipe.loader, bos=0, vocab_size=4096, seed=0)
    return loader.next(trainer.recipe.schedule.batch_size, trainer.recipe.schedule.seq_len)


def test_a_run_learns_and_leaves_its_numbers(tokens: TokenFolder, tmp_path: Path) -> None:
    result = Loop(tiny_trainer(tokens, tmp_path / "run", {"schedule.steps": 40})).run()
    measured = losses(tmp_path / "run")
    first, last = measured[0][2], measured[-1][2]
    assert first == pytest.approx(math.log(4096), abs=0.01)  # a zero head predicts nothing
    assert last < 5.0 < first
    assert result.status == "ok"
    assert result.timed is True
    assert result.val_loss == last
    assert result.tokens == 40 * 4 * 32
    validated = sum(m["val_seconds"] for m in read_metrics(tmp_path / "run", "val"))
    assert result.wall_seconds >= result.train_time + validated > result.train_time
    assert result.cpu_seconds > 0
    assert read_result(tmp_path / "run").val_loss == last
    assert "step:40/40 val_loss:" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.parametrize(("cores", "told"), [(0.75, True), (0.1, False), (None, False)])
def test_a_run_tells_and_keeps_how_busy_others_were(
    cores: float | None, told: bool, tokens: TokenFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speedrun.training.load.Load.others", lambda _: cores)
    Loop(tiny_trainer(tokens, tmp_path / "run")).run()
    assert read_result(tmp_path / "run").machine_load == cores
    said = (tmp_path / "run" / "log.txt").read_text()
    assert ("busy machine: other processes keep 0.8 of" in said) == told


def test_the_same_seed_gives_the_same_bits_and_another_does_not(tokens: TokenFolder, tmp_path: Path) -> None:
    runs = [tiny_trainer(tokens, tmp_path / str(i), seed=seed) for i, seed in enumerate((3, 3, 4))]
    for trainer in runs:
        Loop(trainer).run()
    assert losses(tmp_path / "0") == losses(tmp_path / "1")
    assert equal(weights(runs[0]), weights(runs[1]))
    assert losses(tmp_path / "0") != losses(tmp_path / "2")


def test_warm_up_leaves_no_trace(tokens: TokenFolder, tmp_path: Path) -> None:
    trainer = tiny_trainer(tokens, tmp_path / "run")
    before, random = weights(trainer), torch.get_rng_state()
    state = copy.deepcopy(trainer.optimizer.state_dict())
    warm_up(trainer)
    assert equal(before, weights(trainer))
    assert all(p.grad is None for p in trainer.model.parameters())
    assert trainer.optimizer.state_dict() == state
    assert torch.equal(random, torch.get_rng_state())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_micro_batches_do_not_change_the_gradient(tokens: TokenFolder, tmp_path: Path, size: int) -> None:
    whole = tiny_trainer(tokens, tmp_path / "whole", {"schedule.batch_size": 7})
    parts = tiny_trainer(tokens, tmp_path / "parts", {"schedule.batch_size": 7}, micro_batch_size=size)
    for trainer in (whole, parts):  # a zero head gives zero gradients below it
        torch.nn.init.normal_(trainer.model.head, std=0.1, generator=torch.Generator().manual_seed(1))
    assert whole.gradients(batch_for(whole), whole.recipe.schedule.at(0)) == pytest.approx(
        parts.gradients(batch_for(parts), parts.recipe.schedule.at(0)), rel=1e-6
    )
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("backend", ["fa3", "varlen"])
@pytest.mark.parametrize("cut", [False, True])
def test_kernels_that_take_edges_get_those_of_the_batch(
    tokens: TokenFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, cut: bool
) -> None:
    kernels, found = Kernels(), []
    monkeypatch.setattr(flash, "_fa3", kernels.flash_attn_varlen_func)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernels.varlen_attn)
    machine = choose("cpu", "bfloat16", threads=1)
    changes = {"loader.packing": "documents", "loader.max_doc_len": 16, "validation.cut_documents": cut}
    for name in ("sdpa", backend):
        monkeypatch.setattr(tiny, "choose", lambda *_, name=name, **__: dataclasses.replace(machine, attention=name))
        trainer = tiny_trainer(tokens, tmp_path / name, changes)
        torch.nn.init.normal_(trainer.model.head, std=0.1, generator=torch.Generator().manual_seed(1))
        batch, stage = batch_for(trainer), trainer.recipe.schedule.at(0)
        found.append(trainer.gradients(batch, stage))
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    edges = batch.cu_seqlens.tolist()
    assert len(edges) > 5, "more documents than rows"
    assert {(*call["cu_seqlens"], call["max_seqlen"]) for call in kernels.calls} == {(*edges, 16)}
    kernels.calls.clear()
    with torch.no_grad():
        trainer.micro_loss(next(validation_batches(trainer.job, "val")), stage)
    assert {call["max_seqlen"] for call in kernels.calls} == {16 if cut else 32}


def test_gradients_are_weighted_by_tokens_not_by_micro_batches(tokens: TokenFolder, tmp_path: Path) -> None:
    """Targets that do not count make the micro-batches uneven; the mean over tokens must not notice."""
    whole = tiny_trainer(tokens, tmp_path / "whole")
    parts = tiny_trainer(tokens, tmp_path / "parts", micro_batch_size=1)
    batch = batch_for(whole)
    batch.targets[0, 3:] = -1
    stage = whole.recipe.schedule.at(0)
    assert whole.gradients(batch, stage) == pytest.approx(parts.gradients(batch, stage), rel=1e-6)
    torch.testing.assert_close(whole.model.head.grad, parts.model.head.grad, rtol=1e-4, atol=1e-7)


def too_much() -> RuntimeError:
    """What torch's allocator raises on this system."""
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**50)
    return raised.value


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("injected"), too_much()])
def test_out_of_memory_halves_the_micro_batch_and_goes_on(
    tokens: TokenFolder, tmp_path: Path, error: Exception
) -> None:
    plain = tiny_trainer(tokens, tmp_path / "plain")
    Loop(plain).run()
    tight = tiny_trainer(tokens, tmp_path / "tight")
    compute, calls = tight.loss_of, []

    def greedy(inputs: torch.Tensor, *rest: Any, **choices: Any) -> torch.Tensor:
        calls.append(len(inputs))
        if torch.is_grad_enabled() and len(inputs) > 1 and len(calls) > 6:  # once the warm-up is over
            raise error
        return compute(inputs, *rest, **choices)

    tight.loss_of = greedy
    Loop(tight).run()
    assert tight.micro_batch_size == 1
    assert (tmp_path / "tight" / "log.txt").read_text().count("out of memory") == 2  # 4 -> 2 -> 1
    for (_, _, a), (_, _, b) in zip(losses(tmp_path / "plain"), losses(tmp_path / "tight"), strict=True):
        assert a == pytest.approx(b, rel=1e-4)


def test_out_of_memory_with_one_row_says_what_to_do(tokens: TokenFolder, tmp_path: Path) -> None:
    trainer = tiny_trainer(tokens, tmp_path / "run", micro_batch_size=1)

    def greedy(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("injected")

    trainer.loss_of = greedy
    with pytest.raises(UserError, match="single row of 32 tokens"):
        trainer.gradients(batch_for(trainer), trainer.recipe.schedule.at(0))


def test_a_validation_that_runs_out_of_memory_says_what_to_do(tokens: TokenFolder, tmp_path: Path) -> None:
    trainer = tiny_trainer(tokens, tmp_path / "run")
    compute = trainer.loss_of

    def greedy(*inputs: Any, **choices: Any) -> torch.Tensor:
        if not torch.is_grad_enabled():
            raise too_much()
        return compute(*inputs, **choices)

    trainer.loss_of = greedy
    with pytest.raises(UserError, match=r"validation batch of 4 x 32 tokens; pass a smaller --validation\.batch-size"):
        warm_up(trainer)


def test_weights_that_do_not_fit_into_memory_cost_a_sentence(tokens: TokenFolder, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"The weights do not fit into the memory of cpu; choose a smaller model"):
        tiny_trainer(tokens, tmp_path / "run", {"model.dim": 2**20})


def test_other_runtime_errors_are_not_swallowed(tokens: TokenFolder, tmp_path: Path) -> None:
    trainer = tiny_trainer(tokens, tmp_path / "run")

    def broken(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("shapes do not match")

    trainer.loss_of = broken
    with pytest.raises(RuntimeError, match="shapes do not match"):
        trainer.gradients(batch_for(trainer), trainer.recipe.schedule.at(0))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_fails_the_run_before_the_weights_change(
    tokens: TokenFolder, tmp_path: Path, bad: float
) -> None:
    trainer = tiny_trainer(tokens, tmp_path / "run", checkpoint_every=2)
    gradients, seen = trainer.gradients, []

    def poisoned(batch: Batch, stage: Stage) -> float:
        loss = gradients(batch, stage)
        seen.append(weights(trainer))
        return bad if len(seen) == 2 + 6 else loss  # after the warm-up's 2 steps, step 5

    trainer.gradients = poisoned  # type: ignore[method-assign]
    result = Loop(trainer).run()
    assert result.status == "failed"
    assert "step 5" in result.reason
    assert equal(weights(trainer), seen[-1])
    assert read_result(tmp_path / "run").status == "failed"
    saved = checkpoint.newest_good(tmp_path / "run" / "checkpoints", notice=pytest.fail)
    assert saved is not None
    assert saved.step == 4
    assert all(torch.isfinite(t).all() for t in saved.tensors.values())


def test_a_gradient_of_the_last_step_that_was_not_finite_fails_the_run(
    tokens: TokenFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several GPUs, which learn of it when they agree about the next step."""
    trainer = tiny_trainer(tokens, tmp_path / "run")
    agree, calls = trainer.optimizer.agree, []

    def late(numbers: Sequence[float] = ()) -> list[float]:
        calls.append(numbers)
        if len(calls) == 2 + 6:  # after the warm-up's 2 steps, step 5
            raise NonFiniteGradient("A gradient of the previous step was not finite (NaN or infinite)")
        return agree(numbers)

    monkeypatch.setattr(trainer.optimizer, "agree", late)
    result = Loop(trainer).run()
    assert result.status == "failed"
    assert len(read_metrics(tmp_path / "run", "train")) == 5
    assert "A gradient of the previous step was not finite" in result.reason


def test_a_resumed_run_has_the_same_bits(tokens: TokenFolder, tmp_path: Path) -> None:
    whole = tiny_trainer(tokens, tmp_path / "whole")
    Loop(whole).run()
    half = tiny_trainer(tokens, tmp_path / "half", checkpoint_every=7, save=False)
    Loop(half).run()
    saved = checkpoint.newest_good(tmp_path / "half" / "checkpoints", notice=pytest.fail)
    assert saved is not None
    assert saved.step == 7
    rest = tiny_trainer(tokens, tmp_path / "rest")
    result = Loop(rest).run(saved)
    assert equal(weights(whole), weights(rest))
    assert losses(tmp_path / "rest") == [
        m for m in losses(tmp_path / "whole") if (m[0], m[1]) > ("train", 6) and m[1] >= 7
    ]
    assert result.timed is False
    assert result.tokens == 12 * 4 * 32


def test_a_run_that_had_to_halve_its_micro_batches_resumes_compiled(tokens: TokenFolder, tmp_path: Path) -> None:
    """The warm-up visits the halved shape; met only later, it would be a recompilation, which is refused."""
    Loop(tiny_trainer(tokens, tmp_path / "half", checkpoint_every=7, save=False, micro_batch_size=2)).run()
    saved = checkpoint.newest_good(tmp_path / "half" / "checkpoints", notice=pytest.fail)
    assert saved is not None
    rest = tiny_trainer(tokens, tmp_path / "rest", compile=True)
    assert Loop(rest).run(saved).status == "ok"
    assert rest.micro_batch_size == 2


def test_ctrl_c_ends_the_run_after_its_step_and_saves_it(tokens: TokenFolder, tmp_path: Path) -> None:
    trainer = tiny_trainer(tokens, tmp_path / "run")
    step, done = trainer.step, []
    handler = signal.getsignal(signal.SIGINT)

    def interrupted(*args: object) -> float:
        done.append(1)
        if len(done) == 2 + 4:
            os.kill(os.getpid(), signal.SIGINT)
        return step(*args)  # type: ignore[arg-type]

    trainer.step = interrupted  # type: ignore[method-assign]
    result = Loop(trainer).run()
    assert result.status == "interrupted"
    saved = checkpoint.newest_good(tmp_path / "run" / "checkpoints", notice=pytest.fail)
    assert saved is not None
    assert saved.step == 4
    assert signal.getsignal(signal.SIGINT) is handler, "as it was, whatever it was"


def test_validation_is_the_mean_over_every_token_and_touches_nothing(tokens: TokenFolder, tmp_path: Path) -> None:
    trainer = tiny_trainer(tokens, tmp_path / "run", {"validation.batch_size": 3, "validation.seq_len": 50})
    torch.nn.init.normal_(trainer.model.head, std=0.1)
    before = weights(trainer)
    measured = validate(trainer, "val", 0)
    assert equal(before, weights(trainer))
    stream = torch.from_numpy(np.fromfile(tokens.shards("val")[0], dtype="<u2", offset=1024).astype(np.int64))
    total = 0.0
    for begin in range(0, len(stream) - 1, 50):
        piece = stream[begin : begin + 51]
        with torch.no_grad():
            total += trainer.model(piece[None, :-1], piece[None, 1:]).item()
    assert measured == pytest.approx(total / (len(stream) - 1), rel=1e-5)


def test_packed_documents_do_not_see_each_other(tokens: TokenFolder, tmp_path: Path) -> None:
    """The loss of a row with a boundary is that of its two documents on their own."""
    trainer = tiny_trainer(tokens, tmp_path / "run", {"loader.packing": "documents", "model.attention.qk_norm": False})
    for p in trainer.model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    ids = torch.randint(4096, (1, 33), generator=torch.Generator().manual_seed(0))
    row = Batch(ids[:, :-1], ids[:, 1:], (np.array([0, 20]),), {})
    alone = (
        Batch(ids[:, :20], ids[:, 1:21], (np.array([0]),), {}),
        Batch(ids[:, 20:-1], ids[:, 21:], (np.array([0]),), {}),
    )
    stage = trainer.recipe.schedule.at(0)
    together = trainer.micro_loss(row, stage).item()
    assert together == pytest.approx(sum(trainer.micro_loss(part, stage).item() for part in alone), rel=1e-4)
    apart = Batch(row.inputs, row.targets, (np.array([0]),), {})
    assert abs(trainer.micro_loss(apart, stage).item() - together) > 1e-3


def test_document_boundaries_follow_the_starts() -> None:
    ids = torch.zeros(2, 6, dtype=torch.long)
    batch = Batch(ids, ids, (np.array([0, 2, 5]), np.array([0])), {})
    assert batch.doc_ids.tolist() == [[0, 0, 1, 1, 1, 2], [0] * 6]
    assert batch.doc_ids.dtype == torch.int64
    assert batch.cu_seqlens.tolist() == [0, 2, 5, 6, 12] == flash.cu_seqlens_of(batch.doc_ids).tolist()
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.rows(0, 0).cu_seqlens.tolist() == [0]
    stream = Batch(ids, ids, None, {})
    assert stream.doc_ids is stream.cu_seqlens is None


def test_document_boundaries_of_one_shape_have_one_length() -> None:
    """Padded by empty documents; doubled where the data has more documents than are usual."""
    ids = torch.zeros(2, 600, dtype=torch.long)

    def offsets(first: int, max_doc_len: int | None = None) -> list[int]:
        return Batch(ids, ids, (np.arange(first), np.array([0])), {}, max_doc_len).cu_seqlens.tolist()

    assert offsets(1) == [0, 600] + [1200] * 7  # 2 rows of 3 pieces of 256 tokens or less, and 1 more each
    assert offsets(7) == [*range(7), 600, 1200], "just fits"
    assert offsets(8) == [*range(8), 600] + [1200] * 8
    assert [len(offsets(n)) for n in (16, 17, 32, 33)] == [33, 33, 65, 65]
    assert offsets(1, max_doc_len=200) == [0, 600] + [1200] * 11
    assert Batch(ids, ids, (np.arange(9),) * 2, {}, 200).rows(1, 2).cu_seqlens.tolist() == [*range(9)] + [600] * 4


def test_rows_are_dealt_whole_and_as_evenly_as_they_go() -> None:
    assert [s.stop - s.start for s in share(8, 3)] == [3, 3, 2]
    for rows in range(1, 20):
        for parts in range(1, rows + 1):
            dealt = [i for s in share(rows, parts) for i in range(s.start, s.stop)]
            assert dealt == list(range(rows))


def test_a_vocabulary_too_small_is_refused(tokens: TokenFolder, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--model\.vocab-size 4096"):
        tiny_trainer(tokens, tmp_path / "run", {"model.vocab_size": 100})


def test_compiled_and_plain_agree(tokens: TokenFolder, tmp_path: Path) -> None:
    plain = tiny_trainer(tokens, tmp_path / "plain", {"schedule.steps": 6})
    fast = tiny_trainer(tokens, tmp_path / "fast", {"schedule.steps": 6}, compile=True)
    Loop(plain).run()
    Loop(fast).run()
    assert fast.loss_of is not fast.model, (tmp_path / "fast" / "log.txt").read_text()
    for (_, _, a), (_, _, b) in zip(losses(tmp_path / "plain"), losses(tmp_path / "fast"), strict=True):
        assert a == pytest.approx(b, rel=1e-4)


def test_without_a_compiler_it_goes_on_and_says_so(
    tokens: TokenFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speedrun.training.device.compiler_problem", lambda: "no working C++ compiler")
    trainer = tiny_trainer(tokens, tmp_path / "run", compile=True)
    assert Loop(trainer).run().status == "ok"
    assert "torch.compile is not used: no working C++ compiler" in (tmp_path / "run" / "log.txt").read_text()


def test_a_compiler_that_fails_is_replaced_by_eager(tokens: TokenFolder, tmp_path: Path) -> None:
    trainer = tiny_trainer(tokens, tmp_path / "run")

    def broken(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("the compiler crashed")

    trainer.loss_of = broken
    assert Loop(trainer).run().status == "ok"
    assert "torch.compile failed here" in (tmp_path / "run" / "log.txt").read_text()


def test_on_a_gpu_a_compiler_that_fails_is_an_error(
    tokens: TokenFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the records' size the eager model would not even fit."""
    trainer = tiny_trainer(tokens, tmp_path / "run")
    trainer.loss_of = lambda *_, **__: torch.zeros(())
    trainer.device = torch.device("cuda:0")

    def broken(*_: object) -> float:
        raise InductorError(AssertionError("16384 v.s. 16383\nand a long trace"), None)

    monkeypatch.setattr(trainer, "gradients", broken)
    sentence = r"torch.compile failed on cuda:0 \(InductorError: AssertionError: 16384 v.s. 16383\).*--compile False"
    with pytest.raises(UserError, match=sentence):
        warm_up(trainer)
    assert trainer.loss_of is not trainer.model
    assert "going on without it" not in (tmp_path / "run" / "log.txt").read_text()

    def full(*_: object) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trainer, "gradients", full)
    with pytest.raises(torch.OutOfMemoryError) as caught:  # which is not the compiler's, and keeps its traceback
        warm_up(trainer)
    assert "--compile False shows" in caught.value.__notes__[0]


LONG_DOCUMENTS = {
    "model.num_layers": 1,
    "model.attention.long_layers": (0,),
    "loader.packing": "documents",
    "loader.max_doc_len": 2048,
    "schedule.batch_size": 1,
    "schedule.seq_len": 2048,
    "schedule.window_ramp": (1024,),
    "schedule.window_final": 2560,
    "validation.batch_size": 1,
    "validation.seq_len": 4096,
}


@pytest.mark.parametrize(("cut", "reach"), [(False, 2560), (True, 2046)])
def test_a_long_document_is_validated_as_far_as_the_window_reaches(cut: bool, reach: int, tmp_path: Path) -> None:
    """The records cut at separators alone, so the last validation looks back further than training ever did."""
    tokens = make_token_folder(tmp_path / "tokens")
    stream = 1 + np.random.default_rng(0).integers(50, size=4097)
    stream[0] = stream[3000] = tokens.bos  # a document of 3,000 tokens, then a short one
    features, losses = [], []
    for first in (7, 8):
        stream[1] = first
        write_shard(tmp_path / "tokens" / "val_000000.bin", stream)
        trainer = tiny_trainer(tokens, tmp_path / f"run-{first}", LONG_DOCUMENTS | {"validation.cut_documents": cut})
        for p in trainer.model.parameters():
            torch.nn.init.normal_(p)  # some begin at zero, and attention would add nothing
        (batch,) = validation_batches(trainer.job, "val")
        stage = trainer.recipe.schedule.after(trainer.recipe.schedule.total)
        assert stage.windows is not None
        with torch.no_grad():
            features.append(trainer.model.features(batch.inputs, Documents(batch.doc_ids), stage.windows)[0])
            batch.targets[0, :2100] = batch.targets[0, 2500:] = -1
            losses.append(float(trainer.micro_loss(batch, stage)))
    changed = (features[0] != features[1]).any(dim=1).nonzero().flatten()
    assert changed.tolist() == list(range(1, 1 + reach + 1)), "the first token and all that see it"
    assert (losses[0] != losses[1]) == (not cut), "what is said about tokens 2,100 to 2,500"


EVERYTHING = {
    "model.num_layers": 4,
    "model.head.tied": True,
    "model.head.untie": True,
    "model.embeddings.norm": True,
    "model.attention.rotary": "half",
    "model.attention.yarn": True,
    "model.attention.long_layers": (0, 3),
    "model.attention.key_offset": True,
    "model.attention.gates": True,
    "model.embeddings.value_layers": ((1, 0),),
    "model.embeddings.smear": True,
    "model.residual.x0_lambdas": True,
    "model.embeddings.second": True,
    "model.residual.skips": ((0, 2),),
    "model.residual.backout": 1,
    "model.head.softcap": "sigmoid",
    "optim.matrices": "normuon",
    "optim.weights": "exact-bf16",
    "optim.every": 2,
    "optim.muon.decay": "cautious",
    "optim.muon.weight_decay": 0.5,
    "optim.muon.update_ema": 0.2,
    "optim.snoo.k": 3,
    "loader.packing": "documents",
    "schedule.extra_steps": 2,
    "schedule.batch_ramp": (2, 3, 4),
    "schedule.lr_ramp": (1.0, 1.5, 1.7),
    "schedule.window_ramp": (8, 16, 24),
    "schedule.window_block": 8,
    "schedule.window_final": 32,
    "schedule.momentum_warmup": 4,
    "schedule.momentum_cooldown": 3,
    "schedule.mtp_tokens": 3,
    "schedule.untie_at": 0.5,
    "schedule.min_lr_ratio": 0.1,
}


@pytest.mark.parametrize("after", [2, 3, 5, 8, 9, 13])
def test_with_everything_on_a_resumed_run_has_the_same_bits(tokens: TokenFolder, tmp_path: Path, after: int) -> None:
    """From an even step with gradients waiting, across a window change, across the split, inside the extension."""
    whole = tiny_trainer(tokens, tmp_path / "whole", EVERYTHING)
    assert Loop(whole).run().status == "ok"
    assert whole.recipe.schedule.untie_step == 7
    half = tiny_trainer(tokens, tmp_path / "half", EVERYTHING, checkpoint_every=after, save=False, keep=20)
    Loop(half).run()
    saved = checkpoint.load(tmp_path / "half" / "checkpoints" / f"step-{after:06d}")
    rest = tiny_trainer(tokens, tmp_path / "rest", EVERYTHING)
    Loop(rest).run(saved)
    assert equal(weights(whole), weights(rest))
    for p, q in zip(whole.model.parameters(), rest.model.parameters(), strict=True):
        if p.dtype == torch.bfloat16:
            assert torch.equal(whole.optimizer.master(p), rest.optimizer.master(q))  # type: ignore[attr-defined]
    wanted = [m for m in losses(tmp_path / "whole") if m[1] > after or (m[0] == "train" and m[1] == after)]
    assert losses(tmp_path / "rest") == wanted


def test_with_everything_on_the_warm_up_leaves_no_trace(tokens: TokenFolder, tmp_path: Path) -> None:
    a = tiny_trainer(tokens, tmp_path / "a", EVERYTHING)
    before = weights(a)
    warm_up(a)
    assert equal(before, weights(a))
    assert not [s for s in a.optimizer.state.values() if s]


def test_everything_compiles_and_nothing_recompiles(tokens: TokenFolder, tmp_path: Path) -> None:
    compiled = tiny_trainer(tokens, tmp_path / "a", EVERYTHING, compile=True)
    plain = tiny_trainer(tokens, tmp_path / "b", EVERYTHING)
    assert Loop(compiled).run().val_loss == pytest.approx(Loop(plain).run().val_loss, rel=1e-3)
    assert compiled.loss_of is not compiled.model, "it fell back to eager"
