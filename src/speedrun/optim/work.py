"""What a step is handed: one parameter with its gradient, its state and its group."""

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speedrun.optim.state import Group, value_at


@dataclass
class Work:
    """One parameter that has a gradient, with its state, group and name."""

    param: Tensor
    grad: Tensor
    state: MutableMapping[str, Any]  # of this rank's part
    group: Group
    index: int  # within its group, for values given per parameter
    name: str
    sharded: Any = None  # the DTensor of which `param` is this rank's part

    @property
    def home(self) -> Any:
        """The parameter as it is in the group: the key of its state."""
        return self.param if self.sharded is None else self.sharded

    @property
    def shape(self) -> torch.Size:
        """Of the whole parameter."""
        return self.home.shape

    def of(self, key: str) -> Any:
        """A group's value, or the parameter's own when the group lists one for each parameter."""
        return value_at(self.group[key], self.index)
