"""Adam with everything per group: rates, betas, decay, how often it steps.

    optimizer = Adam([{"params": head, "betas": (0.5, 0.95)}, {"params": scalars, "lr_mul": 5.0}], lr=0.008)

With its defaults it is torch's AdamW without decay, and torch's fused kernel does the work. Adam: Kingma and Ba,
https://arxiv.org/abs/1412.6980; decoupled decay: Loshchilov and Hutter, https://arxiv.org/abs/1711.05101.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal, Never

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from speedrun.optim.arguments import arguments, one_number, require_choice, require_number
from speedrun.optim.base import SpeedrunOptimizer
from speedrun.optim.dtensor import local_of
from speedrun.optim.functional import adam_apply_, adam_moments_
from speedrun.optim.muon import Decay, DecayBy
from speedrun.optim.state import Group, require
from speedrun.optim.work import Work

EpsAt = Literal["corrected", "uncorrected"]


class Adam(SpeedrunOptimizer):
    """Adam with decoupled or cautious weight decay.

    Arguments, each also a key of a parameter group:
        lr, lr_mul: the learning rate is their product; `lr_mul` may be a list with one value for each parameter.
        betas: decay of the first and second moment.
        eps, eps_at: added to the root of the second moment after its bias correction (`corrected`, as torch does), or
            before it (`uncorrected`).
        weight_decay, wd_mul, decay: `decoupled` shrinks every weight, `cautious` only where the update shrinks it too.
        decay_by: the decay is multiplied by the learning rate (`lr`, as in AdamW) or by its square (`lr-squared`).
        every: step only on each `every`-th call, on the sum of the gradients since then.
        exact_bf16: keep 16 more bits for bfloat16 weights, which makes them exact float32 (speedrun.optim.exact_bf16).
    """

    own_keys = ("betas", "eps_at")
    required = ("step", "exp_avg", "exp_avg_sq")
    replicated_state = ("step",)

    def __init__(
        self,
        params: ParamsT, lr: float | Tensor = 1e-3, *,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, eps_at: EpsAt = "corrected",
        weight_decay: float = 0.0, decay: Decay = "decoupled", decay_by: DecayBy = "lr",
        every: int = 1, lr_mul: float | list[float] = 1.0, wd_mul: float | list[float] = 1.0,
        exact_bf16: bool = True, **unknown: Never,
    ) -> None:  # fmt: skip
        super().__init__(params, arguments(locals()))

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        for key, choices in (("eps_at", EpsAt), ("decay", Decay), ("decay_by", DecayBy)):
            require_choice(key, group[key], choices)
        betas = group["betas"]
        pair = isinstance(betas, tuple | list) and len(betas) == 2
        good = pair and all(0 <= one_number("betas", b) < 1 for b in betas)
        require(good, "betas", betas, "two numbers, each at least 0 and below 1")
        require_number("eps", group["eps"])
        every = group["every"]
        require(type(every) is int and every >= 1, "every", every, "at least 1, and whole")

    def _state_shapes(self, p: Tensor, group: Group) -> dict[str, tuple[int, ...] | None]:
        shape = tuple(local_of(p).shape)
        return {"step": (), "exp_avg": shape, "exp_avg_sq": shape, "gradient_sum": shape, "waiting": None}

    def _unused_keys(self, group: Group) -> set[str]:
        return {"gradient_sum"} if group["every"] == 1 else set()

    # ------------------------------------------------------------------ step

    def _update(self, work: list[Work], finite: float | Tensor) -> None:
        fused: dict[tuple[float, ...], list[Work]] = defaultdict(list)
        for w in work:
            self._begin(w)
            g = self._gradient(w, finite)
            if g is None:
                continue
            w.grad = g
            if self._fits_fused(w, finite):
                fused[self._numbers(w)].append(w)
            else:
                self._plain(w, finite)
        for numbers, members in fused.items():
            self._fused(numbers, members)

    def is_due(self, state: dict[str, Any], group: Group) -> bool:
        return bool(state.get("waiting", 0) + 1 >= group["every"])

    def _begin(self, w: Work) -> None:
        """All that the group needs, at the first call: torch.distributed.checkpoint makes one to learn the keys."""
        group, state = w.group, w.state
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
        for key in ("exp_avg", "exp_avg_sq", *(["gradient_sum"] if group["every"] > 1 else [])):
            if key not in state:
                wide = torch.promote_types(w.param.dtype, torch.float32)
                state[key] = torch.zeros_like(w.param, dtype=wide, memory_format=torch.preserve_format)
        self._add_mantissa(w)

    def _end_counts(self, *, undo: bool) -> None:
        for state, before in self._counted if undo else ():
            state["waiting"] = before
        self._counted.clear()

    def _gradient(self, w: Work, finite: float | Tensor) -> Tensor | None:
        """The gradient to step on, or None while it is not this parameter's turn.

        With `every` = 2 there is half the work, and tables change more smoothly.
        """
        g = w.grad if isinstance(finite, float) else torch.where(finite > 0, w.grad, 0)
        every, state = w.group["every"], w.state
        waiting = state.get("waiting", 0) + 1
        if every == 1 and waiting == 1:
            return g
        total: Tensor = state["gradient_sum"]
        total.copy_(g) if waiting == 1 else total.add_(g)
        if isinstance(finite, Tensor):
            self._counted.append((state, waiting - 1))
        state["waiting"] = waiting % every
        return None if waiting < every else total

    def _numbers(self, w: Work) -> tuple[float, ...]:
        """lr, betas, eps and decay as torch's kernel wants them."""
        group = w.group
        lr = float(group["lr"]) * w.of("lr_mul")
        beta1, beta2 = group["betas"]
        eps = group["eps"]
        if group["eps_at"] == "uncorrected":  # the kernel adds eps after the correction
            eps /= math.sqrt(1 - beta2 ** (w.state["step"].item() + 1))
        decay = group["weight_decay"] * w.of("wd_mul")
        return lr, beta1, beta2, eps, decay if group["decay_by"] == "lr" else decay * lr

    def _fits_fused(self, w: Work, finite: float | Tensor) -> bool:
        group = w.group
        plain = not (group["decay"] == "cautious" and group["weight_decay"])
        same = w.grad.dtype == w.param.dtype == torch.float32 and w.param.device.type == "cpu"
        tensors = w.param, w.grad, w.state["exp_avg"], w.state["exp_avg_sq"]
        return plain and same and isinstance(finite, float) and share_layout(tensors)

    def _fused(self, numbers: tuple[float, ...], members: list[Work]) -> None:
        lr, beta1, beta2, eps, decay = numbers
        params, grads = [w.param for w in members], [w.grad for w in members]
        m, v, steps = ([w.state[key] for w in members] for key in ("exp_avg", "exp_avg_sq", "step"))
        adamw(
            params, grads, m, v, [], steps,
            fused=True, amsgrad=False, beta1=beta1, beta2=beta2, lr=lr, weight_decay=decay, eps=eps, maximize=False,
        )  # fmt: skip
        increment_version(params)  # the kernel does not count its writes for autograd

    def _plain(self, w: Work, finite: float | Tensor) -> None:
        group, state = w.group, w.state
        x = self._read(w)
        g = w.grad.to(x.dtype)
        m, v = state["exp_avg"], state["exp_avg_sq"]
        beta1, beta2 = group["betas"]
        state["step"] += 1 if isinstance(finite, float) else finite.to(state["step"].device)
        t = state["step"].item()
        keep1, keep2, bias1 = beta1, beta2, 1 - beta1**t if t else 1.0  # a masked step may be the first
        if isinstance(finite, Tensor):  # with 0 both moments stay
            keep1, keep2 = 1 - (1 - keep1) * finite, 1 - (1 - beta2) * finite
        adam_moments_(m, v, g, keep1, keep2)
        lr = float(group["lr"]) * w.of("lr_mul")
        root = math.sqrt(1 - beta2**t) if t else 1.0
        decay = group["weight_decay"] * w.of("wd_mul") * (lr if group["decay_by"] == "lr" else lr * lr) * finite
        adam_apply_(
            x, m, v,
            rate=lr * root / bias1 * finite,
            eps=group["eps"] * (root if group["eps_at"] == "corrected" else 1.0),
            decay=decay if group["weight_decay"] else None,
            cautious=group["decay"] == "cautious",
        )  # fmt: skip
        self._write(w, x)


def share_layout(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors of one shape are dense and have their elements in the same order in memory.

    torch's fused CPU kernel walks memory from the first element on and reads no strides.
    """
    first = tensors[0]
    dense = torch.empty_like(first, device="meta").stride() == first.stride()  # which it keeps of dense tensors alone
    return all(x.is_contiguous() for x in tensors) or (dense and all(x.stride() == first.stride() for x in tensors))
