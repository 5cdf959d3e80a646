"""docs/scaling.md has a forecast for every shape; the script that writes it keeps measurements."""

import importlib.util
from pathlib import Path

import pytest

from entwine_jax.bench.cases import CORE, Shape
from entwine_jax.schedule import Problem
from entwine_jax.schedule.problem import OPS

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("scaling", ROOT / "tools" / "scaling.py")
scaling = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(scaling)

DOCUMENT = (ROOT / "docs" / "scaling.md").read_text()


def lines_between(name):
    return DOCUMENT.split(f"<!-- {name}:begin -->")[1].split(f"<!-- {name}:end -->")[0].split("\n")


@pytest.mark.parametrize("op", OPS)
def test_every_shape_has_its_row(op):
    rows = [line for line in lines_between(op) if line.startswith("| ")][2:]
    assert [row.split(" | ")[0][2:] for row in rows] == [", ".join(map(str, s)) for s in CORE]
    for row in rows:
        fractions = [float(cell.split(" ")[0]) for cell in row.split(" | ")[1:-1]]
        assert len(fractions) == len(scaling.NUM_RANKS)
        assert all(0 < fraction <= 1 for fraction in fractions)


def test_every_op_and_shape_has_a_column_for_the_measured_figure_on_8_gpus():
    measured = scaling.measured_figures("\n".join(lines_between("8 H200s")))
    assert set(measured) == {f"{op} | {', '.join(map(str, s))}" for op in OPS for s in CORE}


def test_measured_figures_are_kept():
    row = "| matmul_allreduce | 512, 8192, 28672 | 43.4 | 1 | 2 | 3 | 0.5 | 1.1 | tile | {} |"
    key = "matmul_allreduce | 512, 8192, 28672"
    assert scaling.measured_figures(row.format("99.5")) == {key: "99.5"}
    table = scaling.replace_table("a <!-- x:begin -->old<!-- x:end --> b", "x", "new")
    assert table == "a <!-- x:begin -->\nnew\n<!-- x:end --> b"


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("num_ranks", scaling.NUM_RANKS)
@pytest.mark.parametrize("shape", CORE, ids=str)
def test_sizes_are_rounded_up_to_what_the_ranks_divide(op, num_ranks, shape):
    problem = scaling.problem_of(op, shape, num_ranks)
    whole = scaling.problem_of(op, shape, 2)
    for name in ("m", "n", "k"):
        assert 0 <= getattr(problem, name) - getattr(whole, name) < 8 * num_ranks
    assert problem.n_local % 8 == problem.k_local % 8 == 0


def test_a_point_is_the_better_of_the_tile_shapes():
    problem = scaling.problem_of(OPS[0], Shape(512, 1024, 1024), 2)
    point = scaling.best(problem)
    assert point.fraction == pytest.approx(scaling.bound_us(problem) / point.time_us)
    assert 0 < point.speedup < 2


@pytest.mark.parametrize(
    ("speedups", "text"),
    [((1.9, 3.5, 5.4, 6.0), "P = 4"), ((1.4, 3.0), "P = 1"), ((2, 4), "P = 4")],
)
def test_parallelism_pays_while_every_further_gpu_gives_half_of_its_work(speedups, text):
    class Row:
        def __init__(self, num_ranks, speedup):
            self.problem = Problem(m=1, n=1, k=16, num_ranks=num_ranks)
            self.speedup = speedup

    row = [Row(2 ** (i + 1), speedup) for i, speedup in enumerate(speedups)]
    assert scaling.pays_up_to(row) == text
