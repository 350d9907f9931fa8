"""speedrun trains GPTs to a target validation loss as fast as the machine allows, and proves it.

import speedrun

run = speedrun.train("adamw", steps=20, **{"optim.lr": 0.004})
run = speedrun.load("runs/NAME")
print(run.result.val_loss, run.generate("It was"))
"""

from typing import TYPE_CHECKING

from speedrun.lazy import lazy

if TYPE_CHECKING:
    from speedrun.api import Run, load, train
    from speedrun.errors import UserError

__version__ = "0.1.0"
__all__ = ["Run", "UserError", "load", "train"]
__getattr__ = lazy(__name__)
