"""The scale of gradients: what the loss is divided by, and the constants that are tied to it.

A recipe is tuned in one scale of the loss, and two kinds of constants hold in that scale alone: Adam's eps, which is
added to the root of the mean squared gradient, and the scales of an 8-bit head, which bring gradients into the narrow
range of 8-bit floats. `optim.reference_ranks` says which scale it is:

    None    the mean over the tokens of the batch. The backward pass starts from sum / tokens, and ranks add up.
    N       the sum over a rank's tokens, averaged over N ranks, as the records of 2025 and 2026 did on N = 8 GPUs
            (KellerJordan/modded-nanogpt, pull requests 146, 188 and 190). The backward pass starts from the sum, which
            is what the 8-bit scales are for; the gradient is divided by N when it is reduced, and eps is for the
            result. The number of processes changes neither.

With 131,072 tokens the two differ by a factor of 16,384. In the scale of the mean, an eps of 1e-8 then is no longer
small beside the roots that it is added to, and every gradient of an unlikely token rounds to zero in 8-bit floats.

Losses in logs, and the norm that `optim.clip` allows, are always those of the mean.

An operand of an 8-bit product is divided by its scale before it is rounded (`model.head.fp8_scales`: features, weights,
gradients of the logits). Features and weights are float8_e4m3fn (448 is the largest, 2**-9 the smallest number above
zero), gradients float8_e5m2 (57,344 and 2**-16). A larger number is cut off to 448 or becomes infinite, less than half
of the smallest becomes zero.
"""

import math
from collections.abc import Iterator

from speedrun.errors import UserError
from speedrun.model import GPTConfig
from speedrun.training.config import Recipe

# Halfway from the largest number to what would be the next one, and half of the smallest one: what rounding decides.
E4M3_RANGE = 2.0**-10, 464.0
E5M2_RANGE = 2.0**-17, 61440.0
LARGEST_DRAW = 6.0  # standard deviations: not exceeded by tens of millions of weights


def backward_divisor(recipe: Recipe, tokens: int) -> int:
    """What the summed loss is divided by before the backward pass; `tokens`: of the whole batch."""
    return tokens if recipe.optim.reference_ranks is None else 1


def reduced_divisor(recipe: Recipe) -> int:
    """What gradients are divided by when those of all ranks have been added."""
    return recipe.optim.reference_ranks or 1


def over_mean(recipe: Recipe, tokens: int) -> float:
    """The gradient that optimizers get, as a multiple of the mean's."""
    ranks = recipe.optim.reference_ranks
    return 1.0 if ranks is None else tokens / ranks


def check(recipe: Recipe) -> None:
    """Refuse scales of an 8-bit head with which training could not even begin."""
    if not recipe.model.head.fp8:
        return
    for what, scale, smallest, largest, (tiny, huge) in _operands(recipe):
        below, above = smallest / scale < tiny, largest / scale > huge
        if below or above:
            size, happens = (smallest, "rounds to zero") if below else (largest, "overflows")
            way = "choose other model.head.fp8_scales"
            if what == "gradient of a logit" and below and recipe.optim.reference_ranks is None:
                way += ", or sum the loss with optim.reference_ranks"
            raise UserError(
                f"A {what} of {size:.2g} {happens} in 8-bit floats: its scale in model.head.fp8_scales is {scale:.4g}; "
                f"{way}, or turn model.head.fp8 off."
            )


def _operands(recipe: Recipe) -> Iterator[tuple[str, float, float, float, tuple[float, float]]]:
    """(what, its scale, a usual size, the largest one, range of its 8-bit float) before the first step."""
    m, stages = recipe.model, recipe.schedule.visits()
    x_scale, w_scale, g_scale = m.head.fp8_scales
    yield "feature", x_scale, 1.0, math.sqrt(m.dim), E4M3_RANGE  # normalised: the mean square is 1
    if m.head.tied or not m.init.zero_init:
        std = m.embeddings.std or 1 / math.sqrt(3 * m.dim)
        yield "weight", w_scale, std, LARGEST_DRAW * std, E4M3_RANGE
    usual, steepest = _slopes(m)
    divisors = [backward_divisor(recipe, stage.tokens) for stage in stages]
    weight = max(sum(stage.mtp_weights) for stage in stages)
    # Of a token that is no target, as likely as any other; and of a target that was thought to be impossible.
    yield (
        "gradient of a logit",
        g_scale,
        usual / m.vocab_size / max(divisors),
        steepest * weight / min(divisors),
        E5M2_RANGE,
    )


def _slopes(m: GPTConfig) -> tuple[float, float]:
    """How much a logit changes with what the head computes: at zero, and where it changes most."""
    if m.head.softcap != "sigmoid":
        return 1.0, 1.0
    share = 1 / (1 + math.exp(-m.head.softcap_shift / m.head.softcap_temperature))
    slope = m.head.softcap_limit / m.head.softcap_temperature
    return slope * share * (1 - share), slope / 4
