"""What a process must know to train: one object in place of a list of parameters."""

from dataclasses import dataclass, field

from speedrun.data import TokenFolder
from speedrun.optim import Comm
from speedrun.training.config import Options, Recipe
from speedrun.training.device import Machine
from speedrun.training.progress import Progress
from speedrun.training.runlog import NullRunFolder, RunFolder
from speedrun.training.watchdog import Watchdog


@dataclass(frozen=True)
class Job:
    recipe: Recipe
    tokens: TokenFolder
    machine: Machine
    options: Options
    folder: RunFolder | NullRunFolder
    progress: Progress
    comm: Comm = field(default_factory=Comm)
    """The ranks that train together; by default this process alone."""
    watchdog: Watchdog | None = None

    def say(self, line: str) -> None:
        """Write a line to the log and show it."""
        self.folder.log(line)

    def doing(self, what: str, *, compiling: bool = False) -> None:
        """Tell the watchdog what this rank begins to do, and the progress bar if it may take long."""
        if compiling:
            self.progress.at(what)
        if self.watchdog is not None:
            self.watchdog.progress(what, compiling=compiling)
