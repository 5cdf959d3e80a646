"""How the fused kernel runs one problem: the decisions as data, checked when they are made."""

from dataclasses import dataclass, fields
from typing import Any

TILE_M = 128
TILE_WIDTHS = (256, 128)  # the usual one first

MAX_ROWS = 2**31


@dataclass(frozen=True)
class Schedule:
    """Decisions of one fused launch. The kernel only executes them.

    Attributes:
        tile_m: rows of an output tile; 128.
        tile_n: columns of an output tile, 256 or 128. Narrow tiles multiply at a lower rate, but
            leave half as much to be sent after the last wave.
        num_comm_ctas: CTAs that only reduce and forward, 0 to 64. Each takes one SM. 0 for the
            all-gather.
        num_senders: all-gather only: CTAs in which a spare warp sends rows while the other warps
            compute, 1 to 64, or 0 for half of all.
        num_spare_warps: warps of every GEMM CTA that reduce and forward, 0 to 2. Where this and
            num_comm_ctas are both 0, the warps that have run out of tiles do it all. All-gather: 1
            or 2, of which one sends.
        raster: tile rows of a band; inside a band tiles are visited column by column, 1 to 1024.
        push_spread: percent of the next tile's time over which the pushes of a finished tile are
            spread, 0 to 100.
        narrow_tail: how many of the last 128x256 tiles of a launch are computed in two halves of
            128 columns, 0 to 1024; 0 with tiles of 128 columns.
        split_k: parts that k is split into, each computed by itself, 1 to 8. A rank then pushes
            split_k partials of a tile. A sum has at most 8 of them: split_k <= 8 / ranks. For
            problems with fewer tiles than SMs: more SMs then read the weights.
        rows_per_launch: rows of a rank's result that one launch computes, a multiple of tile_m, as
            batches count in whole tiles; 0 for all of them. Problems whose slots exceed the
            workspace are split: between batches, or inside each where even one is too large.
        fused: False runs plain lax; the other fields then mean nothing.

    Raises:
        ValueError: names the field, its value and the rule it breaks.
    """

    tile_m: int = TILE_M
    tile_n: int = 256
    num_comm_ctas: int = 0
    num_senders: int = 0
    num_spare_warps: int = 1
    raster: int = 16
    push_spread: int = 80
    narrow_tail: int = 0
    split_k: int = 1
    rows_per_launch: int = 0
    fused: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.fused, bool):
            raise ValueError(f"Schedule.fused = {self.fused!r}: must be True or False")
        for name in ATTRIBUTE_NAMES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"Schedule.{name} = {value!r}: must be an int")
        self._require("tile_m", self.tile_m == TILE_M, "must be 128")
        self._require("tile_n", self.tile_n in TILE_WIDTHS, "must be 128 or 256")
        self._require_range("num_comm_ctas", 0, 64)
        self._require_range("num_senders", 0, 64)
        self._require_range("num_spare_warps", 0, 2)
        self._require_range("raster", 1, 1024)
        self._require_range("push_spread", 0, 100)
        self._require_range("narrow_tail", 0, 1024)
        self._require(
            "narrow_tail",
            self.narrow_tail == 0 or self.tile_n == 256,
            "must be 0 if tile_n = 128",
        )
        self._require_range("split_k", 1, 8)
        self._require(
            "rows_per_launch",
            0 <= self.rows_per_launch < MAX_ROWS and self.rows_per_launch % self.tile_m == 0,
            f"must be 0 or a positive multiple of tile_m = {self.tile_m}, and under 2^31",
        )

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ValueError(f"Schedule.{name} = {getattr(self, name)}: {rule}")

    def _require_range(self, name: str, low: int, high: int) -> None:
        holds = low <= getattr(self, name) <= high
        self._require(name, holds, f"must be between {low} and {high}")

    @classmethod
    def from_text(cls, text: str) -> "Schedule":
        """Reads `field=value,field=value`; fields that are left out keep their defaults.

        Raises:
            ValueError: an unknown field or one that comes twice, or a value that is not an int
                (true or false for fused).
        """
        values: dict[str, Any] = {}
        known = [field.name for field in fields(cls)]
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = (word.strip() for word in part.partition("="))
            if name not in known:
                raise ValueError(f"schedule field {name!r}: must be one of {', '.join(known)}")
            if name in values:
                raise ValueError(f"schedule field {name} = {value!r}: must be given only once")
            values[name] = _parse_bool(value) if name == "fused" else _parse_int(name, value)
        return cls(**values)

    def as_attributes(self) -> dict[str, int]:
        """The ints of the struct attribute that crosses the FFI."""
        return {name: getattr(self, name) for name in ATTRIBUTE_NAMES}

    def __str__(self) -> str:
        if not self.fused:
            return "lax"
        text = (
            f"tile {self.tile_m}x{self.tile_n}, comm CTAs {self.num_comm_ctas}, "
            f"spare warps {self.num_spare_warps}, raster {self.raster}, spread {self.push_spread}%"
        )
        if self.num_senders:
            text += f", senders {self.num_senders}"
        if self.narrow_tail:
            text += f", last {self.narrow_tail} in halves"
        if self.split_k > 1:
            text += f", k in {self.split_k} parts"
        return f"{text}, {self.rows_per_launch} rows a launch" if self.rows_per_launch else text


# What crosses the FFI: every field but the one that says whether anything crosses it at all.
ATTRIBUTE_NAMES = tuple(field.name for field in fields(Schedule) if field.name != "fused")


def _parse_int(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"schedule field {name} = {value!r}: must be an int") from None


def _parse_bool(value: str) -> bool:
    try:
        return {"true": True, "false": False, "1": True, "0": False}[value.lower()]
    except KeyError:
        raise ValueError(f"schedule field fused = {value!r}: must be true or false") from None
