"""The update rules as functions of tensors: no parameter groups, no state dicts, no reading of values from a GPU.

Functions that end in `_` change their first arguments in place. Rates, decays and betas are floats or 0-D tensors.
Suffixes give shapes: `_Nrc` is a stack of N matrices of r rows and c columns; without one, any shape. A caller
that must leave everything unchanged on a GPU when a gradient is not finite replaces that gradient by zeros and passes
weights, rates and decays multiplied by 0.
"""

import torch
from torch import Tensor

Scalar = float | Tensor


def ema_momentum_(m: Tensor, g: Tensor, weight: Scalar) -> Tensor:
    """m <- (1 - weight) m + weight g, with weight = 1 - mu: the momentum is an average of the gradients."""
    return m.lerp_(g, weight)


def classical_momentum_(m: Tensor, g: Tensor, mu: Scalar) -> Tensor:
    """m <- mu m + g: the momentum is a sum of the gradients, as in https://kellerjordan.github.io/posts/muon/."""
    return m.mul_(mu).add_(g)


def nesterov(g: Tensor, m: Tensor, mu: float, *, ema: bool, out: Tensor) -> Tensor:
    """Nesterov's look-ahead: out = (1 - mu) g + mu m for a momentum that averages (`ema`), g + mu m for one that sums.

    https://kellerjordan.github.io/posts/muon/
    """
    return torch.lerp(g, m, mu, out=out) if ema else torch.add(g, m, alpha=mu, out=out)


def normuon_scale_(u_Nrc: Tensor, v: Tensor, weight: Scalar, spare_Nrc: Tensor) -> Tensor:
    """Divide each row (or column) of the updates by the root of its running mean square; keep each Frobenius norm.

    v <- (1 - weight) v + weight mean(u^2), with weight = 1 - beta2, then u <- u / sqrt(v) * ||u|| / ||u / sqrt(v)||.

    `v` is (N, r, 1) for rows or (N, 1, c) for columns; `spare_Nrc` is overwritten. NorMuon, Li et al.,
    https://arxiv.org/abs/2510.05491, which rescales to a fixed norm where this keeps the norm that u had.
    """
    axis = -1 if v.shape[-1] == 1 and u_Nrc.shape[-2] == v.shape[-2] else -2
    size = u_Nrc.shape[axis]
    mean_square = torch.mul(u_Nrc, u_Nrc, out=spare_Nrc).mean(axis, keepdim=True)
    v.lerp_(mean_square, weight)
    factor = v.clamp(min=1e-10).rsqrt_()
    # Both norms follow from the means, so the update itself is read and written once.
    before = mean_square.sum((-2, -1), keepdim=True).mul_(size).sqrt_()
    after = mean_square.mul(factor.square()).sum((-2, -1), keepdim=True).mul_(size).sqrt_()
    return u_Nrc.mul_(factor.mul_(before / after.clamp(min=1e-10)))


def raise_to_floor(u_Nrc: Tensor, w_Nrc: Tensor, floor: Scalar) -> Tensor:
    """u max(1, floor ||w|| / ||u||), Frobenius norms of each matrix: no update is smaller than a share of its weight.

    Weights that have grown go on learning, as if weight decay had kept them small. The u/w floor of
    https://github.com/KellerJordan/modded-nanogpt/pull/274, where it is 0.35 on NorMuon's updates.
    """
    wanted_N11 = torch.linalg.vector_norm(w_Nrc, dim=(-2, -1), keepdim=True) * floor
    size_N11 = torch.linalg.vector_norm(u_Nrc, dim=(-2, -1), keepdim=True)
    return u_Nrc * (wanted_N11 / size_N11.clamp(min=1e-10)).clamp(min=1)


def decay_(x: Tensor, decay: Scalar) -> Tensor:
    """x <- (1 - decay) x. Decoupled weight decay, Loshchilov and Hutter, https://arxiv.org/abs/1711.05101."""
    return x.mul_(1 - decay)


def cautious_decay_(x: Tensor, u: Tensor, decay: Scalar) -> Tensor:
    """x <- x - decay x where u x >= 0: decay acts only where the update also shrinks the weight.

    Cautious weight decay, Chen et al., https://arxiv.org/abs/2510.12402.
    """
    return x.sub_(x.mul(u * x >= 0).mul_(decay))


def apply_update_(x: Tensor, u: Tensor, rate: Scalar) -> Tensor:
    """x <- x - rate u."""
    return x.sub_(u * rate) if isinstance(rate, Tensor) else x.add_(u, alpha=-rate)


def adam_moments_(m: Tensor, v: Tensor, g: Tensor, beta1: Scalar, beta2: Scalar) -> None:
    """m <- beta1 m + (1 - beta1) g;  v <- beta2 v + (1 - beta2) g^2.

    Adam, Kingma and Ba, https://arxiv.org/abs/1412.6980.
    """
    m.mul_(beta1).add_(g * (1 - beta1))
    v.mul_(beta2).addcmul_(g, g * (1 - beta2))


def adam_apply_(
    x: Tensor, m: Tensor, v: Tensor, rate: Scalar, eps: float, *, decay: Scalar | None, cautious: bool
) -> Tensor:
    """x <- x - rate m / (sqrt(v) + eps), with weight decay unless it is None; `rate` contains the bias corrections.

    `cautious` decays only where update and weight have the same sign (https://arxiv.org/abs/2510.12402), otherwise
    every weight is decayed (AdamW, https://arxiv.org/abs/1711.05101).
    """
    u = m.div(v.sqrt().add_(eps)).mul_(rate)
    if decay is not None and cautious:
        u.add_(x.mul(u * x > 0).mul_(decay))
    elif decay is not None:
        decay_(x, decay)
    return x.sub_(u)
