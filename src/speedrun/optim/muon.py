"""Muon and NorMuon: momentum, then the nearest orthogonal matrix as the update.

An orthogonal update changes all directions of a matrix by the same amount, so all are learned equally fast. Muon:
Keller Jordan et al., https://kellerjordan.github.io/posts/muon/; NorMuon: Li et al., https://arxiv.org/abs/2510.05491.

    optimizer = NorMuon(matrices, lr=0.02)                 # hidden matrices only: see speedrun.optim.route
    optimizer = Muon([{"params": qkv, "blocks": 3}, {"params": rest}], lr=0.02)

The step collects all blocks of one shape, from whichever group, in one stack and orthogonalises them together. A
*block* is what is orthogonalised: usually the whole matrix; Q, K and V of a fused matrix apart with `blocks=3`, or
`blocks=[32, 16, 16]` where they differ in height; heads apart with `blocks=heads`, or `blocks=(1, heads)` where they
lie side by side in the columns. See speedrun.optim.blocks.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Literal, Never

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from speedrun.optim import functional as F
from speedrun.optim.arguments import arguments, require_choice, require_number
from speedrun.optim.base import SpeedrunOptimizer
from speedrun.optim.blocks import BlockLayout, Blocks, Matrix, block_layouts, list_blocks
from speedrun.optim.dtensor import gather_full, local_of, local_part
from speedrun.optim.orthogonalize import Method, Orthogonalizer, check_method, fast_dtype
from speedrun.optim.polynomial import Coefficients, multiplications
from speedrun.optim.protocol import Sharding
from speedrun.optim.spread import OwnedMatrix, Spread, group_by_mesh
from speedrun.optim.state import Group, named, require, value_at
from speedrun.optim.work import Work

Scale = Literal["unit-variance", "spectral", "match-rms-adamw", "unit-rms-norm"]
Decay = Literal["decoupled", "cautious"]  # cautious: decay does not pull against what is being learned
DecayBy = Literal["lr", "lr-squared"]
MomentumForm = Literal["ema", "classical"]
Axis = int | None

CHUNK_BYTES = 40 * 2**20  # of one stack in float32: bounds the memory of a step; larger ones were not faster
WEIGHT_COST = 256.0  # multiplications in the time of everything else that is done to a weight, measured on a CPU
MIN_STACK = 4  # matrices in a stack however large they are: fewer were slower
CACHED = 16  # orthogonalizers with their memory; with changing sets of gradients, steps need changing shapes


def update_scale(rule: Scale | None, rows: int, cols: int) -> float:
    """Factor of the orthogonal update of a block. Singular values of 1 mean a mean square of 1 / max(rows, cols)."""
    return {
        None: 1.0,
        # Entries of an update have variance 1: an early record, https://github.com/KellerJordan/modded-nanogpt.
        "unit-variance": math.sqrt(max(rows, cols)),
        # A step changes all outputs by the same amount: Keller Jordan, https://kellerjordan.github.io/posts/muon/.
        "spectral": math.sqrt(max(1.0, rows / cols)),
        # Inputs of root mean square 1 change outputs by at most 1: Scion, https://arxiv.org/abs/2502.07529.
        "unit-rms-norm": math.sqrt(rows / cols),
        # Updates as large as AdamW's: Moonlight, https://arxiv.org/abs/2502.16982.
        "match-rms-adamw": 0.2 * math.sqrt(max(rows, cols)),
    }[rule]


Stack = list[tuple[Work, BlockLayout]]


class Muon(SpeedrunOptimizer):
    """Momentum orthogonalised, for the matrices inside a network.

    Arguments, each also a key of a parameter group:
        lr: the update of a block has the size lr * lr_mul * scale.
        momentum, nesterov, momentum_form: `ema` averages (m <- mu m + (1 - mu) g), `classical` sums (m <- mu m + g).
        method, steps, coefficients: see `orthogonalize`.
        scale: `spectral` is sqrt(max(1, rows/cols)); `unit-rms-norm` is sqrt(rows/cols), also below 1;
            `unit-variance` is sqrt(max(rows, cols)); `match-rms-adamw` is 0.2 of that, so that a learning rate tuned
            for AdamW fits; None is 1. docs/optimizers.md has the names that others give them.
        weight_decay, decay: `decoupled` shrinks every weight, `cautious` only where the update shrinks it too.
        decay_by: `lr` multiplies the decay by lr * lr_mul, as AdamW does; `lr-squared` by lr * (lr * lr_mul * scale).
        update_ema: the applied update is an average with this much of the previous ones; None turns it off.
        update_floor: a block's update, before lr, has at least this share of the Frobenius norm of its weights; 0.35 is
            usual, with little weight decay or none. None turns it off.
        lr_mul, wd_mul, blocks, matrix, transposed: one value, or a list with one for each parameter of the group.
        blocks: how many equal ones in the rows, (in rows, in columns), or a list with the height of each.
        matrix: how more than two dimensions are read: `flatten` (rows, everything else), for convolutions;
            `batch` (..., rows, columns), for several matrices in one tensor.
        transposed: whether inputs are stored as rows, as in Conv1D of transformers; such a parameter is trained as its
            transpose would be, and `blocks` are those of the transpose.
        exact_bf16: keep 16 more bits for bfloat16 weights, which makes them exact float32 (speedrun.optim.exact_bf16).
        dtype: of the orthogonalisation; None takes what the device is fast at.
    """

    per_parameter: tuple[str, ...] = ("lr_mul", "wd_mul", "blocks", "matrix", "transposed")
    own_keys: tuple[str, ...] = ("method", "momentum_form")
    required: tuple[str, ...] = ("momentum_buffer",)
    sharding: Sharding = "owned"
    replicated_state: tuple[str, ...] = ()  # computed from whole matrices: of a DTensor the same on all ranks

    def __init__(
        self,
        params: ParamsT, lr: float | Tensor = 0.02, *,
        momentum: float = 0.95, nesterov: bool = True, momentum_form: MomentumForm = "ema",
        method: Method = "polar-express", steps: int = 5, coefficients: Coefficients | None = None,
        scale: Scale | None = "spectral", update_ema: float | None = None, update_floor: float | None = None,
        weight_decay: float = 0.0, decay: Decay = "decoupled", decay_by: DecayBy = "lr",
        lr_mul: float | list[float] = 1.0, wd_mul: float | list[float] = 1.0,
        blocks: Blocks | list[Blocks] = 1, matrix: Matrix | list[Matrix] = "flatten",
        transposed: bool | list[bool] = False, exact_bf16: bool = True, dtype: torch.dtype | None = None,
        **unknown: Never,
    ) -> None:  # fmt: skip
        super().__init__(params, arguments(locals()))

    def _check_group(self, group: Group) -> None:
        list_blocks(group)
        super()._check_group(group)
        check_method(group["method"], group["steps"], group["coefficients"])
        kinds = {"scale": Scale | None, "decay": Decay, "decay_by": DecayBy, "momentum_form": MomentumForm}
        for key, choices in kinds.items():
            require_choice(key, group[key], choices)
        require_number("momentum", group["momentum"], below=1)
        for key, end in ("update_ema", 1), ("update_floor", math.inf):
            if group[key] is not None:
                require_number(key, group[key], below=end)
        for index, (name, p) in enumerate(named(group, len(self.param_groups) - 1)):
            block_layouts(p.shape, group, index, name)

    def _state_shapes(self, p: Tensor, group: Group) -> dict[str, tuple[int, ...] | None]:
        shape = tuple(local_of(p).shape)
        return {"momentum_buffer": shape, "update_buffer": shape}

    def _unused_keys(self, group: Group) -> set[str]:
        return set() if group["update_ema"] else {"update_buffer"}

    def cost(self, p: Tensor, group: Group, index: int) -> float:
        """The multiplications of its orthogonalisation, and its passes through memory as multiplications."""
        how = group["steps"], group["dtype"] or fast_dtype(p.device), p.device
        layouts = block_layouts(p.shape, group, index)
        return sum(g.count * multiplications(g.rows, g.cols, *how) for g in layouts) + WEIGHT_COST * p.numel()

    # ------------------------------------------------------------------ step

    def _update(self, work: list[Work], finite: float | Tensor) -> None:
        for stacks in self._by_shape([w for w in work if w.sharded is None]):
            self._step_same_shape(stacks, finite)
        for shared in group_by_mesh(work):
            self._step_shared(shared, finite)

    def _step_shared(self, work: list[Work], finite: float | Tensor) -> None:
        """DTensors of one mesh: momentum and weights in parts, what is orthogonalised whole, spread over the ranks."""
        spread = Spread(work, [self.cost(w.sharded, w.group, w.index) for w in work])
        for stacks in self._by_shape(spread.to_owners([self._momentum_update(w, finite) for w in work])):
            self._step_same_shape(stacks, finite)
        for w, update in zip(work, spread.to_all([self._whole_shapes(w) for w in work]), strict=True):
            self._apply(w, update, finite)

    def _whole_shapes(self, w: Work) -> dict[str, tuple[int, ...]]:
        """Of what owners of matrices learn and all ranks of the mesh keep."""
        return {
            key: tuple(w.state[key].shape) if key in w.state else self._state_shapes(w.sharded, w.group)[key] or ()
            for key in self.replicated_state
        }

    def _shape_key(self, w: Work, layout: BlockLayout) -> tuple[Any, ...]:
        """Blocks with equal keys go through the orthogonaliser together; tall and wide ones of the same sides, too."""
        g = w.group
        triples = None if g["coefficients"] is None else tuple(map(tuple, g["coefficients"]))
        dtype = g["dtype"] or (torch.float64 if w.param.dtype == torch.float64 else fast_dtype(w.param.device))
        return w.param.device, *sorted((layout.rows, layout.cols)), g["method"], g["steps"], triples, dtype

    def _stack_key(self, w: Work, layout: BlockLayout) -> tuple[Any, ...]:
        """Blocks of one size with equal keys are one stack."""
        return layout.rows, layout.cols

    def _by_shape(self, work: list[Work]) -> Iterator[list[Stack]]:
        alike: dict[tuple[Any, ...], Stack] = defaultdict(list)
        for w in work:
            for layout in block_layouts(w.shape, w.group, w.index):
                alike[self._shape_key(w, layout)].append((w, layout))
        for members in alike.values():
            layout = members[0][1]
            fitting = CHUNK_BYTES // (4 * layout.rows * layout.cols) // 2 * 2  # even: pairs of cores stay busy
            limit = max(MIN_STACK, fitting)
            chunks: list[Stack] = [[]]
            for member in members:
                if chunks[-1] and sum(g.count for _, g in [*chunks[-1], member]) > limit:
                    chunks.append([])
                chunks[-1].append(member)
            yield from map(self._stacks, chunks)

    def _stacks(self, members: Stack) -> list[Stack]:
        stacks: dict[tuple[Any, ...], Stack] = defaultdict(list)
        for w, layout in members:
            stacks[self._stack_key(w, layout)].append((w, layout))
        return list(stacks.values())

    def _step_same_shape(self, stacks: list[Stack], finite: float | Tensor) -> None:
        counts = [[layout.count for _, layout in stack] for stack in stacks]
        orthogonalizer = self._orthogonalizer(stacks, tuple(map(sum, counts)))
        for stack, stack_Nrc, parts in zip(stacks, orthogonalizer.stacks, counts, strict=True):
            for (w, layout), part in zip(stack, stack_Nrc.split(parts), strict=True):
                if isinstance(w, OwnedMatrix):
                    layout.stack_view(part).copy_(layout.cut(w.grad))
                    continue
                advance, layout.matrix.momentum_advanced = not layout.matrix.momentum_advanced, True
                g, m = self._advance_momentum(w, finite, advance)
                self._look_ahead(w.group, layout.cut(g), layout.cut(m), layout.stack_view(part))
        updates = orthogonalizer.run()
        for stack, out_Nrc, spare_Nrc, parts in zip(stacks, updates, orthogonalizer.stacks, counts, strict=True):
            out_Nrc = self._normalize(stack, out_Nrc.to(spare_Nrc.dtype), finite, spare_Nrc)
            for (w, layout), part in zip(stack, out_Nrc.split(parts), strict=True):
                update = layout.collect(part)
                if update is None:
                    continue
                if isinstance(w, OwnedMatrix):
                    w.grad.copy_(update)
                else:
                    self._apply(w, update, finite)

    def _orthogonalizer(self, stacks: list[Stack], counts: tuple[int, ...]) -> Orthogonalizer:
        """Buckets of the same shapes share one; it keeps its memory from step to step."""
        first, layout = stacks[0][0]
        wide = torch.float64 if first.param.dtype == torch.float64 else torch.float32
        shapes = tuple((n, stack[0][1].rows, stack[0][1].cols) for n, stack in zip(counts, stacks, strict=True))
        key = shapes, wide, self._shape_key(first, layout)
        known: dict[Any, Orthogonalizer] = self.__dict__.setdefault("_orthogonalizers", {})
        found = known.pop(key, None)
        if found is None:
            _, _, _, method, steps, triples, dtype = self._shape_key(first, layout)
            like = torch.empty(0, dtype=wide, device=first.param.device)
            found = Orthogonalizer(shapes, method, steps, triples, dtype, like)
        known[key] = found  # the latest is last
        if len(known) > CACHED:
            del known[next(iter(known))]
        return found

    def _momentum_update(self, w: Work, finite: float | Tensor) -> Tensor:
        """Advance the momentum. This rank's part of what is to be orthogonalised."""
        g, m = self._advance_momentum(w, finite)
        ahead = torch.empty_like(m)
        self._look_ahead(w.group, g, m, ahead)
        return ahead

    @staticmethod
    def _advance_momentum(w: Work, finite: float | Tensor, advance: bool = True) -> tuple[Tensor, Tensor]:
        """The gradient, and the momentum after it."""
        mu, wide = w.group["momentum"], torch.float64 if w.param.dtype == torch.float64 else torch.float32
        if "momentum_buffer" not in w.state:
            w.state["momentum_buffer"] = torch.zeros_like(w.param, dtype=wide, memory_format=torch.contiguous_format)
        m: Tensor = w.state["momentum_buffer"]
        g = w.grad.to(wide)
        if isinstance(finite, Tensor):
            g = torch.where(finite > 0, g, 0)
        if advance and w.group["momentum_form"] == "ema":
            F.ema_momentum_(m, g, (1 - mu) * finite)
        elif advance:
            F.classical_momentum_(m, g, mu if isinstance(finite, float) else 1 - (1 - mu) * finite)
        return g, m

    @staticmethod
    def _look_ahead(group: Group, g: Tensor, m: Tensor, out: Tensor) -> None:
        """Nesterov's mixture of gradient and momentum, or the momentum alone."""
        if group["nesterov"]:
            F.nesterov(g, m, group["momentum"], ema=group["momentum_form"] == "ema", out=out)
        else:
            out.copy_(m)

    def _normalize(self, stack: Stack, out_Nrc: Tensor, finite: float | Tensor, spare_Nrc: Tensor) -> Tensor:
        return out_Nrc

    def _apply(self, w: Work, update: Tensor, finite: float | Tensor) -> None:
        """Weight decay and the step itself, on the master."""
        group, x = w.group, self._read(w)
        if group["update_floor"]:
            update = self._apply_floor(w, update, x)
        smooth = group["update_ema"]
        if smooth:  # smoother steps: an average of the orthogonalised updates
            if "update_buffer" not in w.state:
                w.state["update_buffer"] = torch.zeros_like(update, memory_format=torch.contiguous_format)
            update = F.ema_momentum_(w.state["update_buffer"], update, (1 - smooth) * finite)
        lr = float(group["lr"]) * w.of("lr_mul")
        size = lr * self._scale(w, update) * finite
        decay = group["weight_decay"] * w.of("wd_mul")
        decay *= lr * finite if group["decay_by"] == "lr" else float(group["lr"]) * size
        if group["weight_decay"] and group["decay"] == "decoupled":
            F.decay_(x, decay)
        elif group["weight_decay"]:
            F.cautious_decay_(x, update, decay)
        self._write(w, F.apply_update_(x, update, size))

    @staticmethod
    def _scale(w: Work, like: Tensor) -> float | Tensor:
        """The factor of the update: one number, or one for each weight of `like` where blocks differ in height."""
        layouts = block_layouts(w.shape, w.group, w.index)
        scales = [update_scale(w.group["scale"], g.rows, g.cols) for g in layouts]
        if len(layouts) == 1:
            return scales[0]
        matrix, pairs = layouts[0].matrix, zip(layouts, scales, strict=True)
        parts = [like.new_full((matrix.lead, g.a * g.rows, matrix.width), scale) for g, scale in pairs]
        return local_part(matrix.restore(torch.cat(parts, dim=-2)), w.home)

    @staticmethod
    def _apply_floor(w: Work, update: Tensor, x: Tensor) -> Tensor:
        """The update, its blocks no smaller than a share of their weights. Of a DTensor, all ranks must call this."""
        update, x = gather_full(update, w.home), gather_full(x, w.home)
        layouts = block_layouts(w.shape, w.group, w.index)
        parts = []
        for layout in layouts:
            floor = w.group["update_floor"] / update_scale(w.group["scale"], layout.rows, layout.cols)
            parts.append(layout.join(F.raise_to_floor(layout.cut(update), layout.cut(x), floor)))
        return local_part(layouts[0].matrix.restore(torch.cat(parts, dim=-2)), w.home)


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
    own_keys = (*Muon.own_keys, "beta2")
    required = (*Muon.required, "second_moment")
    replicated_state: tuple[str, ...] = ("second_moment",)

    def __init__(
        self,
        params: ParamsT, lr: float | Tensor = 0.02, *,
        momentum: float = 0.95, nesterov: bool = True, momentum_form: MomentumForm = "ema",
        method: Method = "polar-express", steps: int = 5, coefficients: Coefficients | None = None,
        scale: Scale | None = "spectral", update_ema: float | None = None, update_floor: float | None = None,
        weight_decay: float = 0.0, decay: Decay = "decoupled", decay_by: DecayBy = "lr",
        lr_mul: float | list[float] = 1.0, wd_mul: float | list[float] = 1.0,
        blocks: Blocks | list[Blocks] = 1, matrix: Matrix | list[Matrix] = "flatten",
        transposed: bool | list[bool] = False, exact_bf16: bool = True, dtype: torch.dtype | None = None,
        beta2: float = 0.95, axis: Axis | list[Axis] = None, **unknown: Never,
    ) -> None:  # fmt: skip
        SpeedrunOptimizer.__init__(self, params, arguments(locals()))  # Muon's own would refuse what is new here

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        require_number("beta2", group["beta2"], below=1)
        for axis in group["axis"] if isinstance(group["axis"], list) else [group["axis"]]:
            require(axis in (None, -1, -2), "axis", axis, "-1, -2 or None")

    def _state_shapes(self, p: Tensor, group: Group) -> dict[str, tuple[int, ...] | None]:
        index = next(i for i, q in enumerate(group["params"]) if q is p)
        axis = value_at(group["axis"], index)
        shapes = [self._moment_shape(layout, axis) for layout in block_layouts(p.shape, group, index)]
        whole = shapes[0] if len(shapes) == 1 else (sum(map(math.prod, shapes)),)
        return {**super()._state_shapes(p, group), "second_moment": whole}

    @staticmethod
    def _moment_shape(layout: BlockLayout, axis: Axis) -> tuple[int, int, int]:
        axis = axis or (-1 if layout.rows >= layout.cols else -2)
        return (layout.count, layout.rows, 1) if axis == -1 else (layout.count, 1, layout.cols)

    def _second_moment(self, w: Work, layout: BlockLayout, like: Tensor) -> Tensor:
        """Of a grid's blocks, a view of the state; where there are several grids that is one vector."""
        shape, axis = self._moment_shape(layout, w.of("axis")), w.of("axis")
        before = after = 0
        for other in () if layout.alone else block_layouts(w.shape, w.group, w.index):
            size = math.prod(self._moment_shape(other, axis))
            before, after = before + size * (other.start < layout.start), after + size
        if "second_moment" not in w.state:
            w.state["second_moment"] = like.new_zeros(shape if layout.alone else after)
        whole: Tensor = w.state["second_moment"]
        return whole if layout.alone else whole[before : before + math.prod(shape)].view(shape)

    def _stack_key(self, w: Work, layout: BlockLayout) -> tuple[Any, ...]:
        return *super()._stack_key(w, layout), self._moment_shape(layout, w.of("axis"))[1:], w.group["beta2"]

    def _normalize(self, stack: Stack, out_Nrc: Tensor, finite: float | Tensor, spare_Nrc: Tensor) -> Tensor:
        moments = [self._second_moment(w, layout, out_Nrc) for w, layout in stack]
        second = torch.cat(moments)
        F.normuon_scale_(out_Nrc, second, (1 - stack[0][0].group["beta2"]) * finite, spare_Nrc)
        for moment, fresh in zip(moments, second.split([len(m) for m in moments]), strict=True):
            moment.copy_(fresh)
        return out_Nrc
