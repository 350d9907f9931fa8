"""What a person sees while something goes on: a bar on a terminal, elsewhere a plain line every two seconds.

No torch here: the first line is there before it is loaded.
"""

import threading
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.status import Status as Spinner

LINES_EVERY = 2.0  # seconds


class Status:
    """What this process is doing now: `at("loading torch")`, until `stop()`.

    On a terminal a spinner says so; elsewhere a thread prints it whenever nothing else was printed for two seconds.
    """

    def __init__(self) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        self._spinner: Spinner | None = None
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._doing, self._since, self._printed, self._shown = "", 0.0, 0.0, ""

    def at(self, doing: str, *, show: bool = True) -> None:
        """From now on, this. With `show` it is said at once, otherwise when it is time."""
        self._doing, self._since = doing, time.monotonic()
        if self.console.is_terminal:
            if self._spinner is None:
                self._spinner = self.console.status(doing)
                self._spinner.start()
            self._spinner.update(doing)
            return
        if self._thread is None:
            self._printed = self._since
        if show:
            self.line(doing)
            self._shown = doing
        if self._thread is None:
            self._ended.clear()
            self._thread = threading.Thread(target=self._go_on, daemon=True)
            self._thread.start()

    def line(self, text: str) -> None:
        self._printed = time.monotonic()
        self.console.print(text, markup=False)

    def stop(self) -> None:
        if self._spinner is not None:
            self._spinner.stop()
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
        self._spinner = self._thread = None

    def _go_on(self) -> None:
        while not self._ended.wait(0.1):
            now = time.monotonic()
            if now - self._printed >= LINES_EVERY - 0.2:
                again = f", {now - self._since:.0f} s so far" if self._doing == self._shown else ""
                self._shown = self._doing
                self.line(self._doing + again)


status = Status()


class Progress:
    """The progress bar of a run, as a context manager; `line` prints above the bar. Nothing is printed if `quiet`."""

    def __init__(self, total: int, *, quiet: bool = False) -> None:
        self.total, self.quiet = total, quiet
        self.console = status.console
        self._bar: Bar | None = None
        if self.console.is_terminal and not quiet:
            self._bar = Bar(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(bar_width=12),
                MofNCompleteColumn(),
                TextColumn("{task.fields[about]}"),
                TimeElapsedColumn(),
                console=self.console,
                transient=True,
            )

    def __enter__(self) -> "Progress":
        if self._bar:
            status.stop()
            self._bar.start()
            self._task = self._bar.add_task("preparing", total=self.total, about="")
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()
        elif not self.quiet:
            status.stop()

    def line(self, text: str) -> None:
        if self._bar:
            self.console.print(text, markup=False)
        elif not self.quiet:
            status.line(text)

    def at(self, doing: str) -> None:
        """What is going on, when it is not a step."""
        if self._bar:
            self._bar.update(self._task, description=doing)
        elif not self.quiet:
            status.at(doing, show=False)

    def step(self, done: int, loss: float, seconds_per_step: float, tokens_per_second: float) -> None:
        ms, left = 1000 * seconds_per_step, (self.total - done) * seconds_per_step
        if self._bar:
            about = f"loss {loss:.3f} · {ms:.0f} ms/step · {left:.0f} s left"
            self._bar.update(self._task, description="training", completed=done, about=about)
        elif not self.quiet:
            about = f"loss {loss:.3f}  {ms:.0f} ms/step  {tokens_per_second:,.0f} tok/s  {left:.0f} s left"
            status.at(f"step {done}/{self.total}  {about}", show=False)
