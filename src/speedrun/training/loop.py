"""The training loop: the order of things, the clock, signals and the run folder. It knows no technique.

For step s: batch -> step -> log -> validate if it is time (the clock stands still) -> checkpoint "s + 1 steps done" if
it is time. A checkpoint is thus the state between two steps, and a resumed run goes on exactly there.
"""

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.profiler import record_function

from speedrun.data import Loader, Prefetcher
from speedrun.model import describe_fp8
from speedrun.training import checkpoint, telemetry, trace
from speedrun.training.clock import Clock
from speedrun.training.load import Load, Pace, SleepWhileBusy, busy_line
from speedrun.training.runlog import Result, Status, now, train_line, val_line
from speedrun.training.schedule import Stage
from speedrun.training.state import TrainState, restore, save
from speedrun.training.step import NonFiniteLoss, Trainer
from speedrun.training.validate import fingerprint, validate, validation_batches
from speedrun.training.warmup import warm_up
from speedrun.training.watchdog import lost_connection


class Interrupted(Exception):
    """SIGINT or SIGTERM: the run was saved."""


class Loop:
    """One run, from step 0 or from a checkpoint to the last step."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.job, self.recipe = trainer, trainer.job, trainer.recipe
        self.options, self.folder, self.comm = trainer.job.options, trainer.job.folder, trainer.comm
        self.steps = self.recipe.schedule.total
        place = {"rank": self.comm.rank, "world_size": self.comm.size}
        about = {"recipe": self.recipe.name, "order": self.options.order, **place}
        traced = self.options.trace
        self.profiler = trace.recorder(trainer.device, traced, about) if traced else None
        self.state = TrainState(Clock(trainer.device))
        self.pace = Pace()
        self.start_measuring()
        self.told_busy = False

    def start_measuring(self) -> None:
        """What wall_seconds, cpu_seconds and machine_load of the result count from."""
        self.load, self.wall_start, self.cpu_start = Load(), time.perf_counter(), time.process_time()

    # ---------------------------------------------------------------- before the first step

    def loader(self, notice: Callable[[str], None]) -> Loader:
        tokens = self.job.tokens
        shards, vocab_size, seed = tokens.shards("train"), tokens.vocab_size, self.options.seed
        return Loader(shards, self.recipe.loader, bos=tokens.bos, vocab_size=vocab_size, seed=seed, notice=notice)

    def check_data(self) -> None:
        """Make one batch of each shape: report what is wrong with the data before compiling, not after."""
        for rows, length in self.recipe.schedule.shapes():
            self.loader(notice=lambda _: None).next(rows, length)
        for split in self.options.splits:
            next(validation_batches(self.job, split))

    def batches(self) -> Prefetcher:
        loader = self.loader(notice=self.job.say)
        if self.state.loader is not None:
            loader.load_state_dict(self.state.loader)
        stages = (self.recipe.schedule.at(s) for s in range(self.state.start, self.steps))
        return Prefetcher(loader, ((s.batch_size, s.seq_len) for s in stages))

    def prepare(self, saved: checkpoint.Checkpoint | None) -> float:
        """Describe the run in its log, warm up and restore. Returns the seconds of the warm-up."""
        say = self.job.say
        self.check_data()
        for line in self.job.machine.lines():
            say(line)
        if self.recipe.model.head.fp8:
            say("8-bit head: {} ({})".format(*describe_fp8(self.trainer.device)))
        if self.options.curve:
            record = self.options.curve
            say(f"record: the losses of {record.record} are shown beside this run's ({record})")
        what = "visiting" if self.trainer.loss_of is self.trainer.model else "compiling and visiting"
        say(f"warming up (not timed): {what} every shape" + (", then resuming" if saved else ""))
        if saved is not None:
            self.trainer.micro_batch_size = saved.state[
                "micro_batch_size"
            ]  # the warm-up must visit the shapes of the run
        start = time.perf_counter()
        warm_up(self.trainer)
        took = time.perf_counter() - start
        if saved is not None:
            self.state = restore(self.trainer, saved)
            say(f"resumed at step {self.state.start} from {saved.path.name}; a resumed run is not timed")
        return took

    # ---------------------------------------------------------------- the run

    def run(self, saved: checkpoint.Checkpoint | None = None) -> Result:
        """Train to the last step; the returned result is also result.json."""
        machine = self.job.machine
        with SleepWhileBusy(machine.threads if machine.device.type == "cpu" else 1):
            return self.finish(self.prepare(saved), *self.train())

    def train(self) -> tuple[Status, str | None, dict[str, float]]:
        """All steps: how the run ended, why if not well, and its final validation losses."""
        profiler = self.profiler or contextlib.nullcontext()
        try:
            with self.signals(), profiler, contextlib.closing(self.batches()) as batches:
                losses = self.loop(batches)
        except NonFiniteLoss as e:
            return "failed", str(e), {}
        except Interrupted:
            return "interrupted", f"signal {self.trainer.stop_signal}", {}
        finally:
            torch.compiler.set_stance("default")
            self.state.clock.halt()
        if not math.isfinite(losses[self.options.splits[0]]):
            return "failed", "the final validation loss is not finite", {}
        return "ok", None, losses

    def loop(self, batches: Prefetcher) -> dict[str, float]:
        """The steps that are left. Returns the last validation losses."""
        trainer, state, steps = self.trainer, self.state, self.steps
        if state.start == steps:  # killed between the last checkpoint and the result: all is logged already
            return {split: validate(trainer, split, steps) for split in self.options.splits}
        losses: dict[str, float] = {}
        validations = set(self.recipe.validation.moments(steps))
        self.tell_if_busy()
        self.start_measuring()
        state.clock.start()
        if state.start == 0 and 0 in validations:
            self.validation(0)
        for s in range(state.start, steps):
            stage = self.recipe.schedule.at(s)
            self.job.doing(f"reading the batch of step {s}")
            batch = batches.next()
            self.job.doing(f"computing step {s}")
            with record_function(f"step {s}"):
                loss = trainer.step(stage, batch)
            if self.profiler:
                self.profiler.step()
            state.loader = batch.state
            state.tokens += stage.tokens
            self.log_step(stage, loss)
            if s + 1 in validations:
                losses = self.validation(s + 1)
            self.save_if_due(s + 1)
        state.clock.stop()
        return losses

    def save_if_due(self, done: int) -> None:
        trainer, every = self.trainer, self.options.checkpoint_every
        if self.comm.size == 1:  # no other rank has to know of it first
            trainer.stop_signal = trainer.asked_to_stop
        stopping = trainer.stop_signal is not None
        if done < self.steps and (stopping or (every and done % every == 0)):
            save(trainer, self.state, done)
            if stopping:
                raise Interrupted

    def validation(self, done: int) -> dict[str, float]:
        """Measure and log, while the clock stands still."""
        state, model = self.state, self.trainer.model
        state.clock.stop()
        splits = self.options.splits if done == self.steps else self.options.splits[:1]
        proven = done == self.steps and self.options.plan is not None
        before = fingerprint(model) if proven else ""
        self.job.doing(f"validating after {done} steps", compiling=True)  # it may also be long
        start = time.perf_counter()
        losses = {split: validate(self.trainer, split, done) for split in splits}
        took = time.perf_counter() - start
        weights = {"weights": [before, fingerprint(model)]} if proven else {}
        loss, seconds, snapshot = losses[splits[0]], state.clock.seconds, telemetry.snapshot()
        self.folder.metric({"kind": "telemetry", "step": max(0, done - 1), **snapshot})
        measured = {"loss": loss, "losses": losses, "time": seconds, "val_seconds": took, **weights}
        self.folder.metric({"kind": "val", "step": done, **measured})
        self.folder.log(val_line(done, self.steps, loss, 1000 * seconds, self.options.curve))
        self.folder.log(telemetry.summary(snapshot), show=False)
        self.tell_if_busy()
        state.clock.start()
        return losses

    def log_step(self, stage: Stage, loss: float) -> None:
        done, seconds = stage.step + 1, self.state.clock.seconds
        self.folder.metric({"kind": "train", "step": stage.step, "loss": loss, "lr": stage.lr, "time": seconds})
        self.folder.log(train_line(done, self.steps, loss, 1000 * seconds), show=False)
        self.job.progress.step(done, loss, seconds / done, self.state.tokens / seconds)
        slower = self.pace.after(stage.tokens, seconds)
        if slower:
            self.job.say(slower)
            self.tell_if_busy()

    def tell_if_busy(self) -> None:
        """Say once that other processes keep the machine busy."""
        line = busy_line(self.load.others())
        if line and not self.told_busy:
            self.job.say(line)
            self.told_busy = True

    def finish(self, warmup_seconds: float, status: Status, reason: str | None, losses: dict[str, float]) -> Result:
        """Write the trace, the final checkpoint and result.json."""
        wall_seconds, cpu_seconds = time.perf_counter() - self.wall_start, time.process_time() - self.cpu_start
        state, machine_load = self.state, self.load.others()
        if status == "ok" and self.profiler:
            written = trace.write(self.profiler, self.folder.path, self.comm.rank)
            self.job.say(f"trace of every rank, such as {written}")
        if status == "ok" and self.options.save and state.start < self.steps:  # else it is there already
            save(self.trainer, state, self.steps)
        seconds = state.clock.seconds
        result = Result(
            status=status,
            reason=reason,
            val_loss=losses.get(self.options.splits[0]),
            losses=losses,
            steps=self.steps,
            train_time=seconds,
            tokens=state.tokens,
            tokens_per_second=state.tokens / seconds if seconds else 0.0,
            resumed=state.resumed,
            timed=status == "ok" and not state.resumed,
            peak_memory=telemetry.peak_memory_mib(self.trainer.device),
            finished=now(),
            warmup_seconds=warmup_seconds,
            wall_seconds=wall_seconds,
            cpu_seconds=sum(self.comm.all_gather_object(cpu_seconds)),
            machine_load=machine_load,
        )
        self.folder.finish(result)
        return result

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """The first Ctrl-C or SIGTERM ends the run after the current step, saved; the second one ends it at once."""

        def stop(number: int, frame: FrameType | None) -> None:
            if self.trainer.asked_to_stop is not None:
                raise KeyboardInterrupt
            self.trainer.asked_to_stop = number
            self.job.progress.line("stopping after this step; once more to stop at once")

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
