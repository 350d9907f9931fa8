"""Muon and NorMuon: momentum, then the nearest orthogonal matrix as the update.

An orthogonal update changes all directions of a matrix by the same amount, so all are learned equally fast.

    optimizer = NorMuon(matrices, lr=0.02)                 # hidden matrices only: see speedrun.optim.route
    optimizer = Muon([{"params": qkv, "blocks": 3}, {"params": rest}], lr=0.02)

The step collects all blocks of one shape, from whichever group, in one stack and orthogonalises them together. A
*block* is what is orthogonalised: usually the whole matrix; Q, K and V of a fused matrix apart with `blocks=3`; heads
apart with `blocks=heads`, or `blocks=(1, heads)` where they lie side by side in the columns.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from speedrun.optim import functional as F
from speedrun.optim.base import SpeedrunOptimizer, Work
from speedrun.optim.dtensor import local_of, part_of, whole_of
from speedrun.optim.orthogonalize import Method, Orthogonalizer, check_method, fast_dtype
from speedrun.optim.polynomial import Coefficients, multiplications
from speedrun.optim.state import Group, named, require, value_at

Scale = Literal["none", "unit-variance", "spectral", "match-rms-adamw"]
Decay = Literal["decoupled", "cautious"]  # cautious: decay does not pull against what is being learned
DecayBy = Literal["lr", "lr-squared"]
MomentumForm = Literal["ema", "classical"]
Matrix = Literal["flatten", "batch"]
Blocks = int | tuple[int, int]

CHUNK_BYTES = 40 * 2**20  # of one stack in float32: bounds the memory of a step; larger ones were not faster
PER_WEIGHT = 256.0  # multiplications in the time of everything else that is done to a weight, measured on a CPU
LEAST = 4  # matrices in a stack however large they are: fewer were slower
KEPT = 16  # orthogonalizers with their memory; models whose matrices do not all get gradients need ever others


def scale_of(rule: str, rows: int, cols: int) -> float:
    """Factor of the orthogonal update of a block. Singular values of 1 mean a mean square of 1 / max(rows, cols)."""
    if rule == "unit-variance":  # entries of an update have variance 1, whatever its shape
        return math.sqrt(max(rows, cols))
    if rule == "spectral":  # larger steps for tall matrices, so that a step changes all outputs by the same amount
        return math.sqrt(max(1.0, rows / cols))
    if rule == "match-rms-adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    return 1.0


class Grid:
    """How a parameter falls into blocks: views of `lead` matrices, each cut into a x b blocks of (rows, cols)."""

    def __init__(self, shape: Sequence[int], matrix: str, blocks: Blocks, name: str) -> None:
        self.shape = tuple(shape)
        self.a, self.b = (blocks, 1) if isinstance(blocks, int) else blocks
        if len(self.shape) < 2:
            raise ValueError(
                f"Muon cannot train {name}: it has {len(self.shape)} dimension{'s' * (len(self.shape) != 1)}, "
                "and needs at least 2. Give vectors and scalars to Adam; speedrun.optim.route(model) does that."
            )
        if matrix == "batch":
            self.lead, height, width = math.prod(self.shape[:-2]), self.shape[-2], self.shape[-1]
        else:
            self.lead, height, width = 1, self.shape[0], math.prod(self.shape[1:])
        if self.a < 1 or self.b < 1 or height % self.a or width % self.b:
            raise ValueError(
                f"blocks is {blocks!r}, which does not divide the {height} x {width} matrix of {name}; "
                "give the number of blocks in its rows, or (in rows, in columns)."
            )
        self.rows, self.cols = height // self.a, width // self.b
        self.count = self.lead * self.a * self.b

    def cut(self, x: Tensor) -> Tensor:
        """A tensor of the parameter's shape as (lead, a, b, rows, cols); a view when it is contiguous."""
        return x.reshape(self.lead, self.a, self.rows, self.b, self.cols).transpose(2, 3)

    def stack_view(self, x_Nrc: Tensor) -> Tensor:
        """This parameter's part of a stack in the layout of `cut`."""
        return x_Nrc.view(self.lead, self.a, self.b, self.rows, self.cols)

    def join(self, x_Nrc: Tensor) -> Tensor:
        """Back to the parameter's shape; a view unless blocks lie side by side in the columns."""
        return self.stack_view(x_Nrc).transpose(2, 3).reshape(self.shape)


Stack = list[tuple[Work, Grid]]


