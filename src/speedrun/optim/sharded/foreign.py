"""An optimizer of another package in the sharded step: every rank trains all of its parameters, all of them alike."""

from typing import Any

from torch import Tensor

from speedrun.optim.finite import DeferredFiniteCheck
from speedrun.optim.protocol import Foreign
from speedrun.optim.state import Group, params_of
from speedrun.optim.work import Work


class ForeignMember(DeferredFiniteCheck, Foreign):
    """The methods of `SpeedrunOptimizer` that a bucket calls, around any `torch.optim.Optimizer`."""

    def is_exact(self, p: Tensor, group: Group) -> bool:
        return False

    def is_due(self, state: dict[str, Any], group: Group) -> bool:
        return True

    def rebase_mantissa(self, p: Tensor) -> None:
        """There is none."""

    def _group_from(self, saved: Group, group: Group) -> Group:
        return {key: value for key, value in saved.items() if key != "params"}

    def _state_from(self, saved: dict[str, Any], *args: Any, **options: Any) -> dict[str, Any]:
        """Unseen: only its optimizer knows what it keeps."""
        return saved

    def _update(self, work: list[Work], finite: float | Tensor) -> None:
        """Let it step on the gradients of all ranks; afterwards each `.grad` is this rank's own again.

        It has no masked step that leaves everything as it was, so on a GPU this waits for `finite`.
        """
        if not float(finite):
            return
        summed = {w.param: w.grad for w in work}
        own = [(p, p.grad) for p in params_of(self.optimizer.param_groups)]
        try:
            for p, _ in own:
                p.grad = summed.get(p)
            self.optimizer.step()
        finally:
            for p, grad in own:
                p.grad = grad
