"""The training loop.

It obeys the schedule's `Stage`, keeps the clock, and writes the run folder. It knows nothing of particular techniques.

Order of things, for step s: batch -> forward and backward over micro-batches -> refuse a loss that is not finite ->
optimizer -> log -> validate if it is time (the clock stands still) -> checkpoint "s + 1 steps done" if it is time.
A checkpoint is thus the state between two steps, and a resumed run goes on exactly there.
"""

import contextlib
import copy
import dataclasses
import hashlib
import itertools
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from speedrun.data.loader import Batch, Loader, Prefetcher, validation_batches
from speedrun.data.shards import TokenFolder
from speedrun.errors import UserError
from speedrun.model.attention import takes_edges
from speedrun.model.flash import edges_of
from speedrun.model.gpt import GPT
from speedrun.model.head import describe_fp8
from speedrun.optim import Interleaved, Snoo
from speedrun.optim.base import NonFiniteGradient, SpeedrunOptimizer
from speedrun.optim.sharded import Comm
from speedrun.train import checkpoint, scale, telemetry, trace
from speedrun.train.clock import Clock, synchronize
from speedrun.train.config import Options, Recipe
from speedrun.train.device import Machine, compiled
from speedrun.train.distributed import Muted
from speedrun.train.load import Load, Pace, SleepWhileBusy, busy_line
from speedrun.train.memory import check_rows, memory_of
from speedrun.train.optimizers import build_optimizer, copy_state
from speedrun.train.progress import Report
from speedrun.train.runlog import Result, RunFolder, Status, now, train_line, val_line
from speedrun.train.schedule import Stage
from speedrun.train.watch import Watch, lost_connection


class NonFiniteLoss(Exception):
    """The loss became NaN or infinite; the weights are those before the step."""


class Interrupted(Exception):
    """Ctrl-C or a polite kill: the run was saved."""