class Muon(SpeedrunOptimizer):
    """Momentum orthogonalised, for the matrices inside a network.

    Arguments, each also a key of a parameter group:
        lr: the update of a block has the size lr * lr_mul * scale.
        momentum, nesterov, momentum_form: `ema` averages (m <- mu m + (1 - mu) g), `classical` sums (m <- mu m + g).
        method, steps, coefficients: see `orthogonalize`.
        scale: `spectral` is sqrt(max(1, rows/cols)); `unit-variance` is sqrt(max(rows, cols));
            `match-rms-adamw` is 0.2 of that, so that a learning rate tuned for AdamW fits; `none` is 1.
        weight_decay, decay: `decoupled` shrinks every weight, `cautious` only where the update shrinks it too.
        decay_by: `lr` multiplies the decay by lr * lr_mul, as AdamW does; `lr-squared` by lr * (lr * lr_mul * scale).
        update_ema: the applied update is an average with this much of the previous ones; 0 turns it off.
        lr_mul, wd_mul, blocks, matrix: one value, or a list with one for each parameter of the group.
        matrix: how more than two dimensions are read: `flatten` (rows, everything else), for convolutions;
            `batch` (..., rows, columns), for several matrices in one tensor.
        exact_bf16: keep 16 more bits for bfloat16 weights, which makes them exact float32 (speedrun.optim.exact_bf16).
        dtype: of the orthogonalisation; None takes what the device is fast at.
    """

    per_parameter: tuple[str, ...] = ("lr_mul", "wd_mul", "blocks", "matrix")
    whole_matrices = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.02,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        momentum_form: MomentumForm = "ema",
        method: Method = "polar-express",
        steps: int = 5,
        coefficients: Coefficients | None = None,
        scale: Scale = "spectral",
        weight_decay: float = 0.0,
        decay: Decay = "decoupled",
        decay_by: DecayBy = "lr",
        update_ema: float = 0.0,
        lr_mul: float | list[float] = 1.0,
        wd_mul: float | list[float] = 1.0,
        blocks: Blocks | list[Blocks] = 1,
        matrix: Matrix | list[Matrix] = "flatten",
        exact_bf16: bool = True,
        dtype: torch.dtype | None = None,
        **more: Any,
    ) -> None:
        if more and type(self) is Muon:
            raise TypeError(f"Muon has no argument {next(iter(more))!r}.")
        defaults = {
            "lr": lr, "momentum": momentum, "nesterov": nesterov, "momentum_form": momentum_form, "method": method,
            "steps": steps, "coefficients": coefficients, "scale": scale, "weight_decay": weight_decay, "decay": decay,
            "decay_by": decay_by, "update_ema": update_ema, "lr_mul": lr_mul, "wd_mul": wd_mul, "blocks": blocks,
            "matrix": matrix, "exact_bf16": exact_bf16, "dtype": dtype, **more,
        }  # fmt: skip
        super().__init__(params, defaults)

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        check_method(group["method"], group["steps"], group["coefficients"])
        kinds = {"scale": Scale, "decay": Decay, "decay_by": DecayBy, "momentum_form": MomentumForm}
        for key, choices in kinds.items():
            require(group[key] in get_args(choices), key, group[key], "one of: " + ", ".join(get_args(choices)))
        for key in ("momentum", "update_ema"):
            require(0 <= group[key] < 1, key, group[key], "at least 0 and below 1")
        for index, (name, p) in enumerate(named(group, len(self.param_groups) - 1)):
            matrix = value_at(group["matrix"], index)
            require(matrix in get_args(Matrix), "matrix", matrix, "one of: " + ", ".join(get_args(Matrix)))
            Grid(p.shape, matrix, value_at(group["blocks"], index), name)

    def _state_shapes(self, p: Tensor, group: Group) -> dict[str, tuple[int, ...] | None]:
        shape = tuple(local_of(p).shape)
        return {"momentum_buffer": shape, "update_buffer": shape}

    def _state_layout(self, p: Tensor, group: Group) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        wide = torch.float64 if p.dtype == torch.float64 else torch.float32
        unused = set() if group["update_ema"] else {"update_buffer"}
        return {key: (shape or (), wide) for key, shape in self._state_shapes(p, group).items() if key not in unused}

    def effort(self, p: Tensor, group: Group, index: int) -> float:
        """The multiplications of its orthogonalisation, and its passes through memory as multiplications."""
        grid = Grid(p.shape, value_at(group["matrix"], index), value_at(group["blocks"], index), "")
        dtype = group["dtype"] or fast_dtype(p.device)
        products = multiplications(grid.rows, grid.cols, group["steps"], dtype, p.device)
        return grid.count * products + PER_WEIGHT * p.numel()

    # ------------------------------------------------------------------ step

    def _update(self, work: list[Work], finite: float | Tensor) -> None:
        for bucket in self._buckets(work):
            self._step_bucket(bucket, finite)

    def _bucket_key(self, w: Work, grid: Grid) -> tuple[Any, ...]:
        """Blocks with equal keys go through the orthogonaliser together; tall and wide ones of the same sides, too."""
        g = w.group
        triples = None if g["coefficients"] is None else tuple(map(tuple, g["coefficients"]))
        dtype = g["dtype"] or (torch.float64 if w.param.dtype == torch.float64 else fast_dtype(w.param.device))
        return w.param.device, *sorted((grid.rows, grid.cols)), g["method"], g["steps"], triples, dtype

    def _stack_key(self, w: Work, grid: Grid) -> tuple[Any, ...]:
        """Blocks of one bucket with equal keys are one stack."""
        return grid.rows, grid.cols

    def _buckets(self, work: list[Work]) -> Iterator[list[Stack]]:
        buckets: dict[tuple[Any, ...], Stack] = defaultdict(list)
        for w in work:
            grid = Grid(w.shape, w.of("matrix"), w.of("blocks"), w.name)
            buckets[self._bucket_key(w, grid)].append((w, grid))
        for members in buckets.values():
            grid = members[0][1]
            limit = max(LEAST, CHUNK_BYTES // (4 * grid.rows * grid.cols) // 2 * 2)  # even: pairs of cores stay busy
            chunk: Stack = []
            for member in members:
                if chunk and sum(g.count for _, g in [*chunk, member]) > limit:
                    yield self._stacks(chunk)
                    chunk = []
                chunk.append(member)
            yield self._stacks(chunk)

    def _stacks(self, members: Stack) -> list[Stack]:
        stacks: dict[tuple[Any, ...], Stack] = defaultdict(list)
        for w, grid in members:
            stacks[self._stack_key(w, grid)].append((w, grid))
        return list(stacks.values())

    def _step_bucket(self, bucket: list[Stack], finite: float | Tensor) -> None:
        counts = [[grid.count for _, grid in stack] for stack in bucket]
        orthogonalizer = self._orthogonalizer(bucket, tuple(map(sum, counts)))
        for stack, stack_Nrc, parts in zip(bucket, orthogonalizer.stacks, counts, strict=True):
            for (w, grid), part in zip(stack, stack_Nrc.split(parts), strict=True):
                self._momentum(w, grid.stack_view(part), grid, finite)
        updates = orthogonalizer.run()
        for stack, out_Nrc, spare_Nrc, parts in zip(bucket, updates, orthogonalizer.stacks, counts, strict=True):
            out_Nrc = self._normalize(stack, out_Nrc.to(spare_Nrc.dtype), finite, spare_Nrc)
            for (w, grid), part in zip(stack, out_Nrc.split(parts), strict=True):
                self._apply(w, grid.join(part), scale_of(w.group["scale"], grid.rows, grid.cols), finite)

    def _orthogonalizer(self, bucket: list[Stack], counts: tuple[int, ...]) -> Orthogonalizer:
        """Buckets of the same shapes share one; it keeps its memory from step to step."""
        first, grid = bucket[0][0]
        wide = torch.float64 if first.param.dtype == torch.float64 else torch.float32
        shapes = tuple((n, stack[0][1].rows, stack[0][1].cols) for n, stack in zip(counts, bucket, strict=True))
        key = shapes, wide, self._bucket_key(first, grid)
        known: dict[Any, Orthogonalizer] = self.__dict__.setdefault("_orthogonalizers", {})
        found = known.pop(key, None)
        if found is None:
            _, _, _, method, steps, triples, dtype = self._bucket_key(first, grid)
            like = torch.empty(0, dtype=wide, device=first.param.device)
            found = Orthogonalizer(shapes, method, steps, triples, dtype, like)
        known[key] = found  # the latest is last
        if len(known) > KEPT:
            del known[next(iter(known))]
        return found

    def _momentum(self, w: Work, part: Tensor, grid: Grid, finite: float | Tensor) -> None:
        """Advance the momentum, and write what is to be orthogonalised into the stack."""
        mu, wide = w.group["momentum"], part.dtype
        if "momentum_buffer" not in w.state:
            w.state["momentum_buffer"] = torch.zeros_like(w.param, dtype=wide, memory_format=torch.contiguous_format)
        m: Tensor = w.state["momentum_buffer"]
        g = w.grad.to(wide)
        if isinstance(finite, Tensor):
            g = torch.where(finite > 0, g, 0)
        if w.group["momentum_form"] == "ema":
            F.ema_momentum_(m, g, (1 - mu) * finite)
        else:
            F.classical_momentum_(m, g, mu if isinstance(finite, float) else 1 - (1 - mu) * finite)
        if w.sharded is None:
            self._look_ahead(w.group, grid.cut(g), grid.cut(m), part)
        else:
            mine = torch.empty_like(m)
            self._look_ahead(w.group, g, m, mine)
            part.copy_(grid.cut(whole_of(mine, w.sharded)))

    @staticmethod
    def _look_ahead(group: Group, g: Tensor, m: Tensor, out: Tensor) -> None:
        """Nesterov's mixture of gradient and momentum, or the momentum alone."""
        if group["nesterov"]:
            F.nesterov(g, m, group["momentum"], ema=group["momentum_form"] == "ema", out=out)
        else:
            out.copy_(m)

    def _normalize(self, stack: Stack, out_Nrc: Tensor, finite: float | Tensor, spare_Nrc: Tensor) -> Tensor:
        return out_Nrc

    def _apply(self, w: Work, update: Tensor, scale: float, finite: float | Tensor) -> None:
        """Weight decay and the step itself, on the master."""
        group = w.group
        if w.sharded is not None:
            update = part_of(update, w.sharded)
        smooth = group["update_ema"]
        if smooth:  # smoother steps: an average of the orthogonalised updates
            if "update_buffer" not in w.state:
                w.state["update_buffer"] = torch.zeros_like(update, memory_format=torch.contiguous_format)
            update = F.ema_momentum_(w.state["update_buffer"], update, (1 - smooth) * finite)
        lr = float(group["lr"]) * w.of("lr_mul")
        size = lr * scale * finite
        decay = group["weight_decay"] * w.of("wd_mul")
        decay *= lr * finite if group["decay_by"] == "lr" else float(group["lr"]) * size
        x = self._read(w)
        if group["weight_decay"] and group["decay"] == "decoupled":
            F.decay_(x, decay)
        elif group["weight_decay"]:
            F.cautious_decay_(x, update, decay)
        self._write(w, F.apply_update_(x, update, size))


class NorMuon(Muon):
    """Muon whose update is evened out between rows (or columns) by a running second moment.

    Rows whose updates were large in earlier steps get smaller ones.

    Arguments beside Muon's:
        beta2: decay of the second moment.
        axis: the axis that is averaged over: -1 keeps one number per row, -2 one per column; None averages over the
            columns unless the block has more columns than rows. One value, or a list with one for each parameter.

    The Frobenius norm of every update stays what it was, so learning rates are those of Muon.
    """

    per_parameter = (*Muon.per_parameter, "axis")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.02,
        *,
        beta2: float = 0.95,
        axis: int | list[int | None] | None = None,
        **options: Any,
    ) -> None:
        unknown = set(options) - set(Muon.__init__.__kwdefaults__ or ())
        if unknown:
            raise TypeError(f"NorMuon has no argument {sorted(unknown)[0]!r}.")
        super().__init__(params, lr, beta2=beta2, axis=axis, **options)

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        require(0 <= group["beta2"] < 1, "beta2", group["beta2"], "at least 0 and below 1")
        for axis in group["axis"] if isinstance(group["axis"], list) else [group["axis"]]:
            require(axis in (None, -1, -2), "axis", axis, "-1, -2 or None")

    def _state_shapes(self, p: Tensor, group: Group) -> dict[str, tuple[int, ...] | None]:
        index = next(i for i, q in enumerate(group["params"]) if q is p)
        grid = Grid(p.shape, value_at(group["matrix"], index), value_at(group["blocks"], index), "")
        return {
            **super()._state_shapes(p, group),
            "second_moment": self._second_shape(grid, value_at(group["axis"], index)),
        }

    @staticmethod
    def _second_shape(grid: Grid, axis: int | None) -> tuple[int, int, int]:
        axis = axis or (-1 if grid.rows >= grid.cols else -2)
        return (grid.count, grid.rows, 1) if axis == -1 else (grid.count, 1, grid.cols)

    def _stack_key(self, w: Work, grid: Grid) -> tuple[Any, ...]:
        return *super()._stack_key(w, grid), self._second_shape(grid, w.of("axis"))[1:], w.group["beta2"]

    def _normalize(self, stack: Stack, out_Nrc: Tensor, finite: float | Tensor, spare_Nrc: Tensor) -> Tensor:
        for w, grid in stack:
            if "second_moment" not in w.state:
                w.state["second_moment"] = out_Nrc.new_zeros(self._second_shape(grid, w.of("axis")))
        moments: list[Tensor] = [w.state["second_moment"] for w, _ in stack]
        second = torch.cat(moments)
        F.normuon_scale_(out_Nrc, second, (1 - stack[0][0].group["beta2"]) * finite, spare_Nrc)
        for moment, fresh in zip(moments, second.split([len(m) for m in moments]), strict=True):
            moment.copy_(fresh)
        return out_Nrc
