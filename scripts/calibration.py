"""Are the verdicts as rarely wrong as they say? Races without any effect, simulated, and their verdicts counted.

    python scripts/calibrate.py            writes docs/calibration.md

The noise models are what real machines do: independent, with outliers, drifting, and times that were really measured.
Every decision is made by the functions that judge a real race.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy import special

from speedrun.experiments import statistics
from speedrun.experiments.statistics import ALPHA, FEWEST

Noise = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]
"""(generator, (races, runs)) -> noise of each run in the order of the race, with a deviation of about 1."""

CHUNK = 20_000  # races simulated at once


def gaussian(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return rng.standard_normal(shape)


def heavy_tailed(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Student's t with 3 degrees of freedom: about every hundredth run lies three deviations off, some far more."""
    return rng.standard_t(3, shape) / math.sqrt(3)


def outliers(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Every tenth run is disturbed by something else on the machine, and only ever slowed down."""
    return rng.standard_normal(shape) + 4 * rng.exponential(size=shape) * (rng.random(shape) < 0.1)


def drifting(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """A steady slope of its own in every race, a random walk, and noise of each run."""
    slope = rng.normal(0, 0.3, (shape[0], 1)) * np.arange(shape[1])
    walk = np.cumsum(rng.normal(0, 0.5, shape), axis=1)
    return slope + walk + rng.standard_normal(shape)


def warming(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """The machine heats up and slows down by three deviations in all, most of it in the first four runs.

    A curve does not cancel within a block: A, which comes first and last, gains from it. This is what ABBA cannot do.
    """
    return 3 * (1 - np.exp(-np.arange(shape[1]) / 4)) + rng.standard_normal(shape)


NOISES: dict[str, Noise] = {
    "Gaussian": gaussian,
    "heavy-tailed (Student's t, 3 degrees)": heavy_tailed,
    "every tenth run slowed down": outliers,
    "drifting (slope and random walk)": drifting,
}


def measured(times: Sequence[float]) -> Noise:
    """Blocks of four consecutive runs of one recipe as they were really timed, drawn again and again.

    Which of the two places is called A is drawn, too: with few times their own imbalance would look like an effect. And
    with few times a race would draw the same block twice, down to the last digit, which real clocks never show and a
    t-test takes for certainty; the smoothed bootstrap keeps such twins apart, with Silverman's width.
    """
    logs = np.log(np.asarray(times, dtype=np.float64))
    windows = np.lib.stride_tricks.sliding_window_view(logs, 4)
    width = 1.06 * len(logs) ** -0.2

    def noise(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
        blocks = windows[rng.integers(len(windows), size=(shape[0], shape[1] // 4))]
        swapped = rng.random(blocks.shape[:2])[..., None] < 0.5
        blocks = np.where(swapped, blocks[..., [1, 0, 3, 2]], blocks)
        return (blocks - logs.mean()).reshape(shape) / logs.std(ddof=1) + width * rng.standard_normal(shape)

    return noise


# -------------------------------------------------------------------- verdicts, many at once


def first_decision(samples: np.ndarray, sizes: Sequence[int], alpha: float = ALPHA) -> np.ndarray:
    """(races, n) -> (races,): whether the mean was found below 0 at one of the looks."""
    decided = np.zeros(len(samples), dtype=bool)
    for size, level in zip(sizes, statistics.levels(alpha, tuple(sizes)), strict=True):
        decided |= statistics.below(samples[:, :size], 0.0) < level
    return decided


def valid_rate(noise: Noise, runs: int, looks: Sequence[int], gap: float, races: int, seed: int) -> int:
    """How many races of `runs` losses are called valid, when the true mean lies `gap` deviations below the target."""
    found, rng = 0, np.random.default_rng(seed)
    for begin in range(0, races, CHUNK):
        losses = noise(rng, (min(CHUNK, races - begin), runs)) - gap
        found += int(first_decision(losses, looks).sum())
    return found


def faster_rate(
    noise: Noise, blocks: int, looks: Sequence[int], gain: float, deviation: float, races: int, seed: int
) -> int:
    """How many races of ABBA blocks are called faster, when A truly saves the share `gain` of B's time."""
    found, rng = 0, np.random.default_rng(seed)
    for begin in range(0, races, CHUNK):
        logs = deviation * noise(rng, (min(CHUNK, races - begin), 4 * blocks)).reshape(-1, blocks, 4)
        a, b = np.exp(logs[..., [0, 3]]) * (1 - gain), np.exp(logs[..., [1, 2]])
        found += int(first_decision(-statistics.log_ratios(a, b), looks).sum())
    return found


def upper_limit(found: int, races: int, confidence: float = 0.99) -> float:
    """Clopper and Pearson's upper limit of a rate."""
    return 1.0 if found == races else float(special.betaincinv(found + 1, races - found, confidence))


def every(n: int) -> tuple[int, ...]:
    """A look after everything that allows one."""
    return tuple(range(FEWEST, n + 1))


def after_blocks(blocks: int) -> tuple[int, ...]:
    """Losses of one side at a look after every block that allows one: two runs each."""
    return tuple(2 * k for k in range(FEWEST, blocks + 1))