def share(rows: int, parts: int) -> list[slice]:
    """Whole rows dealt to `parts`, the first ones getting one more where it does not divide (8 to 3: 3, 3, 2)."""
    base, extra = divmod(rows, parts)
    edges = [i * base + min(i, extra) for i in range(parts + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


def document_numbers(batch: Batch) -> Tensor | None:
    """(R, T) number of the document each position belongs to, or None for rows without boundaries."""
    if batch.starts is None:
        return None
    numbers = torch.zeros(batch.inputs.shape, dtype=torch.long)
    for row, starts in enumerate(batch.starts):
        numbers[row, torch.from_numpy(starts[1:])] = 1
    return numbers.cumsum(1)


def targets_in(batch: Batch) -> int:
    """How many tokens of a batch are predicted and count."""
    return int((batch.targets >= 0).sum())


class Trainer:
    """One run: model, optimizer, data and clock, from step 0 or from a checkpoint to the last step."""

    def __init__(
        self,
        recipe: Recipe,
        tokens: TokenFolder,
        machine: Machine,
        options: Options,
        folder: RunFolder | Muted,
        report: Report,
        comm: Comm | None = None,
        watch: Watch | None = None,
    ) -> None:
        if tokens.vocab_size > recipe.model.vocab:
            raise UserError(
                f"The data has {tokens.vocab_size} different tokens, the model only {recipe.model.vocab}; "
                f"pass --model.vocab {tokens.vocab_size}."
            )
        self.recipe, self.tokens, self.machine, self.options = recipe, tokens, machine, options
        self.folder, self.report = folder, report
        self.comm, self.watch = comm or Comm(), watch
        self.device = machine.device
        self.steps = recipe.schedule.total
        torch.manual_seed(options.seed)
        self.model = GPT(recipe.model, recipe.context, machine.attention).to(self.device)
        if recipe.optim.weights != "float32":
            self.model.store_matrices(torch.bfloat16)
        about = {"recipe": recipe.name, "order": options.order, "rank": self.comm.rank, "ranks": self.comm.size}
        self.profiler = trace.recorder(self.device, options.trace, about) if options.trace else None
        self.optimizer = build_optimizer(
            self.model.named_parameters(),
            self.model.param_roles(),
            recipe.optim,
            self.shared if self.comm.size > 1 else None,
            machine.dtype,
        )
        self.loss_of, why_not = compiled(self.model, options.compile, self.device, recipe.compiler)
        if why_not:
            self.say(f"torch.compile is not used: {why_not}")
        self.micro_rows = options.micro_rows
        self.fitting: dict[tuple[object, ...], int] = {}  # rows of a micro-batch by the shape of a stage, on a GPU
        if self.device.type == "cuda":
            memory = memory_of(recipe, machine, options, self.comm.size)
            there = machine.memory or torch.cuda.get_device_properties(self.device).total_memory
            check_rows(memory, recipe, there)
            self.fitting = memory.micro_rows
        self.clock = Clock(self.device)
        self.start = 0
        self.loader_state: dict[str, Any] | None = None
        self.resumed = False
        self.asked_to_stop: int | None = None  # the signal that this rank got
        self.stop_signal: int | None = None  # the one on which all ranks have agreed
        self.tokens_seen = 0
        self.load, self.pace = Load(), Pace()
        self.told_busy = False

    def shared(self, members: Sequence[SpeedrunOptimizer]) -> Interleaved:
        """Several optimizers as one over all ranks."""
        divisor = scale.reduced_divisor(self.recipe)
        return Interleaved(self.model, members, order=self.options.order, average=divisor)

    def say(self, line: str) -> None:
        self.folder.log(line)

    def at(self, doing: str, *, compiling: bool = False) -> None:
        """Where this rank is, for the case that it gets no further and others wait for it; and for who is watching."""
        if compiling:  # other things are short, and shown as steps
            self.report.at(doing)
        if self.watch is not None:
            self.watch.at(doing, compiling=compiling)

    # ---------------------------------------------------------------- one step

    def set_rates(self, stage: Stage) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * stage.lr
            if stage.momentum is not None and "momentum" in group:
                group["momentum"] = stage.momentum

    @property
    def sharded(self) -> Interleaved | None:
        """The optimizer that all ranks share, if there are several."""
        inner = self.optimizer.optimizer if isinstance(self.optimizer, Snoo) else self.optimizer
        return inner if isinstance(inner, Interleaved) else None

    def gradients(self, batch: Batch, stage: Stage) -> float:
        """Accumulate the gradient of this rank's share of the batch, in the recipe's scale.

        Returns the share of the mean loss. Ranks take whole rows. Leaves no gradient on failure.
        """
        mine = share(len(batch.inputs), self.comm.size)[self.comm.rank]
        counted = targets_in(batch)
        divisor = scale.backward_divisor(self.recipe, counted)
        batch = batch.rows(mine.start, mine.stop)
        rows = len(batch.inputs)
        while True:
            size = max(1, min(self.micro_rows or self.fitting.get(stage.shape, rows), rows))
            try:
                total = torch.zeros((), device=self.device)
                parts = share(rows, math.ceil(rows / size)) if rows else []
                for part in parts:
                    with self.only_accumulating(part is not parts[-1]):
                        loss = self.micro_loss(batch.rows(part.start, part.stop), stage) / divisor
                        loss.backward()
                    total += loss.detach()
                return total.item() * (divisor / counted)
            except (torch.OutOfMemoryError, MemoryError, RuntimeError) as e:
                if not out_of_memory(e):
                    raise
                if self.comm.size > 1:
                    raise UserError(
                        f"Out of memory on rank {self.comm.rank} with {size} rows at a time; the other ranks are "
                        f"waiting, so it cannot try again. Start with --micro-rows {max(1, size // 2)}."
                    ) from e
                self.optimizer.zero_grad(set_to_none=True)
                if size == 1:
                    raise UserError(
                        f"Out of memory with a single row of {batch.inputs.shape[1]} tokens; "
                        "choose a smaller model, shorter rows or another device."
                    ) from e
            # Outside the handler: the failed graph is freed before the next attempt.
            self.micro_rows = size // 2
            self.release_memory()
            self.say(f"out of memory: going on with micro-batches of {self.micro_rows} rows (same result, more passes)")
            torch.compiler.set_stance("default")

    def only_accumulating(self, more_to_come: bool) -> contextlib.AbstractContextManager[None]:
        """Gradients are shared between ranks after the last micro-batch alone."""
        return self.sharded.no_sync() if more_to_come and self.sharded else contextlib.nullcontext()

    def agreed(self, loss: float) -> float:
        """The sum over the ranks, which also learn here that one of them was asked to stop.

        A signal that comes later in the step waits for the next one: acted upon by one rank, the others would hang.
        """
        if self.sharded is None:
            return loss
        number = self.asked_to_stop or 0
        total, numbers, asked = self.sharded.agree([loss, number, float(number > 0)])
        if asked:
            self.stop_signal = int(numbers / asked)
        return total

    def micro_loss(self, batch: Batch, stage: Stage) -> Tensor:
        """Summed loss of some rows. With gradients it weighs the predicted tokens as the stage says."""
        documents = document_numbers(batch)
        windows = stage.windows and stage.windows.for_rows(batch.inputs.shape[1], self.device)
        edges, longest = None, None
        if takes_edges(self.machine.attention) and documents is not None:
            if torch.is_grad_enabled() or self.recipe.validation.cut_documents:
                longest = self.recipe.loader.max_document
            edges = edges_of(documents).to(self.device)
            torch._dynamo.mark_dynamic(edges, 0)  # one graph for any number of documents
        predict = None
        if len(stage.predict) > 1 and torch.is_grad_enabled():
            predict = torch.tensor(stage.predict, device=self.device)
        with self.machine.arithmetic():
            return self.loss_of(
                batch.inputs.to(self.device),
                batch.targets.to(self.device),
                None if documents is None else documents.to(self.device),
                windows,
                predict,
                stage.tied,
                edges,
                longest,
            )

    def release_memory(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        elif self.device.type == "mps":
            torch.mps.empty_cache()

    def step(self, stage: Stage, batch: Batch) -> float:
        self.model.stretch(stage.windows_so_far)
        with record_function("compute: backward model"):
            loss = self.gradients(batch, stage)
        loss = self.agreed(loss)
        if not math.isfinite(loss):
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteLoss(f"the loss of step {stage.step} is {loss}")
        if not self.sharded:  # otherwise done when they are reduced
            self.divide_gradients(scale.reduced_divisor(self.recipe))
        if self.recipe.optim.clip:
            self.clip(self.recipe.optim.clip * scale.over_mean(self.recipe, targets_in(batch)))
        self.set_rates(stage)
        try:
            self.at(f"training the weights in step {stage.step}")
            with contextlib.nullcontext() if self.sharded else record_function("compute: update all"):
                self.optimizer.step()
        except NonFiniteGradient as e:
            raise NonFiniteLoss(f"the loss of step {stage.step} is finite, but a gradient is not: {e}") from e
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        if stage.splits:
            self.model.split_head()
            assert self.model.head is not None
            copy_state(self.optimizer, self.model.embed, self.model.head)
        return loss

    def divide_gradients(self, divisor: int) -> None:
        found = [p.grad for p in self.model.parameters() if p.grad is not None]
        if divisor != 1 and found:
            torch._foreach_div_(found, divisor)

    def clip(self, norm: float) -> None:
        if self.sharded:
            self.sharded.clip_grad_norm_(norm)
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), norm, foreach=True)

    # ---------------------------------------------------------------- validation

    def validation_batches(self, split: str) -> Iterator[Batch]:
        v = self.recipe.validation
        return validation_batches(
            self.tokens.shards(split),
            rows=v.rows,
            length=v.length,
            bos=self.tokens.bos,
            vocab_size=self.tokens.vocab_size,
            packing=self.recipe.loader.packing,
            max_document=self.recipe.loader.max_document if v.cut_documents else None,
            tokens=self.options.val_tokens,
        )

    def validations(self) -> list[int]:
        """After how many steps the loss is measured."""
        return self.recipe.validation.moments(self.steps)

    @torch.no_grad()
    def validate(self, split: str, done: int) -> float:
        """Mean loss over the split's tokens after `done` steps, from float32 logits. Forward only."""
        stage = self.recipe.schedule.after(done)
        self.model.stretch(stage.windows_so_far)
        total, count = 0.0, 0
        for k, batch in enumerate(self.validation_batches(split)):
            if k % self.comm.size == self.comm.rank:
                total += float(self.micro_loss(batch, stage).double())
                count += targets_in(batch)
        if self.comm.size > 1:
            both = torch.tensor([total, count], dtype=torch.float64, device=self.device)
            self.comm.all_reduce(both).wait()
            total, count = both.tolist()
        return total / count

    # ---------------------------------------------------------------- warm-up

    def made_up(self, rows: int, length: int, generator: torch.Generator) -> Batch:
        """A batch of any tokens, two documents in a row."""
        ids = torch.randint(self.tokens.vocab_size, (rows, length), generator=generator)
        packed = self.recipe.loader.packing == "documents"
        starts = tuple(torch.tensor([0, length // 2]).numpy() for _ in range(rows)) if packed else None
        return Batch(ids, ids.clone(), starts, {})

    def warm_up(self) -> None:
        """Visit every shape the run will see, so that compiling is outside the clock, and leave no trace.

        Tokens are made up, from a generator of its own. Weights, optimizer and random state come out as they went in.
        """
        weights = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        before = copy.deepcopy(self.optimizer.state_dict())
        generator = torch.Generator().manual_seed(0)

        def visit() -> None:
            v, schedule = self.recipe.validation, self.recipe.schedule
            what = "warming up" if self.loss_of is self.model else "compiling and warming up"
            visits = schedule.visits()
            for k, stage in enumerate(visits):
                for _ in range(2):
                    self.at(f"{what} the training step, stage {k + 1} of {len(visits)}", compiling=True)
                    with contextlib.suppress(NonFiniteLoss):  # an absurd learning rate fails in the run, not here
                        self.step(
                            dataclasses.replace(stage, lr=1e-3), self.made_up(stage.rows, stage.length, generator)
                        )
            for stage in {stage.shape: stage for stage in map(schedule.after, self.validations())}.values():
                self.at(f"{what} the validation", compiling=True)
                self.model.stretch(stage.windows_so_far)
                with torch.no_grad():
                    self.micro_loss(self.made_up(v.rows, v.length, generator), stage).item()

        def visit_all() -> None:
            """Once more from the first if memory ran out on the way: those before had larger micro-batches."""
            while True:
                micro_rows = self.micro_rows
                with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
                    visit()
                if self.micro_rows == micro_rows:
                    return

        try:
            visit_all()
        except UserError:
            raise
        except Exception as e:  # whatever a compiler may raise
            if self.loss_of is self.model or lost_connection(e):
                raise
            if self.device.type != "cpu":
                if isinstance(e, torch._dynamo.exc.TorchDynamoException):
                    raise compile_failure(e, self.device) from e
                e.add_note("--compile False shows whether it happens without torch.compile, too.")
                raise  # perhaps a bug of this program: it keeps its traceback
            self.say(f"torch.compile failed here ({type(e).__name__}); going on without it, about 1.2x slower")
            self.loss_of = self.model
            visit_all()
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(weights[name])
                p.grad = None
        self.optimizer.reset()
        self.optimizer.load_state_dict(before)
        synchronize(self.device)
        if self.loss_of is not self.model:
            torch.compiler.set_stance("fail_on_recompile")

    # ---------------------------------------------------------------- checkpoints

    def save(self, done: int) -> None:
        """Write a checkpoint: rank 0 does, of what all of them bring; it does not depend on how many they are."""
        self.at(f"saving after {done} steps")
        states = self.optimizer.full_state_dict()
        weights = {f"model.{name}": self.exact(p) for name, p in self.model.named_parameters()}
        if self.comm.rank:
            self.comm.all_gather_object(None)  # nobody goes on, or ends, before it is on disk
            return
        for known in states.values():
            known.pop("remainder", None)  # the exact weights are stored, in place of their upper halves
        tensors, numbers = checkpoint.flatten(states)
        state = {
            "optimizer": numbers,
            "loader": self.loader_state,
            "clock": self.clock.seconds,
            "tokens": self.tokens_seen,
            "micro_rows": self.micro_rows,
            "seed": self.options.seed,
            "threads": self.machine.threads,
        }
        checkpoint.save(
            self.folder.checkpoints, done, tensors | weights, state, keep=self.options.keep, notice=self.say
        )
        self.comm.all_gather_object(None)

    def exact(self, p: nn.Parameter) -> Tensor:
        """The value a checkpoint holds: float32 also for a weight whose lower half the optimizer keeps."""
        exact = self.recipe.optim.weights == "exact-bf16" and p.dtype == torch.bfloat16
        return self.optimizer.master(p) if exact else p.detach()

    def restore(self, saved: checkpoint.Checkpoint) -> None:
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                # Into the existing storage, whose alignment the math library may depend on.
                p.copy_(saved.tensors[f"model.{name}"])
        self.optimizer.load_full_state_dict(checkpoint.unflatten(saved.tensors, saved.state["optimizer"]))
        if self.recipe.optim.weights == "exact-bf16":
            for name, p in self.model.named_parameters():
                if p.dtype == torch.bfloat16:
                    self.optimizer.set_master(p, saved.tensors[f"model.{name}"].to(self.device))
        if isinstance(self.optimizer, Snoo):
            self.optimizer.count = saved.step
        self.start = saved.step
        self.loader_state = saved.state["loader"]
        self.clock = Clock(self.device, saved.state["clock"])
        self.tokens_seen = saved.state["tokens"]
        self.resumed = True

    # ---------------------------------------------------------------- the run

    def loader(self, notice: Callable[[str], None]) -> Loader:
        return Loader(
            self.tokens.shards("train"),
            self.recipe.loader,
            bos=self.tokens.bos,
            vocab_size=self.tokens.vocab_size,
            seed=self.options.seed,
            notice=notice,
        )

    def check_data(self) -> None:
        """Make one batch of each shape: what is wrong with the data is told before minutes of compiling, not after."""
        for rows, length in self.recipe.schedule.shapes():
            self.loader(notice=lambda _: None).next(rows, length)
        for split in self.options.splits:
            next(self.validation_batches(split))

    def batches(self) -> Prefetcher:
        loader = self.loader(notice=self.say)
        if self.loader_state is not None:
            loader.load_state_dict(self.loader_state)
        stages = (self.recipe.schedule.at(s) for s in range(self.start, self.steps))
        return Prefetcher(loader, ((s.rows, s.length) for s in stages))

    def run(self, saved: checkpoint.Checkpoint | None = None) -> Result:
        """Train to the last step; the returned result is also result.json."""
        with SleepWhileBusy(self.machine.threads if self.device.type == "cpu" else 1):
            return self._run(saved)

    def _run(self, saved: checkpoint.Checkpoint | None) -> Result:
        self.check_data()
        for line in self.machine.lines():
            self.say(line)
        if self.recipe.model.fp8_head:
            self.say("8-bit head: {} ({})".format(*describe_fp8(self.device)))
        if self.options.curve:
            record = self.options.curve
            self.say(f"record: the losses of {record.record} are shown beside this run's ({record})")
        self.say(
            "warming up (not timed): compiling and visiting every shape" + ("" if saved is None else ", then resuming")
        )
        if saved is not None:
            self.micro_rows = saved.state["micro_rows"]  # the warm-up must visit the shapes that the run will have
        start = time.perf_counter()
        self.warm_up()
        warm_up = time.perf_counter() - start
        if saved is not None:
            self.restore(saved)
            self.say(f"resumed at step {self.start} from {saved.path.name}; a resumed run is not timed")
        losses: dict[str, float] = {}
        status: Status = "ok"
        reason: str | None = None
        try:
            with (
                self.signals(),
                self.profiler or contextlib.nullcontext(),
                contextlib.closing(self.batches()) as batches,
            ):
                losses = self.loop(batches)
        except NonFiniteLoss as e:
            status, reason = "failed", str(e)
        except Interrupted:
            status, reason = "interrupted", f"signal {self.stop_signal}"
        finally:
            torch.compiler.set_stance("default")
            self.clock.halt()
            others = self.load.others()
        if status == "ok" and not math.isfinite(losses[self.options.splits[0]]):
            status, reason = "failed", "the final validation loss is not finite"
            losses = {}
        if status == "ok" and self.profiler:
            self.say(f"trace of every rank, such as {trace.write(self.profiler, self.folder.path, self.comm.rank)}")
        if status == "ok" and self.options.final_checkpoint and self.start < self.steps:  # else it is there already
            self.save(self.steps)
        result = Result(
            status=status,
            reason=reason,
            val_loss=losses.get(self.options.splits[0]),
            losses=losses,
            steps=self.steps,
            train_time=self.clock.seconds,
            tokens=self.tokens_seen,
            tokens_per_second=self.tokens_seen / self.clock.seconds if self.clock.seconds else 0.0,
            resumed=self.resumed,
            timed=status == "ok" and not self.resumed,
            peak_memory=telemetry.peak_memory_mib(self.device),
            finished=now(),
            warm_up=warm_up,
            others=others,
        )
        self.folder.finish(result)
        return result

    def loop(self, batches: Prefetcher) -> dict[str, float]:
        if self.start == self.steps:  # killed between the last checkpoint and the result: all is logged already
            return {split: self.validate(split, self.steps) for split in self.options.splits}
        losses: dict[str, float] = {}
        validations = set(self.validations())
        self.tell_if_busy(self.load)
        self.load = Load()
        self.clock.start()
        if self.start == 0 and 0 in validations:
            self.validation(0)
        for s in range(self.start, self.steps):
            stage = self.recipe.schedule.at(s)
            self.at(f"reading the batch of step {s}")
            batch = batches.next()
            self.at(f"computing step {s}")
            with record_function(f"step {s}"):
                loss = self.step(stage, batch)
            if self.profiler:
                self.profiler.step()
            self.loader_state = batch.state
            self.tokens_seen += stage.tokens
            self.log_step(stage, loss)
            done = s + 1
            if done in validations:
                losses = self.validation(done)
            if self.sharded is None:
                self.stop_signal = self.asked_to_stop
            every = self.options.checkpoint_every
            if done < self.steps and (self.stop_signal is not None or (every and done % every == 0)):
                self.save(done)
                if self.stop_signal is not None:
                    raise Interrupted
        self.clock.stop()
        return losses

    def log_step(self, stage: Stage, loss: float) -> None:
        done, seconds = stage.step + 1, self.clock.seconds
        self.folder.metric({"kind": "train", "step": stage.step, "loss": loss, "lr": stage.lr, "time": seconds})
        self.folder.log(train_line(done, self.steps, loss, 1000 * seconds), show=False)
        self.report.step(done, loss, seconds / done, self.tokens_seen / seconds)
        slower = self.pace.after(stage.tokens, seconds)
        if slower:
            self.say(slower)
            self.tell_if_busy(self.load)

    def tell_if_busy(self, load: Load) -> None:
        """Once: afterwards it is known."""
        line = busy_line(load.others())
        if line and not self.told_busy:
            self.say(line)
            self.told_busy = True

    def validation(self, done: int) -> dict[str, float]:
        """Measure and log, while the clock stands still."""
        self.clock.stop()
        splits = self.options.splits if done == self.steps else self.options.splits[:1]
        proven = done == self.steps and self.options.plan is not None
        before = self.fingerprint() if proven else ""
        self.at(f"validating after {done} steps", compiling=True)  # it may also be long
        start = time.perf_counter()
        losses = {split: self.validate(split, done) for split in splits}
        took = time.perf_counter() - start
        weights = {"weights": [before, self.fingerprint()]} if proven else {}
        loss, seconds, snapshot = losses[splits[0]], self.clock.seconds, telemetry.snapshot()
        self.folder.metric({"kind": "telemetry", "step": max(0, done - 1), **snapshot})
        measured = {"loss": loss, "losses": losses, "time": seconds, "seconds": took, **weights}
        self.folder.metric({"kind": "val", "step": done, **measured})
        self.folder.log(val_line(done, self.steps, loss, 1000 * seconds, self.options.curve))
        self.folder.log(telemetry.summary(snapshot), show=False)
        self.tell_if_busy(self.load)
        self.clock.start()
        return losses

    def fingerprint(self) -> str:
        """sha256 of all weights, bit by bit."""
        digest = hashlib.sha256()
        for name, p in self.model.named_parameters():
            digest.update(name.encode())
            digest.update(p.detach().reshape(-1).view(torch.uint8).cpu().numpy().data)
        return digest.hexdigest()

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """The first Ctrl-C or SIGTERM ends the run after the current step, saved; the second one ends it at once."""

        def stop(number: int, frame: FrameType | None) -> None:
            if self.asked_to_stop is not None:
                raise KeyboardInterrupt
            self.asked_to_stop = number
            self.report.line("stopping after this step; once more to stop at once")

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        old: dict[int, Any] = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        except Exception as e:
            if lost_connection(e):  # torchrun ends those who are left; they end by themselves, and say why
                old[signal.SIGTERM] = signal.SIG_IGN
            raise
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


def compile_failure(error: Exception, device: torch.device) -> UserError:
    said = next((line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()), "no message")
    return UserError(
        f"torch.compile failed on {device} ({type(error).__name__}: {said}). Without it a GPU needs far more memory "
        "and time, so that is not tried unasked: pass --compile False to do so, or try another version of torch."
    )


def out_of_memory(error: BaseException) -> bool:
    """CUDA raises its own class; the CPU's allocator and cuBLAS a RuntimeError with one of these texts."""
    told = any(text in str(error) for text in ("not enough memory", "CUBLAS_STATUS_ALLOC_FAILED"))
    return told or isinstance(error, (torch.OutOfMemoryError, MemoryError))
