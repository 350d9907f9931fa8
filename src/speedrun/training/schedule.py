"""What each step does, as a pure function of the step.

`ScheduleConfig.at(step)` yields a frozen `Stage`. The loop obeys it and knows nothing of how it came about, so a
resumed run needs no schedule state: the step number is enough.

A run has `steps` scheduled steps and `extra_steps` more, which go on as the last one ended: lowest learning rate, last
batch, the window of the extra steps. A *ramp* (batch_ramp, lr_ramp, window_ramp) divides the scheduled steps into equal
slots.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

from msgspec import Meta

from speedrun.checks import AboveZero, Count, Positive, Share, check_fields
from speedrun.errors import UserError
from speedrun.model import Windows

T = TypeVar("T")
Ramp = Annotated[tuple[T, ...], Meta(min_length=1)]


@dataclass(frozen=True)
class Stage:
    """What one step does."""

    step: int
    lr: float
    """Factor of every group's base learning rate."""
    batch_size: int
    """Sequences in the batch, over all micro-batches and processes."""
    seq_len: int
    """Tokens in a sequence."""
    momentum: float | None = None
    """Muon's momentum; None leaves it as the recipe has it."""
    windows: Windows | None = None
    """How far back attention looks; None: over the whole sequence."""
    window_history: tuple[int, ...] = ()
    """The long windows up to now that rotary positions follow, in order."""
    mtp_weights: tuple[float, ...] = (1.0,)
    """Weights of the losses of the next, second next... token."""
    tied: bool = True
    """Whether a tied head is still tied."""
    untie: bool = False
    """Whether the head becomes a table of its own at the end of this step."""

    @property
    def tokens(self) -> int:
        return self.batch_size * self.seq_len

    @property
    def shape(self) -> tuple[object, ...]:
        """Two stages of the same shape need the same compiled code."""
        return self.batch_size, self.seq_len, self.windows, self.window_history, len(self.mtp_weights), self.tied


