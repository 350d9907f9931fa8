"""What a person sees while a run is going: a bar on a terminal, plain lines elsewhere."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINES_EVERY = 10.0  # seconds between plain progress lines


class Report:
    """Use as a context manager around the loop; `line` prints above the bar."""

    def __init__(self, total: int, *, quiet: bool = False) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        self.total, self.quiet = total, quiet
        self._last = time.monotonic()
        self._bar: Progress | None = None
        if self.console.is_terminal and not quiet:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("loss {task.fields[loss]} · {task.fields[ms]} ms/step · {task.fields[rate]} tok/s"),
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
            )

    def __enter__(self) -> "Report":
        if self._bar:
            self._bar.start()
            self._task = self._bar.add_task("training", total=self.total, loss="-", ms="-", rate="-")
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def line(self, text: str) -> None:
        if not self.quiet:
            self.console.print(text, markup=False)

    def step(self, done: int, loss: float, seconds_per_step: float, tokens_per_second: float) -> None:
        loss_text, ms = f"{loss:.3f}", f"{1000 * seconds_per_step:.0f}"
        rate = f"{tokens_per_second:,.0f}"
        if self._bar:
            self._bar.update(self._task, completed=done, loss=loss_text, ms=ms, rate=rate)
        elif not self.quiet and time.monotonic() - self._last > LINES_EVERY:
            self._last = time.monotonic()
            left = (self.total - done) * seconds_per_step
            self.console.print(
                f"step {done}/{self.total}  loss {loss_text}  {ms} ms/step  {rate} tok/s  {left:.0f} s left",
                markup=False,
            )
