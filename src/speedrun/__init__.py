"""speedrun trains GPTs to a target validation loss as fast as the machine allows, and proves it.

import speedrun

run = speedrun.train("adamw", steps=20, **{"optim.lr": 0.004})
run = speedrun.load("runs/NAME")
print(run.result.val_loss, run.generate("It was"))
verdict = speedrun.race("normuon", against="adamw", runs=10)
"""

from typing import TYPE_CHECKING

from speedrun.lazy import lazy

__version__ = "0.1.0"

if TYPE_CHECKING:
    from speedrun.api import Run, load, race, train
    from speedrun.errors import UserError
    from speedrun.experiments import Verdict
    from speedrun.training import Recipe

    __all__ = ["Recipe", "Run", "UserError", "Verdict", "load", "race", "train"]
else:
    __getattr__, __all__ = lazy(__name__)
