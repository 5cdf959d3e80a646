"""The records that traced kernels write (`ffi/launch/trace.h`), read into a timeline."""

import numpy as np

from entwine_jax.schedule.timeline import EVENT, Kind

RECORD = np.dtype(
    [
        ("start_ns", "<u8"),
        ("end_ns", "<u8"),
        ("tile", "<i4"),
        ("rank", "<u2"),
        ("cta", "<u2"),
        ("warp", "u1"),
        ("kind", "u1"),
        ("unused", "<u2", (3,)),
    ]
)


def decode(packed: bytes) -> np.ndarray:
    """The events of a launch, an array of `timeline.EVENT` in order of start; 0 is the first start.

    A tile is numbered as the role that recorded it counts tiles.

    Raises:
        ValueError: the bytes are no whole records, there are none, or one makes no sense.
    """
    if not packed or len(packed) % RECORD.itemsize:
        raise ValueError(f"{len(packed)} bytes of events: must be records of {RECORD.itemsize}")
    records = np.frombuffer(packed, RECORD)
    _require(records["end_ns"] >= records["start_ns"], records, "ends before it starts")
    _require(records["kind"] < len(Kind), records, "is of an unknown kind")
    records = records[np.argsort(records["start_ns"], kind="stable")]
    events = np.empty(len(records), EVENT)
    # Subtracted as integers: nanoseconds since the start of a machine exceed a float's precision.
    first_ns = records["start_ns"][0]
    events["start_us"] = (records["start_ns"] - first_ns) / 1e3
    events["end_us"] = (records["end_ns"] - first_ns) / 1e3
    for name in ("tile", "rank", "cta", "warp", "kind"):
        events[name] = records[name]
    return events


def _require(holds: np.ndarray, records: np.ndarray, what: str) -> None:
    if not holds.all():
        first = int(np.flatnonzero(~holds)[0])
        raise ValueError(f"event {first}, {records[first]}: {what}")
