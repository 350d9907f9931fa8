"""Everything a checkpoint holds: weights, optimizer, and where the run is."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from speedrun.optim import Snoo
from speedrun.training import checkpoint
from speedrun.training.clock import Clock
from speedrun.training.step import Trainer


@dataclass
class TrainState:
    """Where a run is, beside its weights and its optimizer."""

    clock: Clock
    start: int = 0
    """How many steps had been done when this process began."""
    loader: dict[str, Any] | None = None
    """State of the loader after the last batch that was trained on."""
    tokens: int = 0
    resumed: bool = False


def save(trainer: Trainer, state: TrainState, done: int) -> None:
    """Write a checkpoint after `done` steps. All ranks must call it; rank 0 writes. It fits any number of ranks."""
    job, comm = trainer.job, trainer.comm
    job.doing(f"saving after {done} steps")
    states = trainer.optimizer.full_state_dict()
    weights = {checkpoint.WEIGHTS + name: exact(trainer, p) for name, p in trainer.model.named_parameters()}
    if comm.rank == 0:
        for known in states.values():
            for key in ("mantissa", "checksum"):  # the exact weights are stored, in place of their upper halves
                known.pop(key, None)
        tensors, numbers = checkpoint.flatten(states)
        description = {
            "optimizer": numbers,
            "loader": state.loader,
            "clock": state.clock.seconds,
            "tokens": state.tokens,
            "micro_batch_size": trainer.micro_batch_size,
            "seed": job.options.seed,
            "threads": job.machine.threads,
        }
        place, keep = job.folder.checkpoints, job.options.keep
        checkpoint.save(place, done, tensors | weights, description, keep=keep, notice=job.say)
    comm.all_gather_object(None)  # no rank goes on, or ends, before it is on disk


def exact(trainer: Trainer, p: nn.Parameter) -> Tensor:
    """The value a checkpoint holds: float32 also for a weight whose lower half the optimizer keeps."""
    kept = trainer.recipe.optim.weights == "exact-bf16" and p.dtype == torch.bfloat16
    return trainer.optimizer.master(p) if kept else p.detach()


def restore(trainer: Trainer, saved: checkpoint.Checkpoint) -> TrainState:
    """Put weights and optimizer into the state of a checkpoint; returns the rest of it."""
    weights = saved.weights
    with torch.no_grad():
        for name, p in trainer.model.named_parameters():
            # Into the existing storage, whose alignment the math library may depend on.
            p.copy_(weights[name])
    trainer.optimizer.load_full_state_dict(checkpoint.unflatten(saved.tensors, saved.state["optimizer"]))
    if trainer.recipe.optim.weights == "exact-bf16":
        for name, p in trainer.model.named_parameters():
            if p.dtype == torch.bfloat16:
                trainer.optimizer.set_master(p, weights[name].to(trainer.device))
    if isinstance(trainer.optimizer, Snoo):
        trainer.optimizer.count = saved.step  # its own count is not stored: it is the number of steps
    clock = Clock(trainer.device, saved.state["clock"])
    return TrainState(clock, saved.step, saved.state["loader"], saved.state["tokens"], resumed=True)
