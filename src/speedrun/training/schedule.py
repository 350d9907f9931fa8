"""What each step does, as a pure function of the step.

`ScheduleConfig.at(step)` yields a frozen `Stage`. The loop obeys it and knows nothing of how it came about, so a
resumed run needs no schedule state: the step number is enough.

A run has `steps` scheduled steps and `extension` more, which go on as the last one ended: lowest learning rate, last
batch, the extension's window. A *ramp* (batch_ramp, lr_ramp, window_ramp) divides the scheduled steps into equal slots.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Literal

from speedrun.checks import AboveZero, Count, Positive, Share, check_fields
from speedrun.errors import UserError
from speedrun.model import Windows


@dataclass(frozen=True)
class Stage:
    """One step's orders."""

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
    """How far back attention looks; None: over the whole row."""
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
    extension: Count = 0
    """Further steps at the lowest learning rate."""
    rows: Positive = 8
    """Rows per step."""
    length: Positive = 128
    """Tokens per row."""
    warmup: Share = 0.02
    """Share of the steps over which the learning rate rises linearly."""
    cooldown: Share = 0.5
    """Share of the steps, at the end, over which it falls linearly."""
    floor: Share = 0.0
    """Learning rate factor that the cooldown falls to."""
    batch_ramp: tuple[Positive, ...] = ()
    """Rows per step in equal slots of the steps; empty: always `rows`."""
    lr_ramp: tuple[AboveZero, ...] = ()
    """Learning rate factor in equal slots, the cooldown on top of it; empty: always 1."""
    window_ramp: tuple[Positive, ...] = ()
    """Tokens of the long attention window in equal slots; empty: no windows."""
    window_cubic: Count = 0
    """Instead of a ramp: the long window grows to so many tokens, fast, then slowly, then fast; 0 turns it off."""
    window_block: Positive = 128
    """Windows are whole blocks of so many tokens; the short one is half of the long one in blocks, rounded down."""
    window_short: Count = 0
    """Largest short window in tokens; 0: no limit."""
    window_extension: Count = 0
    """Long window of the extension; 0: the last of the ramp."""
    window_final: Count = 0
    """Long window of the last validation; 0: that of the last step. Rotary positions do not follow it."""
    yarn_until: Count = 0
    """The longest long window that rotary positions follow (model.yarn); 0: all of them."""
    momentum_low: Share = 0.85
    """Momentum at the start of its warm-up and towards the end of its cool-down."""
    momentum_high: Share = 0.95
    """Momentum in between."""
    momentum_warmup: Count = 0
    """Steps over which Muon's momentum rises."""
    momentum_cooldown: Count = 0
    """Steps over which it falls at the end. With neither, it stays at optim.muon.momentum."""
    predict: Literal[1, 3] = 1
    """Tokens predicted at the start: 1 or 3. The weights of the second and third fall to 0 on the way."""
    predict_until: Share = 1.0
    """Share of the steps that the schedule of those weights takes; the last third of it predicts one token."""
    split: Share = 0.0
    """Share of the steps after which a tied head becomes a table of its own (model.split); 0: never."""

    def __post_init__(self) -> None:
        check_fields(self, "schedule.")
        if self.warmup + self.cooldown > 1:
            raise UserError(
                f"schedule.warmup {self.warmup} and schedule.cooldown {self.cooldown} overlap; "
                "their sum may be at most 1."
            )
        if self.window_cubic and self.window_ramp:
            raise UserError(
                "schedule.window_cubic and schedule.window_ramp exclude each other; set one of them to 0 or ()."
            )
        if (self.window_extension or self.window_final or self.window_short) and not self.has_windows:
            raise UserError(
                "schedule.window_extension, window_final and window_short need a window_ramp or window_cubic."
            )
        for window in (
            *self.window_ramp,
            self.window_extension,
            self.window_final,
            self.window_short,
            self.window_cubic,
        ):
            if window % self.window_block:
                raise UserError(
                    f"A window of {window} tokens is not made of whole blocks of {self.window_block} "
                    "(schedule.window_block)."
                )

    # ------------------------------------------------------------------ over the steps

    @property
    def total(self) -> int:
        """All steps of a run."""
        return self.steps + self.extension

    def scaled(self, total: int) -> "ScheduleConfig":
        """The same schedule in `total` steps: what is counted in steps keeps its share of the run."""
        least = 1 + bool(self.extension)
        if total < least:
            raise UserError(f"--steps is {total}; this schedule needs at least {least}.")

        def share(count: int) -> int:
            return max(1, round(count * total / self.total)) if count else 0

        extension = share(self.extension)
        return dataclasses.replace(
            self,
            steps=total - extension,
            extension=extension,
            momentum_warmup=share(self.momentum_warmup),
            momentum_cooldown=share(self.momentum_cooldown),
        )

    @property
    def tokens(self) -> int:
        return sum(self._batch_size(s) for s in range(self.total)) * self.length

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest batch."""
        return max(stage.tokens for stage in self.visits())

    @property
    def has_windows(self) -> bool:
        return bool(self.window_ramp or self.window_cubic)

    @property
    def untie_step(self) -> int | None:
        """The step at whose end the head is untied; odd, so that an Adam that steps every second time has stepped."""
        return math.ceil(self.split * self.steps) | 1 if self.split else None

    def at(self, step: int) -> Stage:
        windows = self._windows(step)
        untie_step = self.untie_step
        return Stage(
            step=step,
            lr=self._lr(step),
            batch_size=self._batch_size(step),
            seq_len=self.length,
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
        """Every distinct (rows, length)."""
        return list(dict.fromkeys((self._batch_size(s), self.length) for s in range(self.total)))

    # ------------------------------------------------------------------ one number each

    def _slot(self, step: int, slots: int) -> int:
        """Which of `slots` equal parts of the scheduled steps a step is in; the extension is in the last."""
        return min(slots - 1, slots * step // self.steps)

    def _batch_size(self, step: int) -> int:
        """A ramp begins with small batches: early in a run they gain more per token."""
        return self.batch_ramp[self._slot(step, len(self.batch_ramp))] if self.batch_ramp else self.rows

    def _lr(self, step: int) -> float:
        """A trapezoid: up over the warm-up, flat, down to the floor, which the extension keeps."""
        rise, fall = round(self.warmup * self.steps), self.cooldown * self.steps
        if step >= self.steps:
            return self.floor if self.cooldown else self._peak(step)
        if step < rise:
            return self._peak(step) * (step + 1) / rise
        if step < self.steps - fall:
            return self._peak(step)
        left = (self.steps - step) / fall
        return self._peak(step) * left + self.floor * (1 - left)

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
        if step >= self.steps and self.window_extension:
            return self.window_extension
        if self.window_ramp:
            return self.window_ramp[self._slot(step, len(self.window_ramp))]
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
        if self.window_cubic:
            found = [window for first, window in _cubic_changes(self) if first <= step]
        else:
            found = list(self.window_ramp[: self._slot(min(step, self.steps - 1), len(self.window_ramp)) + 1])
            if step >= self.steps and self.window_extension:
                found.append(self.window_extension)
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
        if self.predict == 1:
            return (1.0,)
        over = self.predict_until * self.steps
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
