"""Numbers that the kernel and the schedules both have are the same."""

import math
import re
from pathlib import Path

import pytest

from entwine_jax.configuration import Configuration
from entwine_jax.schedule import layout, legality
from entwine_jax.schedule.cost_model import ROWS_PER_UNIT
from entwine_jax.schedule.schedule import TILE_M
from entwine_jax.schedule.select import DEFAULT_SLOT_BYTES
from entwine_jax.schedule.simulate import rank, rates
from entwine_jax.workspace import share

FFI = Path(__file__).parents[1] / "ffi"
SOURCES = "\n".join(p.read_text() for p in FFI.rglob("*") if p.suffix in (".h", ".cuh", ".cc"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kTileM", TILE_M),
        ("kTileK", rates.TILE_K),
        ("kNumThreads", 32 * rank.NUM_WARPS),
        ("kNumMathThreads", 32 * rank.NUM_MATH_WARPS),
        ("kPanelColumns", rates.PANEL_COLUMNS),
        ("kUnitBytes", rates.UNIT_BYTES),
        ("kFlopsPerCycle", rates.FLOPS_PER_CYCLE),
        ("kGatherColumns", layout.GATHER_COLUMNS),
        ("kRowsPerUnit", ROWS_PER_UNIT),
        ("kMaxRanks", legality.MAX_RANKS),
        ("kMaxSources", legality.MAX_SOURCES),
        ("kSmallestTileBytes", legality.SMALLEST_TILE_BYTES),
        ("kFewestSlots", legality.FEWEST_SLOTS),
    ],
)
def test_compiled_constant_is_equal(name, value):
    (found,) = re.findall(rf"\b{name} = ([\d *]+)[;,]", SOURCES)
    assert math.prod(map(int, found.split("*"))) == value


def test_the_selector_takes_the_share_of_the_first_group_for_granted():
    assert share(0, Configuration().workspace_bytes) == DEFAULT_SLOT_BYTES
