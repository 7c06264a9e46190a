"""Plots of a benchmark: speed by kind, lengths, reliability, cost curve. Needs matplotlib (the extra `bench`)."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from ..calibration.profile import CalibrationProfile
from .summary import ALL_KINDS, Cell
from .systems import AUTOREGRESSIVE, SYSTEMS

OURS, QUIET, INK = "#1f5fa8", "#93a4b5", "#333333"
# One for every other system, in pairs of a family: full length, other rules, replay, fixed lengths, parts of ours.
OTHERS = ("#b9bec4", "#d9b48f", "#c98f5a", "#c3cfa8", "#8ea671", "#8b9299", "#cdb7cf", "#a583a8", "#a9cbe0", "#72a6c9")
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "figure.dpi": 130,
    "savefig.bbox": "tight",
}


def write_plots(folder: Path, summary: dict[str, dict[str, Cell]], profile: CalibrationProfile | None) -> list[Path]:
    """Writes PNG files into a folder and returns their paths; those of a profile only if there is one."""
    drawings = {"speed.png": lambda: draw_speed(summary), "lengths.png": lambda: draw_lengths(summary)}
    if profile is not None:
        drawings["reliability.png"] = lambda: draw_reliability(profile)
        drawings["cost.png"] = lambda: draw_cost(profile)
    paths = []
    with plt.rc_context(STYLE):
        for name, draw in drawings.items():
            figure = draw()
            paths.append(folder / name)
            figure.savefig(paths[-1])
            plt.close(figure)
    return paths


def draw_speed(summary: dict[str, dict[str, Cell]]) -> plt.Figure:
    """Grouped bars: speed over plain decoding by kind of prompt."""
    systems = [name for name in SYSTEMS if name in summary and name != AUTOREGRESSIVE]
    kinds = [kind for kind in summary[AUTOREGRESSIVE] if kind != ALL_KINDS] + [ALL_KINDS]
    figure, axes = plt.subplots(figsize=(1.6 + 1.5 * len(kinds), 3.6), layout="constrained")
    width = 0.84 / max(1, len(systems))
    for index, name in enumerate(systems):
        places = [place - 0.42 + (index + 0.5) * width for place in range(len(kinds))]
        heights = [summary[name][kind].speed_ratio for kind in kinds]
        color = OURS if name == "hybridspec" else OTHERS[index % len(OTHERS)]
        bars = axes.bar(places, heights, width * 0.92, color=color, label=SYSTEMS[name].title)
        if name == "hybridspec":
            axes.bar_label(bars, [f"{height:.2f}" for height in heights], fontsize=8, padding=2, color=OURS)
    axes.axhline(1, color=INK, linewidth=0.8)
    axes.annotate("plain", (-0.59, 1), va="bottom", fontsize=8, color=INK)
    axes.set_xticks(range(len(kinds)), kinds)
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.62, len(kinds) - 0.45)
    axes.set(ylabel="times plain decoding", title="Decode speed by kind of prompt")
    figure.legend(loc="outside right center", fontsize=8)
    return figure


def draw_lengths(summary: dict[str, dict[str, Cell]]) -> plt.Figure:
    """How often adaptive systems verify each length, one row each."""
    adaptive = [
        name
        for name in SYSTEMS
        if name in summary and len(summary[name][ALL_KINDS].lengths) > 1 and SYSTEMS[name].is_adaptive
    ]
    longest = max(max(summary[name][ALL_KINDS].lengths) for name in summary)
    rows = max(1, len(adaptive))
    figure, grid = plt.subplots(
        rows, 1, figsize=(6, 0.6 + 1.05 * rows), sharex=True, squeeze=False, layout="constrained"
    )
    for axes, name in zip(grid[:, 0], adaptive, strict=False):
        cell = summary[name][ALL_KINDS]
        total = sum(cell.lengths.values())
        shares = [100 * cell.lengths.get(length, 0) / total for length in range(1, longest + 1)]
        axes.bar(range(1, longest + 1), shares, 0.85, color=OURS if name == "hybridspec" else QUIET)
        axes.axvline(cell.mean_length, color=INK, linewidth=0.9, linestyle=":")
        axes.set_title(f"{SYSTEMS[name].title}, mean {cell.mean_length:.1f}", fontsize=9, pad=2)
        axes.set_ylabel("%", rotation=0, labelpad=8)
    grid[-1, 0].set(xlabel="verification length (rows of the target's forward)", xticks=range(2, longest + 1, 2))
    figure.suptitle("Rounds by verification length", x=0.02, ha="left", fontsize=11)
    return figure


def draw_reliability(profile: CalibrationProfile) -> plt.Figure:
    """Predicted against observed prefix acceptance, with the number of predictions below."""
    quality = profile.quality
    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(4.2, 5.2), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    upper.plot((0, 1), (0, 1), color="#aaaaaa", linewidth=0.9, linestyle="--")
    predicted = [entry.predicted for entry in quality.reliability]
    upper.plot(predicted, [entry.observed for entry in quality.reliability], "o-", color=OURS, markersize=4.5)
    upper.set(ylabel="accepted", xlim=(0, 1), ylim=(0, 1))
    upper.set_title(
        f"Prefix acceptance, {'held-out prompts' if quality.held_out else 'rounds of the fit'}\n"
        f"calibration error {quality.calibration_error:.3f}, Brier score {quality.brier_score:.3f}"
    )
    lower.bar(predicted, [entry.count for entry in quality.reliability], 0.05, color=QUIET)
    lower.set(xlabel="predicted", ylabel="drafts", yscale="log")
    return figure


def draw_cost(profile: CalibrationProfile) -> plt.Figure:
    """Measured and fitted time of a round, and its slope in tokens at rho."""
    costs = profile.costs
    lengths = list(range(2, len(costs.fitted) + 2))
    figure, axes = plt.subplots(figsize=(5.2, 3.4), layout="constrained")
    axes.plot(lengths, [1e3 * value for value in costs.measured], "o", color=QUIET, markersize=5, label="measured")
    axes.plot(lengths, [1e3 * value for value in costs.fitted], color=OURS, linewidth=1.8, label="fitted")
    _reference_line(axes, 1e3 * costs.autoregressive, "one token without drafts")
    _reference_line(axes, 1e3 * costs.fixed, "part that no length changes")
    axes.set(xlabel="verification length", ylabel="ms per round", xticks=lengths[::2], ylim=(0, None))
    axes.set_title(f"Cost of a round, R² {profile.quality.cost_r2:.3f}, rho {profile.rho:.0f} tokens/s")
    axes.legend(loc="lower left", fontsize=8)
    return figure


def _reference_line(axes: Axes, value: float, text: str) -> None:
    axes.axhline(value, color="#999999", linewidth=0.8, linestyle=":")
    axes.annotate(
        text, (1, value), xycoords=("axes fraction", "data"), fontsize=8, color="#666666", va="bottom", ha="right"
    )
