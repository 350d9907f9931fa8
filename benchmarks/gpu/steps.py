"""The training step of every native recipe, counted: `Trainer.step` itself, on a made-up batch.

The model's forward and backward pass are compiled and have rows of their own, so a step counts what is around them: the
batch on its way to the GPU, the gradients between the ranks, the optimizer, and how often the host waits.
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.gpu.launches import Launches, fake_gpu
from benchmarks.gpu.stages import DOCUMENTS, GPUS, NATIVE
from speedrun.data.loader import Batch
from speedrun.model.attention import Backend
from speedrun.model.gpt import GPT
from speedrun.optim import Snoo
from speedrun.optim.sharded import Comm
from speedrun.recipes import get_recipe
from speedrun.training.config import Options, Recipe
from speedrun.training.device import Machine
from speedrun.training.job import Job
from speedrun.training.progress import Progress
from speedrun.training.runlog import NullRunFolder
from speedrun.training.schedule import Stage
from speedrun.training.step import Trainer

COLLECTIVES = ("reduce-scatter", "all-gather", "all-reduce", "broadcast")


@dataclass(frozen=True)
class Case:
    recipe: str
    track: str
    ranks: int

    @property
    def kinds(self) -> list[str]:
        """The kinds of steps it has, in the order in which they are counted."""
        optim = get_recipe(self.recipe, self.track).optim
        found = [", Adam waits", ", Adam steps"] if optim.every > 1 else [""]
        return found + [", Snoo steps"] * bool(optim.snoo.k)

    @property
    def names(self) -> list[str]:
        where = f"{self.ranks} ranks" if self.ranks > 1 else "1 GPU"
        return [f"step of {self.recipe}, {where}{kind}" for kind in self.kinds]


def cases() -> list[Case]:
    return [Case(name, track, ranks) for name, track in NATIVE for ranks in (GPUS, 1)]


def rows(case: Case, backend: Backend) -> Iterator[dict[str, Any]]:
    """A row for each kind of step, of rank 0, once earlier steps have made the optimizer's state."""
    recipe = get_recipe(case.recipe, case.track)
    before = recipe.optim.every
    with ranks(case.ranks), fake_gpu():
        trainer = made_up_trainer(recipe, backend)
        for step in range(before):
            counted_step(trainer, step)
        for step, name in enumerate(case.names, before):
            if name.endswith("Snoo steps"):
                assert isinstance(trainer.optimizer, Snoo)
                trainer.optimizer.count = 0
            yield {"name": name, **summary(counted_step(trainer, step))}


def counted_step(trainer: Trainer, step: int) -> Launches:
    stage = trainer.recipe.schedule.at(step)
    with Launches() as counted:
        trainer.loss_of = Elsewhere(trainer.model, counted)
        trainer.step(stage, made_up(trainer.recipe, stage))
    return counted


def summary(counted: Launches) -> dict[str, Any]:
    return {
        "launches": counted.launches.total(),
        "syncs": counted.syncs.total(),
        "copies": counted.copies.total(),
        "messages": counted.collectives["message"],
        "passes": counted.passes,
        "collectives": {kind: [counted.collectives[kind], counted.bytes[kind]] for kind in COLLECTIVES},
        "lines": [[line, *numbers] for line, numbers in counted.by_line().items()],
    }


def made_up(recipe: Recipe, stage: Stage) -> Batch:
    ids = torch.zeros(stage.batch_size, stage.seq_len, dtype=torch.long)
    packed = recipe.loader.packing == "documents"
    starts = np.arange(DOCUMENTS) * (stage.seq_len // DOCUMENTS)
    return Batch(ids, ids.clone(), (starts,) * stage.batch_size if packed else None, {}, recipe.loader.max_doc_len)


def made_up_trainer(recipe: Recipe, backend: Backend) -> Trainer:
    device, why = torch.device("cuda:0"), "made up"
    machine = Machine(device, why, torch.bfloat16, why, 1, why, backend, why)
    tokens: Any = SimpleNamespace(vocab_size=recipe.model.vocab_size)
    folder, progress = NullRunFolder(Path("nowhere")), Progress(recipe.schedule.total, quiet=True)
    uncompiled = patch("speedrun.training.step.compiled", lambda model, *_: (model, None))
    with device, uncompiled, patch.object(GPT, "to", lambda model, _: model):  # fake tensors cannot be moved
        trainer = Trainer(Job(recipe, tokens, machine, Options(), folder, progress, Comm.of(None)))
    if trainer.comm.size > 1:
        trainer.comm.small_group = weakref.ref(
            dist.group.WORLD
        )  # it would open a group of gloo, and wait for the others
    return trainer


@contextmanager
def ranks(count: int) -> Iterator[None]:
    """This process as rank 0 of so many, whose collectives give back what is there."""
    if count == 1:
        yield
        return
    all_gather_object = Comm.all_gather_object
    Comm.all_gather_object = lambda self, value: [value] * self.size  # type: ignore[method-assign]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()
        Comm.all_gather_object = all_gather_object  # type: ignore[method-assign]


class Elsewhere:
    """The model as if it were compiled: one node of autograd, whose kernels are not counted here."""

    def __init__(self, model: torch.nn.Module, counted: Launches) -> None:
        self.model, self.counted = model, counted

    def __call__(self, *args: Any, **options: Any) -> Tensor:
        self.counted.passes += 1
        call = functools.partial(self.model, *args, **options)
        found: Tensor = Node.apply(self.counted, call, *self.model.parameters())  # type: ignore[no-untyped-call]
        return found


class Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, counted: Launches, call: Callable[[], Tensor], *weights: Tensor) -> Tensor:
        ctx.counted, ctx.weights = counted, weights
        with counted.elsewhere(), torch.enable_grad():
            ctx.loss = call()
            return ctx.loss.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.counted.elsewhere():
            return None, None, *torch.autograd.grad(ctx.loss, ctx.weights, g, allow_unused=True)
