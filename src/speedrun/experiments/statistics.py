"""What a number of runs proves.

    speedrun stats --target 3.28 3.2795 3.2789 3.2776

Loss: a one-sample, one-sided t-test against the target. Time: the logarithm of the ratio in each ABBA block, in which
a steady drift of the machine cancels, and a t-interval over the blocks; its lower end is the claim. Looking before the
end is paid for by spending alpha as O'Brien and Fleming's boundary does (Lan and DeMets, 1983), with boundaries that
are exact for the t statistic. Arrays are (..., n): the last axis is the sample, so that a simulation is one call.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special  # not scipy.stats, which every command would wait a second for

from speedrun.errors import UserError

ALPHA = 0.01  # the speedrun's rule: p < 0.01
POWER = 0.8  # "would decide" means: with this probability
FEWEST = 2  # a t-test needs a deviation


# -------------------------------------------------------------------- one sample against a target


def below(values: np.ndarray, target: float) -> np.ndarray:
    """(..., n) -> (...): p of "the mean is not below the target".

    Values without any spread decide by themselves: scipy would divide by zero.
    """
    values = np.asarray(values, dtype=np.float64)
    n = values.shape[-1]
    if n < FEWEST:
        raise UserError(f"Too few runs for the test: {n}; a t-test needs at least {FEWEST}.")
    gap = values.mean(-1) - target
    error = values.std(-1, ddof=1) / math.sqrt(n)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(error > 0, gap / error, np.where(gap < 0, -np.inf, np.inf))
    return np.asarray(special.stdtr(n - 1, t))


def std_mean(values: Sequence[float]) -> tuple[float, float]:
    """As `torch.std_mean(torch.tensor(values))` gives them, which is how records print them: of float32 values."""
    rounded = np.asarray(values, dtype=np.float32).astype(np.float64)
    if len(rounded) < FEWEST:
        raise UserError(f"Too few runs for a deviation: {len(rounded)}; it needs at least {FEWEST}.")
    return float(np.float32(rounded.std(ddof=1))), float(np.float32(rounded.mean()))


def shown(value: float) -> str:
    """A number as torch prints it: four digits, with an exponent where nothing would be left of it."""
    return f"{value:.4e}" if value and not 1e-4 <= abs(value) < 1e8 else f"{value:.4f}"


def spread(values: Sequence[float]) -> str:
    return "(std={}, mean={})".format(*map(shown, std_mean(values)))


# -------------------------------------------------------------------- two sides, paired by blocks


@dataclass(frozen=True)
class Ratio:
    """How many times as fast A is as B, over the blocks."""

    blocks: int
    ratio: float
    low: float
    """Lower end of the interval: what may be claimed."""
    high: float
    level: float
    """Probability left outside at each end."""
    p_faster: float
    p_slower: float
    std: float
    """Of the logarithm, between blocks."""


def log_ratios(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(..., blocks, 2) seconds of each side -> (..., blocks): log(time of B / time of A), above 0 where A is faster."""
    return np.asarray(np.log(b).mean(-1) - np.log(a).mean(-1))


def compare(logs: np.ndarray, level: float) -> Ratio:
    """(blocks,) log ratios -> the ratio, its interval and both one-sided p-values."""
    n = len(logs)
    if n < FEWEST:
        raise UserError(
            f"Too few blocks for the test: {n}; it needs at least {FEWEST}, that is {2 * FEWEST} runs a side."
        )
    mean, std = float(np.mean(logs)), float(np.std(logs, ddof=1))
    # A level of 0 is a look that may not decide anything: its interval holds every ratio.
    half = math.inf if level <= 0 else -float(special.stdtrit(n - 1, level)) * std / math.sqrt(n)
    return Ratio(
        blocks=n,
        ratio=math.exp(mean),
        low=math.exp(mean - half),
        high=math.exp(min(mean + half, 700.0)) if half < math.inf else math.inf,
        level=level,
        p_faster=float(below(-logs, 0.0)),
        p_slower=float(below(logs, 0.0)),
        std=std,
    )


def noise_floor(*sides: Sequence[float]) -> float | None:
    """Relative deviation of the times of identical runs, pooled over the sides; None without two equal runs."""
    squares, freedom = 0.0, 0
    for times in sides:
        if len(times) >= FEWEST:
            squares += float(np.var(np.log(times), ddof=1)) * (len(times) - 1)
            freedom += len(times) - 1
    return math.sqrt(squares / freedom) if freedom else None


# -------------------------------------------------------------------- looking early

CELLS = 160  # of the grid of the boundary; more of them change a level by less than a hundredth of itself
LOWEST, HIGHEST = -6.0, 8.0  # the grid, as quantiles of the normal distribution
NEVER = 1e-12  # a look that would spend less than this spends nothing


def spent(alpha: float, share: float) -> float:
    """How much of alpha may be used up when this share of all runs is in (one-sided)."""
    return float(2 * special.ndtr(special.ndtri(alpha / 2) / math.sqrt(share))) if share > 0 else 0.0


