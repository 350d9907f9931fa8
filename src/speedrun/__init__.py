"""speedrun trains GPTs to a target validation loss as fast as the machine allows, and proves it."""

__version__ = "0.1.0"
