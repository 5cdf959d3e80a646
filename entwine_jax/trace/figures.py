"""Figures of timelines and of costs. Needs matplotlib: `pip install matplotlib`."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from entwine_jax.schedule.cost_model import predict
from entwine_jax.schedule.explain import Explanation
from entwine_jax.schedule.legality import Rejection, fit
from entwine_jax.schedule.problem import ALLGATHER
from entwine_jax.schedule.schedule import TILE_WIDTHS, Schedule
from entwine_jax.schedule.simulate import simulate
from entwine_jax.schedule.timeline import Kind, ctas_of

try:
    from matplotlib.axes import Axes
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
except ImportError as error:
    raise ImportError(
        "figures need matplotlib, which is not installed: pip install matplotlib"
    ) from error

# What is drawn of each kind: colour, and the part of the CTA's row that it takes. Math warps below,
# the push warp above them, the warps that communicate on top.
_MATH, _PUSH, _COMM = (0.05, 0.5), (0.5, 0.68), (0.68, 0.95)
STYLES: dict[Kind, tuple[str, tuple[float, float]]] = {
    Kind.MAINLOOP: ("#4c72b0", _MATH),
    Kind.EPILOGUE: ("#1f3a68", _MATH),
    Kind.WAIT_ROWS: ("#e8b4b4", _MATH),
    Kind.PACE: ("#f6ddcd", _PUSH),
    Kind.PUSH: ("#dd8452", _PUSH),
    Kind.WAIT: ("#e5e5e5", _COMM),
    Kind.REDUCE: ("#55a868", _COMM),
    Kind.SEND: ("#55a868", _COMM),
    Kind.FINISH: ("#c44e52", _COMM),
}

NUM_CTAS_DRAWN = 24
COMM_CTAS = ("num_comm_ctas", "communication CTAs", (0, 2, 4, 8, 12, 16, 24, 32))
SENDERS = ("num_senders", "senders", (12, 20, 32, 40, 48, 64))  # of the all-gather


def draw_timelines(path: Path, title: str, timelines: Mapping[str, np.ndarray]) -> None:
    """One column for each timeline by name, with the same axes: a sample of the CTAs of rank 0."""
    figure = Figure(figsize=(7.5 * len(timelines), 7.0), layout="constrained")
    figure.suptitle(title, fontsize=10)
    columns = figure.subplots(1, len(timelines), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (name, events) in zip(columns, timelines.items(), strict=True):
        _draw_timeline(axes, name, events)
    figure.legend(handles=_legend(timelines), loc="outside lower center", ncols=len(STYLES))
    figure.savefig(path, dpi=120)


def draw_explanation(path: Path, explanation: Explanation, slot_bytes: int) -> None:
    """The simulated timeline, and the cost against the number of communication CTAs.

    Of the chosen schedule; of the cheapest fused one where plain lax is chosen.

    Raises:
        ValueError: no fused schedule can run the problem.
    """
    problem, decision = explanation.problem, explanation.decision
    schedule = decision.schedule
    if not schedule.fused:
        if not decision.ranked:
            raise ValueError(f"nothing to draw: {decision.reason}")
        schedule = decision.ranked[0].schedule
    simulation = simulate(problem, schedule)
    figure = Figure(figsize=(9.0, 10.0), layout="constrained")
    figure.suptitle(f"{problem}\n{schedule}", fontsize=10)
    above, below = figure.subplots(2, 1, height_ratios=(3, 2))
    _draw_timeline(above, f"simulated: {simulation.total_us:.1f} us", simulation.events)
    above.legend(
        handles=_legend({"simulated": simulation.events}),
        fontsize=8,
        ncols=len(STYLES),
        loc="upper center",
        bbox_to_anchor=(0.5, -0.08),
    )
    _draw_costs(below, explanation, schedule, slot_bytes)
    figure.savefig(path, dpi=120)


def _draw_costs(axes: Axes, explanation: Explanation, schedule: Schedule, slot_bytes: int) -> None:
    problem = explanation.problem
    field, label, numbers_drawn = SENDERS if problem.op == ALLGATHER else COMM_CTAS
    for tile_n in TILE_WIDTHS:
        runs = [
            fit(problem, _neighbour(schedule, tile_n, field, number), slot_bytes)
            for number in numbers_drawn
        ]
        fused = [run for run in runs if not isinstance(run, Rejection)]
        numbers = [getattr(run, field) for run in fused]
        model_us = [predict(problem, run).total_us for run in fused]
        simulated_us = [simulate(problem, run).total_us for run in fused]
        (line,) = axes.plot(numbers, model_us, "o-", label=f"128x{tile_n}, cost model")
        color = line.get_color()
        axes.plot(numbers, simulated_us, "x--", color=color, label=f"128x{tile_n}, simulated")
    axes.axhline(explanation.bound_us, color="black", linewidth=0.8, label="bound")
    axes.axhline(
        explanation.decision.lax.total_us, color="black", linestyle=":", label="lax, cost model"
    )
    axes.set_xlabel(label)
    axes.set_ylabel("us")
    axes.legend(fontsize=8)


def _neighbour(schedule: Schedule, tile_n: int, field: str, number: int) -> Schedule:
    """The schedule with these two in their place; its halves are for its own tiles and waves."""
    own = (tile_n, number) == (schedule.tile_n, getattr(schedule, field))
    narrow_tail = schedule.narrow_tail if own else 0
    changes = {"tile_n": tile_n, field: number, "narrow_tail": narrow_tail, "rows_per_launch": 0}
    return replace(schedule, **changes)


def _draw_timeline(axes: Axes, title: str, events: np.ndarray) -> None:
    ctas = [(cta, part) for rank, cta, part in ctas_of(events) if rank == 0]
    step = max(len(ctas) // NUM_CTAS_DRAWN, 1)
    drawn = ctas[::step]
    for kind, (color, lane) in STYLES.items():
        boxes = [
            _boxes(part[part["kind"] == kind], row, lane) for row, (_, part) in enumerate(drawn)
        ]
        # Edges of the same colour, so that events much shorter than a pixel can be seen.
        verts = list(np.concatenate(boxes))
        axes.add_collection(
            PolyCollection(verts, facecolors=color, edgecolors=color, linewidths=0.2)
        )
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("us")
    axes.set_ylabel("CTA of rank 0" + (f", every {step}th" if step > 1 else ""))
    axes.set_yticks(np.arange(len(drawn)) + 0.5, [str(cta) for cta, _ in drawn], fontsize=7)
    axes.autoscale_view()
    axes.set_ylim(len(drawn), 0)


def _boxes(events: np.ndarray, row: int, lane: tuple[float, float]) -> np.ndarray:
    """[num_events, 4, 2]: the corners of a box for each event. Row 0 is drawn on top."""
    boxes = np.empty((len(events), 4, 2))
    boxes[:, (0, 3), 0] = events["start_us"][:, None]
    boxes[:, (1, 2), 0] = events["end_us"][:, None]
    boxes[:, (0, 1), 1] = row + 1 - lane[0]
    boxes[:, (2, 3), 1] = row + 1 - lane[1]
    return boxes


def _legend(timelines: Mapping[str, np.ndarray]) -> list[Any]:
    kinds = np.unique(np.concatenate([events["kind"] for events in timelines.values()]))
    return [
        Patch(color=color, label=kind.name.lower().replace("_", " "))
        for kind, (color, _) in STYLES.items()
        if kind in kinds
    ]