@dataclass(frozen=True)
class ScheduleConfig:
    steps: Positive = 1000
    """Scheduled optimizer steps, fixed before the run: no run stops on its validation loss."""
    extra_steps: Count = 0
    """Further steps at the lowest learning rate."""
    batch_size: Positive = 8
    """Sequences per step, over all micro-batches and processes."""
    seq_len: Positive = 128
    """Tokens per sequence."""
    warmup: Share = 0.02
    """Share of the steps over which the learning rate rises linearly."""
    cooldown: Share = 0.5
    """Share of the steps, at the end, over which it falls linearly."""
    min_lr_ratio: Share = 0.0
    """Learning rate factor that the cooldown falls to."""
    batch_ramp: Ramp[Positive] | None = None
    """Sequences per step in equal slots of the steps; None: always batch_size."""
    lr_ramp: Ramp[AboveZero] | None = None
    """Learning rate factor in equal slots, the cooldown on top of it; None: always 1."""
    window_ramp: Ramp[Positive] | None = None
    """Tokens of the long attention window in equal slots; None: no ramp."""
    window_cubic: Positive | None = None
    """Instead of a ramp: the long window grows to this many tokens, fast, then slowly, then fast; None: it does not."""
    window_block: Positive = 128
    """Windows are multiples of this many tokens; the short one is half of the long one, rounded down to a multiple."""
    window_short: Positive | None = None
    """Largest short window in tokens; None: no limit."""
    window_extra: Positive | None = None
    """Long window of the extra steps; None: the last of the ramp."""
    window_final: Positive | None = None
    """Long window of the last validation; None: that of the last step. Rotary positions do not follow it."""
    yarn_until: Positive | None = None
    """The longest long window that rotary positions follow (model.attention.yarn); None: all of them."""
    momentum_low: Share = 0.85
    """Momentum at the start of its warm-up and towards the end of its cool-down."""
    momentum_high: Share = 0.95
    """Momentum in between."""
    momentum_warmup: Count = 0
    """Steps over which Muon's momentum rises."""
    momentum_cooldown: Count = 0
    """Steps over which it falls at the end. With neither, it stays at optim.muon.momentum."""
    mtp_tokens: Literal[1, 3] = 1
    """Tokens predicted at each position at the start: 1 or 3. The weights of the second and third fall to 0."""
    mtp_until: Share = 1.0
    """Share of the steps that the schedule of those weights takes; the last third of it predicts one token."""
    untie_at: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Share of the steps after which a tied head becomes a table of its own (model.head.untie); None: never."""

    def __post_init__(self) -> None:
        check_fields(self, "schedule.")
        if self.warmup + self.cooldown > 1:
            raise UserError(
                f"schedule.warmup {self.warmup} and schedule.cooldown {self.cooldown} overlap; "
                "their sum may be at most 1."
            )
        if self.window_cubic and self.window_ramp:
            raise UserError(
                "schedule.window_cubic and schedule.window_ramp exclude each other; set one of them to None."
            )
        if (self.window_extra or self.window_final or self.window_short) and not self.has_windows:
            raise UserError("schedule.window_extra, window_final and window_short need a window_ramp or window_cubic.")
        for window in (*self._long_windows, self.window_final, self.window_short):
            if window and window % self.window_block:
                raise UserError(
                    f"A window of {window} tokens is no multiple of schedule.window_block {self.window_block}."
                )

    # ------------------------------------------------------------------ over the steps

    @property
    def total(self) -> int:
        """All steps of a run."""
        return self.steps + self.extra_steps

    def scaled(self, total: int) -> "ScheduleConfig":
        """The same schedule in `total` steps: what is counted in steps keeps its share of the run."""
        least = 1 + bool(self.extra_steps)
        if total < least:
            raise UserError(f"--steps is {total}; this schedule needs at least {least}.")

        def share(count: int) -> int:
            return max(1, round(count * total / self.total)) if count else 0

        extra_steps = share(self.extra_steps)
        return dataclasses.replace(
            self,
            steps=total - extra_steps,
            extra_steps=extra_steps,
            momentum_warmup=share(self.momentum_warmup),
            momentum_cooldown=share(self.momentum_cooldown),
        )

    @property
    def tokens(self) -> int:
        return sum(self._batch_size(s) for s in range(self.total)) * self.seq_len

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest batch."""
        return max(stage.tokens for stage in self.visits())

    @property
    def has_windows(self) -> bool:
        return bool(self.window_ramp or self.window_cubic)

    @property
    def max_window(self) -> int:
        """The longest window of training; 0 without windows."""
        return max(self._long_windows, default=0)

    @property
    def _long_windows(self) -> list[int]:
        return [w for w in (*(self.window_ramp or ()), self.window_cubic, self.window_extra) if w]

    @property
    def untie_step(self) -> int | None:
        """The step at whose end the head is untied; odd, so that an Adam that steps every second time has stepped."""
        return math.ceil(self.untie_at * self.steps) | 1 if self.untie_at else None

    def at(self, step: int) -> Stage:
        windows = self._windows(step)
        untie_step = self.untie_step
        return Stage(
            step=step,
            lr=self._lr(step),
            batch_size=self._batch_size(step),
            seq_len=self.seq_len,
            momentum=self._momentum(step),
            windows=windows,
            window_history=self._window_history(step),
            mtp_weights=self._mtp_weights(step),
            tied=untie_step is None or step <= untie_step,
            untie=step == untie_step,
        )

    def after(self, done: int) -> Stage:
        """What a validation after `done` steps sees: the stage just trained, and at the very end the final window.

        A wider view costs nothing there, as validation is not timed.
        """
        last = self.at(max(0, done - 1))
        if last.untie:
            last = dataclasses.replace(last, tied=False)
        if done == self.total and last.windows is not None and self.window_final:
            last = dataclasses.replace(last, windows=Windows(last.windows.short, self.window_final))
        return last

    def visits(self) -> list[Stage]:
        """One stage of every shape, in order of appearance: what the kernel warm-up must visit."""
        seen: dict[tuple[object, ...], Stage] = {}
        for step in range(self.total):
            stage = self.at(step)
            seen.setdefault(stage.shape, stage)
        return list(seen.values())

    def shapes(self) -> list[tuple[int, int]]:
        """Every distinct (batch_size, seq_len)."""
        return list(dict.fromkeys((self._batch_size(s), self.seq_len) for s in range(self.total)))

    # ------------------------------------------------------------------ one number each

    def _slot(self, step: int, slots: int) -> int:
        """Which of `slots` equal parts of the scheduled steps a step is in; the extra steps are in the last."""
        return min(slots - 1, slots * step // self.steps)

    def _batch_size(self, step: int) -> int:
        """A ramp begins with small batches: early in a run they gain more per token."""
        return self.batch_ramp[self._slot(step, len(self.batch_ramp))] if self.batch_ramp else self.batch_size

    def _lr(self, step: int) -> float:
        """A trapezoid: up over the warm-up, flat, down to the floor, which the extra steps keep."""
        rise, fall = round(self.warmup * self.steps), self.cooldown * self.steps
        if step >= self.steps:
            return self.min_lr_ratio if self.cooldown else self._peak(step)
        if step < rise:
            return self._peak(step) * (step + 1) / rise
        if step < self.steps - fall:
            return self._peak(step)
        left = (self.steps - step) / fall
        return self._peak(step) * left + self.min_lr_ratio * (1 - left)

    def _peak(self, step: int) -> float:
        """The ramp's factor, which grows with the batch.

        It changes one step after the batch does where a slot ends exactly on a step.
        """
        if not self.lr_ramp:
            return 1.0
        slots = len(self.lr_ramp)
        return self.lr_ramp[min(slots, max(1, -(-slots * step // self.steps))) - 1]

    def _long(self, step: int) -> int:
        """The long window. It grows over the run: what is near is learned first, and a short window costs less."""
        if step >= self.steps and self.window_extra:
            return self.window_extra
        if self.window_ramp:
            return self.window_ramp[self._slot(step, len(self.window_ramp))]
        assert self.window_cubic is not None
        x = min(step, self.steps) / self.steps
        share = 4 * x**3 - 6 * x**2 + 3 * x
        blocks = math.ceil(round(self.window_cubic * share / self.window_block, 9))
        return max(1, blocks) * self.window_block

    def _windows(self, step: int) -> Windows | None:
        if not self.has_windows:
            return None
        long = self._long(step)
        short = max(1, long // self.window_block // 2) * self.window_block
        return Windows(min(short, self.window_short or short), long)

    def _window_history(self, step: int) -> tuple[int, ...]:
        """Every long window that rotary positions follow, up to this step."""
        if not self.has_windows:
            return ()
        if self.window_ramp:
            found = list(self.window_ramp[: self._slot(min(step, self.steps - 1), len(self.window_ramp)) + 1])
            if step >= self.steps and self.window_extra:
                found.append(self.window_extra)
        else:
            found = [window for first, window in _cubic_changes(self) if first <= step]
        changes = (w for i, w in enumerate(found) if i == 0 or w != found[i - 1])
        return tuple(w for w in changes if not self.yarn_until or w <= self.yarn_until)

    def _momentum(self, step: int) -> float | None:
        """Low while gradients change quickly, and again at the very end, when there is little left to average."""
        if not self.momentum_warmup and not self.momentum_cooldown:
            return None
        span = self.momentum_high - self.momentum_low
        begin = self.total - self.momentum_cooldown
        if step < self.momentum_warmup:
            return self.momentum_low + span * (step / self.momentum_warmup)
        if self.momentum_cooldown and step > begin:
            return self.momentum_high - span * ((step - begin) / self.momentum_cooldown)
        return self.momentum_high

    def _mtp_weights(self, step: int) -> tuple[float, ...]:
        """Weights for three tokens, then for two, then for one: in the end only the next one counts."""
        if self.mtp_tokens == 1:
            return (1.0,)
        over = self.mtp_until * self.steps
        u = step / over if over else math.inf
        if u < 1 / 3:
            return (1.0, 0.5, 0.25 * (1 - 3 * u))
        if u < 2 / 3:
            return (1.0, 0.5 * (1 - (3 * u - 1)))
        return (1.0,)


@functools.lru_cache(maxsize=16)  # asked for at every step, and it walks over all of them
def _cubic_changes(schedule: ScheduleConfig) -> tuple[tuple[int, int], ...]:
    """(first step, long window) wherever the long window changes."""
    found: list[tuple[int, int]] = []
    for step in range(schedule.total):
        window = schedule._long(step)
        if not found or window != found[-1][1]:
            found.append((step, window))
    return tuple(found)
