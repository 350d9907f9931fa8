"""What each step does, as a pure function of the step.

`ScheduleConfig.at(step)` yields a frozen `Stage`. The loop obeys it and knows nothing of how it came about, so a
resumed run needs no schedule state: the step number is enough.
"""

from dataclasses import dataclass

from speedrun.errors import UserError


@dataclass(frozen=True)
class Stage:
    """One step's orders."""

    step: int
    lr: float
    """Factor of every group's base learning rate."""
    rows: int
    """Rows in the batch, over all micro-batches and processes."""
    length: int
    """Tokens in a row."""

    @property
    def tokens(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True)
class ScheduleConfig:
    steps: int = 1000
    """Optimizer steps, fixed before the run: no run stops on its validation loss."""
    rows: int = 8
    """Rows per step."""
    length: int = 128
    """Tokens per row."""
    warmup: float = 0.02
    """Share of the steps over which the learning rate rises linearly."""
    cooldown: float = 0.5
    """Share of the steps, at the end, over which it falls linearly."""
    floor: float = 0.0
    """Learning rate factor that the cooldown falls to."""

    def __post_init__(self) -> None:
        for name in ("steps", "rows", "length"):
            if getattr(self, name) < 1:
                raise UserError(f"schedule.{name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("warmup", "cooldown", "floor"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"schedule.{name} is {getattr(self, name)}; it must lie between 0 and 1.")
        if self.warmup + self.cooldown > 1:
            raise UserError(
                f"schedule.warmup {self.warmup} and schedule.cooldown {self.cooldown} overlap; "
                "their sum may be at most 1."
            )

    def at(self, step: int) -> Stage:
        """A trapezoid: up over the warm-up, flat, down to the floor. The last step is still above the floor."""
        rise, fall = round(self.warmup * self.steps), round(self.cooldown * self.steps)
        if step < rise:
            lr = (step + 1) / rise
        elif step < self.steps - fall:
            lr = 1.0
        else:
            left = (self.steps - step) / fall
            lr = left + self.floor * (1 - left)
        return Stage(step, lr, self.rows, self.length)

    def shapes(self) -> list[tuple[int, int]]:
        """Every distinct (rows, length), in order of appearance: what the kernel warm-up must visit."""
        return [(self.rows, self.length)]

    @property
    def tokens(self) -> int:
        return self.steps * self.rows * self.length
