"""The clock of the simulation, and the links: one way out of every GPU and one way in."""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple


class EventQueue:
    """Calls functions in order of time; those of the same time in the order they were asked for."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()

    def at(self, time: float, function: Callable[..., None], *args: Any) -> None:
        """Calls `function(time, *args)` when the clock is there."""
        heappush(self._heap, (time, next(self._numbers), function, args))

    def run(self) -> None:
        """Until nothing is left to call."""
        heap = self._heap
        while heap:
            time, _, function, args = heappop(heap)
            function(time, *args)


class Message(NamedTuple):
    """So many bytes for each of several peers, none of them the sender.

    `then(left, arrived)` is called when the first byte leaves, with the times in us at which the
    last one will have left and will have arrived. What is for one peer waits in the way out only
    when that for the peer before has left, unless all is sent `at_once`.
    """

    peers: Sequence[int]
    num_bytes: float
    then: Callable[[float, float], None]
    at_once: bool = True

    @property
    def waiting_bytes(self) -> float:
        """What of it waits in the way out at a time."""
        return self.num_bytes * (len(self.peers) if self.at_once else 1)


class Links:
    """Messages leave a GPU in the order in which they were asked for and at the link's rate.

    They arrive at the same rate, so what several GPUs send to one queues there. A way out is
    congested while more than `buffer_bytes` wait for it.
    """

    def __init__(
        self, events: EventQueue, num_ranks: int, bytes_per_us: float, buffer_bytes: float
    ) -> None:
        self._events = events
        self._rate = bytes_per_us
        self._out_free = [0.0] * num_ranks
        self._in_free = [0.0] * num_ranks
        self._queue: list[deque[Message]] = [deque() for _ in range(num_ranks)]
        self._queued_bytes = [0.0] * num_ranks
        self._congested_since: list[float | None] = [None] * num_ranks
        self._congested_us = [0.0] * num_ranks
        self._buffer_bytes = buffer_bytes
        self.num_bytes = [[0.0] * num_ranks for _ in range(num_ranks)]
        """From one rank to another."""

    def send(self, now: float, source: int, message: Message) -> None:
        """Sends as soon as what was asked for before has left."""
        queue = self._queue[source]
        if not queue and self._out_free[source] <= now:
            self._transmit(now, source, message)
            return
        queue.append(message)
        if len(queue) == 1:
            self._events.at(self._out_free[source], self._send_next, source)
        self._change_queue(now, source, message.waiting_bytes)

    def congested_us(self, now: float, source: int) -> float:
        """How long the way out of this GPU has been congested so far, in us."""
        since = self._congested_since[source]
        return self._congested_us[source] + (0.0 if since is None else now - since)

    def _send_next(self, now: float, source: int) -> None:
        queue = self._queue[source]
        message = queue.popleft()
        self._transmit(now, source, message)
        if queue:
            self._events.at(self._out_free[source], self._send_next, source)
        self._change_queue(now, source, -message.waiting_bytes)

    def _change_queue(self, now: float, source: int, num_bytes: float) -> None:
        queued = self._queued_bytes[source] = self._queued_bytes[source] + num_bytes
        since = self._congested_since[source]
        if (queued > self._buffer_bytes) == (since is None):
            if since is None:
                self._congested_since[source] = now
            else:
                self._congested_since[source] = None
                self._congested_us[source] += now - since

    def _transmit(self, now: float, source: int, message: Message) -> None:
        time = message.num_bytes / self._rate
        in_free, num_bytes = self._in_free, self.num_bytes[source]
        left = arrived = now
        for peer in message.peers:
            here = in_free[peer]
            here = (here if here > left else left) + time
            in_free[peer] = here
            arrived = here if here > arrived else arrived
            left += time
            num_bytes[peer] += message.num_bytes
        self._out_free[source] = left
        message.then(left, arrived)
