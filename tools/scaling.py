"""Writes the tables of docs/scaling.md: `python tools/scaling.py docs/scaling.md`.

Minutes of all cores, no GPU. What stands between a table's markers is replaced, but for measured
figures, which are kept.
"""

import re
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path

from entwine_jax.bench import ops
from entwine_jax.bench.cases import CORE, Shape
from entwine_jax.schedule import Problem, Schedule, decide
from entwine_jax.schedule.cost_model import bound_us, plain_matmul_us, predict, predict_lax
from entwine_jax.schedule.layout import ceil_div
from entwine_jax.schedule.legality import ALIGNMENT
from entwine_jax.schedule.problem import ALLGATHER, ALLREDUCE, OPS
from entwine_jax.schedule.schedule import TILE_WIDTHS
from entwine_jax.schedule.simulate import simulate

NUM_RANKS = (2, 4, 8, 16, 72)
NOT_MEASURED = "not measured"

# CTAs that send: half of all, or few.
SENDERS = (0, 32)


@dataclass(frozen=True)
class Point:
    """The better tile shape for one problem, as simulated."""

    problem: Problem
    time_us: float

    @property
    def fraction(self) -> float:
        """Of the bound."""
        return bound_us(self.problem) / self.time_us

    @property
    def speedup(self) -> float:
        """Over one GPU that has all of the problem."""
        p = self.problem
        return plain_matmul_us(Problem(m=p.m, n=p.n, k=p.k, num_ranks=1)) / self.time_us


def problem_of(op: str, shape: Shape, num_ranks: int) -> Problem:
    """The suite's problem, with sizes rounded up to what so many ranks can divide."""
    m, n, k = shape
    step = ALIGNMENT * num_ranks
    k = ceil_div(k, step) * step
    if op != ALLREDUCE:
        m = ceil_div(m, num_ranks) * num_ranks
    return ops.OPS[op].problem(Shape(m, n, k), num_ranks)


def best(problem: Problem) -> Point:
    """Of wide and narrow tiles, with one spare warp, in one launch; all-gather: of SENDERS too."""
    times = (
        simulate(problem, Schedule(tile_n=tile_n, num_senders=num_senders)).total_us
        for tile_n in TILE_WIDTHS
        for num_senders in (SENDERS if problem.op == ALLGATHER else (0,))
    )
    return Point(problem, min(times))


def scaling_table(op: str, points: dict[tuple[str, Shape, int], Point]) -> str:
    """Fraction of the bound and speed-up over one GPU, by shape and number of ranks."""
    header = " | ".join(f"P = {p}" for p in NUM_RANKS)
    lines = [f"| m, n, k | {header} | pays up to |", "| --- |" + " --- |" * (len(NUM_RANKS) + 1)]
    for shape in CORE:
        row = [points[op, shape, p] for p in NUM_RANKS]
        cells = " | ".join(f"{p.fraction:.2f} ({p.speedup:.1f}x)" for p in row)
        lines.append(f"| {', '.join(map(str, shape))} | {cells} | {pays_up_to(row)} |")
    return "\n".join(lines)


def pays_up_to(row: list[Point]) -> str:
    """The last number of ranks at which every further GPU still gave half a GPU's work."""
    paid, speedup = 1, 1.0
    for point in row:
        num_ranks = point.problem.num_ranks
        if (point.speedup - speedup) / (num_ranks - paid) < 0.5:
            break
        paid, speedup = num_ranks, point.speedup
    return f"P = {paid}"


def expected_table(measured: dict[str, str]) -> str:
    """What is expected of eight GPUs, with the figures that were measured there."""
    lines = [
        "| op | m, n, k | bound | lax, model | ours, model | ours, simulated | of bound | "
        "speed-up | schedule | measured |",
        "| --- |" + " --- |" * 9,
    ]
    for op in OPS:
        for shape in CORE:
            problem = problem_of(op, shape, 8)
            decision = decide(problem)
            schedule = decision.schedule if decision.schedule.fused else decision.ranked[0].schedule
            simulated_us = simulate(problem, schedule).total_us
            lax_us, bound = predict_lax(problem).total_us, bound_us(problem)
            key = f"{op} | {', '.join(map(str, shape))}"
            choice = f"{schedule}" + ("" if decision.schedule.fused else " (lax is chosen)")
            lines.append(
                f"| {key} | {bound:.1f} | {lax_us:.1f} | {predict(problem, schedule).total_us:.1f} "
                f"| {simulated_us:.1f} | {bound / simulated_us:.2f} | {lax_us / simulated_us:.2f} "
                f"| {choice} | {measured.get(key, NOT_MEASURED)} |"
            )
    return "\n".join(lines)


def measured_figures(document: str) -> dict[str, str]:
    """The last column of the table of eight GPUs, by op and shape."""
    rows = re.findall(r"^\| (\w+ \| [\d, ]+) \|.*\| ([^|]+) \|$", document, flags=re.MULTILINE)
    return dict(rows)


def replace_table(document: str, name: str, table: str) -> str:
    """The document with this table between the markers of that name."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    head, rest = document.split(begin)
    return f"{head}{begin}\n{table}\n{end}{rest.split(end)[1]}"


def main(path: Path) -> None:
    """Rewrites the tables of the document."""
    document = path.read_text()
    # The slowest first.
    keys = [(op, shape, num_ranks) for num_ranks in NUM_RANKS[::-1] for op in OPS for shape in CORE]
    with ProcessPoolExecutor() as pool:
        points = dict(zip(keys, pool.map(best, starmap(problem_of, keys)), strict=True))
    for op in OPS:
        document = replace_table(document, op, scaling_table(op, points))
    table = expected_table(measured_figures(document))
    path.write_text(replace_table(document, "8 H200s", table))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
