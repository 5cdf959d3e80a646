"""Timelines as Chrome trace events, which https://ui.perfetto.dev and chrome://tracing show."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from entwine_jax.schedule.simulate.rank import NUM_WARPS
from entwine_jax.schedule.timeline import Kind


def write(path: Path, timelines: Mapping[str, np.ndarray]) -> None:
    """Writes timelines by name, such as measured and simulated; every rank is a process."""
    trace_events: list[dict[str, Any]] = []
    for position, (name, events) in enumerate(timelines.items()):
        trace_events += trace_events_of(events, name, first_process=position * 1000)
    document = {"displayTimeUnit": "ns", "traceEvents": trace_events}
    path.write_text(json.dumps(document, separators=(",", ":")))


def trace_events_of(events: np.ndarray, name: str, first_process: int) -> list[dict[str, Any]]:
    """The names of the tracks, then one complete event ("X", times in us) for each event."""
    process = first_process + events["rank"].astype(np.int64)
    # Tracks of one process are the warps of all CTAs of a rank.
    thread = events["cta"].astype(np.int64) * NUM_WARPS + events["warp"]
    trace_events: list[dict[str, Any]] = []
    for pid in np.unique(process).tolist():
        label = {"name": f"{name}, rank {pid - first_process}"}
        trace_events.append({"ph": "M", "name": "process_name", "pid": pid, "args": label})
    for pid, tid in np.unique(np.stack([process, thread]), axis=1).T.tolist():
        cta, warp = divmod(tid, NUM_WARPS)
        label = {"name": f"CTA {cta}, warp {warp}"}
        trace_events.append(
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": label}
        )
    names = [kind.name.lower().replace("_", " ") for kind in Kind]
    duration = events["end_us"] - events["start_us"]
    columns = (process, thread, events["start_us"], duration, events["kind"], events["tile"])
    for pid, tid, start, length, kind, tile in zip(*(c.tolist() for c in columns), strict=True):
        event = {"ph": "X", "name": names[kind], "pid": pid, "tid": tid, "ts": start, "dur": length}
        if tile >= 0:
            event["args"] = {"tile": tile}
        trace_events.append(event)
    return trace_events
