"""Times of calls of the fused kernel on two H200s, against which simulator and model are held."""

from entwine_jax.bench.cases import CORE, Shape
from entwine_jax.bench.ops import OPS
from entwine_jax.schedule import Schedule
from entwine_jax.schedule.problem import ALLGATHER, ALLREDUCE, REDUCESCATTER

WIDE, NARROW = Schedule(tile_n=256), Schedule(tile_n=128)


def suite_problem(op, shape, num_ranks):
    """As the benchmark shapes them: the all-gather has n and k the other way."""
    return OPS[op].problem(Shape(*shape), num_ranks)


# us of one of many calls back to back, without JAX; in one run, at the clock of sustained work.
MEASURED_CALLS = [
    (suite_problem(op, shape, 2), schedule, measured_us)
    for op, shape, schedule, measured_us in (
        (ALLREDUCE, CORE[1], WIDE, 858.9),
        (ALLREDUCE, CORE[3], WIDE, 384.0),
        (ALLREDUCE, CORE[3], Schedule(narrow_tail=116), 379.6),
        (ALLREDUCE, CORE[4], Schedule(narrow_tail=116), 729.8),
        (ALLREDUCE, CORE[5], Schedule(narrow_tail=124), 124.9),
        (ALLREDUCE, CORE[6], NARROW, 206.1),
        (REDUCESCATTER, CORE[3], WIDE, 365.1),
        (REDUCESCATTER, CORE[4], WIDE, 712.3),
        (REDUCESCATTER, CORE[5], WIDE, 115.6),
        (REDUCESCATTER, CORE[5], NARROW, 123.2),
        (REDUCESCATTER, CORE[6], WIDE, 199.6),
        (REDUCESCATTER, CORE[6], NARROW, 205.9),
    )
]

# The all-gather on another machine, with a later kernel: by shape, us by the number of CTAs that
# send (0: half of all), and of narrow tiles with half of all.
_GATHERED = (
    (CORE[1], {0: 874.9, 48: 853.2, 32: 860.5}, None),
    (CORE[2], {0: 1510.5, 32: 1486.6, 20: 1487.7}, None),
    (CORE[3], {0: 379.5, 48: 378.1, 32: 379.6, 20: 385.3}, None),
    (CORE[4], {0: 750.9, 32: 735.7, 20: 732.4}, None),
    (CORE[5], {0: 120.4, 48: 126.0}, 127.2),
    (CORE[6], {0: 229.0, 48: 233.7}, 246.6),
)
for _shape, _by_senders, _narrow_us in _GATHERED:
    _times = {Schedule(num_senders=number): us for number, us in _by_senders.items()}
    if _narrow_us is not None:
        _times[NARROW] = _narrow_us
    MEASURED_CALLS += [(suite_problem(ALLGATHER, _shape, 2), *pair) for pair in _times.items()]