@functools.cache
def levels(alpha: float, sizes: tuple[int, ...]) -> tuple[float, ...]:
    """The p-value that decides at each look, for looks at these sample sizes, so that alpha holds over all of them.

    Under the null, U = sum / root of the sum of squares is a Markov chain: U' = U cos(f) + sin(f), where the angle f
    does not depend on the past and tan(f) root(n) has a t distribution with n degrees of freedom. T is a function of
    U, so the chance of a first crossing at each look follows exactly, by carrying the density along a grid.
    """
    if any(b <= a for a, b in zip((FEWEST - 1, *sizes), sizes, strict=False)):
        raise UserError(f"The looks {sizes} must rise, and begin at {FEWEST} or later.")
    if len(sizes) == 1:
        return (alpha,)
    decided: list[float] = []
    used, n = 0.0, sizes[0]
    edges = mass = np.empty(0)
    for size in sizes:
        budget = spent(alpha, size / sizes[-1])
        share, used = (budget - used, budget) if budget - used >= NEVER else (0.0, used)
        if size == sizes[0]:
            border = -float(special.ndtri(share)) if share else HIGHEST
        else:
            while n < size - 1:
                beyond = np.linspace(LOWEST, HIGHEST, CELLS + 1)
                mass, edges, n = -np.diff(_reach(mass, edges, n, beyond)), beyond, n + 1
            border = _border(mass, edges, n, share) if share else HIGHEST
        grid = np.linspace(LOWEST, border, CELLS + 1)
        if size == sizes[0]:
            mass = np.diff(special.ndtr(grid))
        else:
            mass = -np.diff(_reach(mass, edges, n, grid))
        edges, n = grid, size
        decided.append(float(special.ndtr(-border)) if share else 0.0)
    return tuple(decided)


def _statistic(z: np.ndarray | float, n: int) -> np.ndarray:
    """U of n values at a quantile that is written as the normal's."""
    t = -special.stdtrit(n - 1, special.ndtr(-np.asarray(z)))
    return np.asarray(math.sqrt(n) * t / np.sqrt(n - 1 + t**2))


def _reach(mass: np.ndarray, edges: np.ndarray, n: int, z: np.ndarray) -> np.ndarray:
    """Probability of U of n + 1 values at or above each z, for U of n values in cells of this mass."""
    # The middle of a cell would widen the distribution a little at every step; this point keeps its deviation.
    width = edges[1] - edges[0]
    slope = np.divide(np.gradient(mass, width), mass, out=np.zeros_like(mass), where=mass > 0)
    shift = np.clip(width**2 / 24 * slope, -width / 2, width / 2)
    now = _statistic((edges[1:] + edges[:-1]) / 2 + shift, n)[:, None]
    then = _statistic(z, n + 1)[None, :]
    turned = np.arctan(now)
    first = np.arcsin(np.clip(then / np.sqrt(1 + now**2), -1, 1))

    def chance(angle: np.ndarray) -> np.ndarray:
        return np.asarray(special.stdtr(n, math.sqrt(n) * np.tan(np.clip(angle, -math.pi / 2, math.pi / 2))))

    # U' is at least `then` where sin(angle + turned) is at least sin(first): up to pi - first, and one turn earlier.
    inside = chance(math.pi - first - turned) - chance(first - turned) + chance(-math.pi - first - turned)
    return np.asarray(mass @ inside)


def _border(mass: np.ndarray, edges: np.ndarray, n: int, share: float) -> float:
    """The z at which the probability of being at or above it is `share`."""

    low, high = LOWEST, HIGHEST
    while high - low > 1e-7:
        middle = (low + high) / 2
        above = float(_reach(mass, edges, n, np.asarray([middle]))[0]) > share
        low, high = (middle, high) if above else (low, middle)
    return high


# -------------------------------------------------------------------- power


def power(effect: float, std: float, n: int, alpha: float = ALPHA) -> float:
    """Chance that n values decide, if effect and deviation are truly these."""
    if n < FEWEST:
        return 0.0
    if std == 0:
        return 1.0 if effect > 0 else 0.0
    border = -special.stdtrit(n - 1, alpha)
    chance = 1 - float(special.nctdtr(n - 1, effect / std * math.sqrt(n), border))
    return 1.0 if math.isnan(chance) and effect > 0 else chance  # scipy has no digits left for a huge effect


def needed(effect: float, std: float, alpha: float = ALPHA, most: int = 1000) -> int | None:
    """Smallest n that decides with a chance of POWER; None where no number up to `most` does."""
    if not effect > 0 or power(effect, std, most, alpha) < POWER:
        return None
    few, many = FEWEST, most
    while few < many:
        middle = (few + many) // 2
        few, many = (few, middle) if power(effect, std, middle, alpha) >= POWER else (middle + 1, many)
    return few


# -------------------------------------------------------------------- many questions at once


@dataclass(frozen=True)
class Effect:
    """Mean of paired differences with its interval and two-sided p; without two of them there is neither."""

    n: int
    mean: float
    low: float
    high: float
    p: float


def effect(differences: Sequence[float], confidence: float = 0.95) -> Effect:
    values = np.asarray(differences, dtype=np.float64)
    n, mean = len(values), float(values.mean())
    if n < FEWEST:
        return Effect(n, mean, -math.inf, math.inf, 1.0)
    error = float(values.std(ddof=1)) / math.sqrt(n)
    half = float(special.stdtrit(n - 1, 0.5 + confidence / 2)) * error
    side = float(min(below(values, 0.0), below(-values, 0.0)))
    return Effect(n, mean, mean - half, mean + half, min(1.0, 2 * side))


def holm(ps: Sequence[float]) -> list[float]:
    """p-values corrected for their number, so that the chance of any wrong one below alpha is at most alpha."""
    order = sorted(range(len(ps)), key=lambda i: ps[i])
    corrected, worst = [0.0] * len(ps), 0.0
    for rank, i in enumerate(order):
        worst = max(worst, min(1.0, (len(ps) - rank) * ps[i]))
        corrected[i] = worst
    return corrected
