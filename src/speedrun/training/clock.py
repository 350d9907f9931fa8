"""The clock of a run: it covers everything a step does and stops only for validation."""

import time

import torch


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was asked, so that a reading means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


class Clock:
    def __init__(self, device: torch.device, seconds: float = 0.0) -> None:
        self.device = device
        self._before = seconds
        self._started: float | None = None

    def start(self) -> None:
        assert self._started is None, "the clock is already running"
        synchronize(self.device)
        self._started = time.perf_counter()

    def stop(self) -> None:
        assert self._started is not None, "the clock is not running"
        synchronize(self.device)
        self._before += time.perf_counter() - self._started
        self._started = None

    def halt(self) -> None:
        """Stop, whether it is running or not: the run is over."""
        if self._started is not None:
            self.stop()

    @property
    def seconds(self) -> float:
        """Time on the clock. While it runs this does not wait for the device, so it is approximate on a GPU."""
        running = 0.0 if self._started is None else time.perf_counter() - self._started
        return self._before + running
