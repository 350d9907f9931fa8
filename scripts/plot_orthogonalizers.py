"""What each orthogonaliser does to singular values, as two pictures for docs/optimizers.md.

    python scripts/plot_orthogonalizers.py            # needs matplotlib; writes docs/images/*.svg

The first shows the result over the singular value that goes in; the second what becomes of the singular values of a
gradient-like matrix, whose spectrum falls over four decades.
"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch

from speedrun.optim import NEWTON_SCHULZ_PER_STEP, orthogonalize

OUT = Path(__file__).parents[1] / "docs" / "images"
METHODS = [
    ("Newton-Schulz, fixed", {"method": "newton-schulz"}, "#b8860b"),
    ("Newton-Schulz, per step", {"method": "newton-schulz", "coefficients": NEWTON_SCHULZ_PER_STEP}, "#2e8b57"),
    ("Polar Express", {"method": "polar-express"}, "#c0392b"),
    ("SVD", {"method": "svd"}, "#34495e"),
]


def result(values: torch.Tensor, options: dict) -> torch.Tensor:
    """Singular values that come out of a diagonal matrix with these, in their order."""
    return orthogonalize(torch.diag(values), dtype=torch.float64, **options).diagonal()


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    plt.rcParams.update(
        {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "speedrun"}
    )

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), constrained_layout=True)
    sizes = torch.logspace(-4, 0, 500, dtype=torch.float64)
    for name, options, color in METHODS:
        # One value varies, the rest holds the norm at 1: a diagonal of two whose squares sum to 1.
        out = torch.stack([result(torch.stack([s, (1 - s * s).clamp(min=0).sqrt()]), options)[0] for s in sizes])
        for ax in axes:
            ax.plot(sizes, out, label=name, color=color, linewidth=1.4)
    axes[0].set_xscale("log")
    axes[0].set_title("small values: how soon they are lifted")
    axes[1].set_title("large values: how close to 1 they end")
    axes[1].set_ylim(0.6, 1.3)
    for ax in axes:
        ax.axhline(1, color="#999999", linewidth=0.6)
        ax.set_xlabel("singular value / Frobenius norm of the matrix")
    axes[0].set_ylabel("singular value of the result")
    axes[0].legend(frameon=False)
    figure.savefig(OUT / "orthogonalizers.svg", metadata={"Date": None})

    figure, ax = plt.subplots(figsize=(9, 3.2), constrained_layout=True)
    spectrum = torch.logspace(0, -4, 256, dtype=torch.float64)
    ax.plot(spectrum / spectrum.norm(), color="#999999", linewidth=1.2, label="before, over its norm")
    for name, options, color in METHODS:
        ax.plot(result(spectrum, options).sort(descending=True)[0], label=name, color=color, linewidth=1.4)
    ax.set_xlabel("singular value number, of 256")
    ax.set_ylabel("size")
    ax.set_title("a spectrum over four decades, before and after")
    ax.legend(frameon=False)
    figure.savefig(OUT / "spectrum.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
