"""Results as JSON and as Markdown tables."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..calibration.profile import CalibrationProfile, write_atomically
from .summary import ALL_KINDS, AlikeTexts, Cell
from .systems import SYSTEMS


def write_report(
    folder: Path,
    summary: dict[str, dict[str, Cell]],
    settings: dict[str, Any],
    profile: CalibrationProfile | None,
    is_greedy: bool,
    alike: AlikeTexts | None = None,
) -> None:
    """Writes `results.json` and `results.md` into a folder."""
    content = {"settings": settings, "environment": settings["environment"], "results": _plain(summary)}
    if alike is not None:
        content["decoded_alike"] = asdict(alike)
    write_atomically(folder / "results.json", json.dumps(content, indent=1) + "\n")
    write_atomically(folder / "results.md", markdown(summary, settings, profile, is_greedy, alike))


def _plain(summary: dict[str, dict[str, Cell]]) -> dict[str, dict[str, dict[str, Any]]]:
    return {system: {kind: asdict(cell) for kind, cell in cells.items()} for system, cells in summary.items()}


def markdown(
    summary: dict[str, dict[str, Cell]],
    settings: dict[str, Any],
    profile: CalibrationProfile | None,
    is_greedy: bool,
    alike: AlikeTexts | None = None,
) -> str:
    """The report as one Markdown page."""
    lines = [
        f"# {settings['target']} with {settings['drafter']}",
        "",
        f"{settings['num_prompts']} prompts ({settings['prompts']}), {settings['sessions']} interleaved sessions, "
        f"at most {settings['max_new_tokens']} new tokens, "
        f"{'greedy' if is_greedy else 'temperature ' + str(settings['temperature'])}, "
        f"{settings['environment']['device']}, {settings['environment']['dtype']}, "
        f"{settings['environment']['software']}.",
        "",
        "Tokens per second are pooled over prompts, prefill excluded. AL: tokens emitted per verification round. SR: "
        "tokens per second over those of plain decoding on the same prompts; SR and AL of the average are means over "
        "the kinds.",
        "",
        *speed_table(summary),
        "",
        *round_table(summary, is_greedy),
    ]
    if alike is not None:
        lines += ["", *alike_lines(alike, settings["environment"]["dtype"])]
    if profile is not None:
        lines += ["", *profile_lines(profile)]
    return "\n".join(lines) + "\n"


def speed_table(summary: dict[str, dict[str, Cell]]) -> list[str]:
    """AL and SR of every system and kind."""
    kinds = [kind for kind in next(iter(summary.values())) if kind != ALL_KINDS]
    header = ["system", *(f"{kind} {number}" for kind in [*kinds, ALL_KINDS] for number in ("AL", "SR"))]
    rows = []
    for system, cells in _in_order(summary):
        numbers = []
        for kind in [*kinds, ALL_KINDS]:
            numbers += [f"{cells[kind].acceptance_length:.2f}", f"{cells[kind].speed_ratio:.2f}×"]
        rows.append([SYSTEMS[system].title, *numbers])
    return table(header, rows)


def round_table(summary: dict[str, dict[str, Cell]], is_greedy: bool) -> list[str]:
    """Throughput, lengths and time per round over all kinds."""
    header = ["system", "policy", "GDN verification", "tokens/s", "mean length", "ms per round"]
    rows = []
    for system, cells in _in_order(summary):
        cell, row = cells[ALL_KINDS], SYSTEMS[system]
        numbers = [f"{cell.tokens_per_second:.1f}", f"{cell.mean_length:.2f}", f"{cell.milliseconds_per_round:.2f}"]
        identical = [f"{100 * cell.identical:.0f} %"] if is_greedy else []
        rows.append([row.title, row.policy or "none", row.verification, *numbers, *identical])
    return table([*header, *(["same text as AR"] if is_greedy else [])], rows)


def alike_lines(alike: AlikeTexts, dtype: str) -> list[str]:
    """AL and SR on prompts that all systems decode to one text."""
    return [
        "## Prompts that all systems decode alike",
        "",
        f"{alike.num_prompts} of {alike.num_all}. In {dtype} a rounding can flip a near-tie, and another text has "
        "another acceptance length; on these prompts systems differ by their rounds alone.",
        "",
        *speed_table(alike.summary),
    ]


def profile_lines(profile: CalibrationProfile) -> list[str]:
    """What the profile says about itself."""
    quality, costs = profile.quality, profile.costs
    lines = [
        "## Calibration",
        "",
        f"{profile.num_rounds} rounds of {len(profile.prompt_keys)} prompts ({profile.prompts}), none of which is "
        "measured above unless a note says so.",
        "",
        f"- acceptance model: calibration error {quality.calibration_error:.4f} (15 bins), Brier score "
        f"{quality.brier_score:.4f}, {'on held-out prompts' if quality.held_out else 'on the rounds of the fit'}",
        f"- cost: {1e3 * costs.fitted[0]:.2f} ms a round at length 2, {1e3 * costs.fitted[-1]:.2f} ms at "
        f"{len(costs.fitted) + 1}, R² {quality.cost_r2:.3f}; "
        f"{1e3 * costs.autoregressive:.2f} ms a token without drafts",
        f"- rho {profile.rho:.1f} tokens/s, s {1e6 * costs.stage0_row:.1f} µs, eta {1e6 * costs.expert:.2f} µs, "
        f"calibrated static length {profile.static_length}",
        f"- new Layer-0 experts against later-layer pairs: correlation {quality.routing_correlation:.2f}",
    ]
    return [*lines, *(f"- note: {note}" for note in profile.notes)]


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table; the first column is text, the others are numbers or names."""
    return [
        "| " + " | ".join(header) + " |",
        "|---|" + "---:|" * (len(header) - 1),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def _in_order(summary: dict[str, dict[str, Cell]]) -> list[tuple[str, dict[str, Cell]]]:
    return [(name, summary[name]) for name in SYSTEMS if name in summary]
