"""Are the gradients finite? On a CPU the answer is there at once; a GPU's is read with the next step."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from speedrun.optim.work import Work


class NonFiniteGradient(ValueError):
    """A gradient is NaN or infinite. No weight and no state has changed."""


class DeferredFiniteCheck:
    """What an optimizer keeps of the answer until its next step."""

    _flag: tuple[Tensor, Any] | None = None  # on a GPU: whether the gradients of the last step were finite

    def _defer_check(self, finite: Tensor) -> None:
        """Let the answer travel to the CPU while the GPU works on; the next step reads it."""
        if finite.device.type != "cuda":
            self._flag = (finite, None)
            return
        answer = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(finite, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._flag = (answer, event)

    def _raise_deferred(self) -> None:
        if self._flag is None:
            return
        answer, event = self._flag
        self._flag = None
        if event is not None:
            event.synchronize()
        if not answer.item():
            raise NonFiniteGradient(
                "A gradient of the previous step was not finite (NaN or infinite); that step changed no weight. "
                "Skip such steps, lower the learning rate, or clip the gradients."
            )

    def _end_counts(self, *, undo: bool) -> None:
        """The answer of the last step is known; where it was no, what that step counted on the CPU is taken back."""


def raise_deferred(optimizers: Sequence[Any]) -> None:
    """Raise NonFiniteGradient if the last step of these optimizers, on a GPU, was masked."""
    try:
        for optimizer in optimizers:
            optimizer._raise_deferred()
    except NonFiniteGradient:
        for optimizer in optimizers:
            optimizer._end_counts(undo=True)
        raise
    for optimizer in optimizers:
        optimizer._end_counts(undo=False)


def is_synchronous(work: list[Work]) -> bool:
    """Whether reading a value does not wait for a device: on a CPU."""
    return not work or work[0].param.device.type == "cpu"


def all_finite(g: Tensor) -> bool:
    """A sum is one quick pass; only when it is not finite (it may also overflow) is every value looked at."""
    total = g.sum(dtype=torch.float32 if g.itemsize < 4 else None).item()
    return math.isfinite(total) or bool(g.isfinite().all())
