"""Times of calls of the fused kernel on two H200s, against which simulator and model are held."""

from entwine_jax.bench.cases import CORE
from entwine_jax.schedule import Problem, Schedule
from entwine_jax.schedule.problem import ALLGATHER, ALLREDUCE, REDUCESCATTER

WIDE, NARROW = Schedule(tile_n=256), Schedule(tile_n=128)


def senders(number):
    return Schedule(num_comm_ctas=number)


def suite_problem(op, shape, num_ranks):
    """As the benchmark shapes them: the all-gather has n and k the other way."""
    m, n, k = shape
    if op == ALLGATHER:
        n, k = k, n
    return Problem(op=op, m=m, n=n, k=k, num_ranks=num_ranks)


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
        # Of another machine, with a later kernel; by how many CTAs send, half of all first.
        (ALLGATHER, CORE[1], WIDE, 874.9),
        (ALLGATHER, CORE[1], senders(48), 853.2),
        (ALLGATHER, CORE[1], senders(32), 860.5),
        (ALLGATHER, CORE[2], WIDE, 1510.5),
        (ALLGATHER, CORE[2], senders(32), 1486.6),
        (ALLGATHER, CORE[2], senders(20), 1487.7),
        (ALLGATHER, CORE[3], WIDE, 379.5),
        (ALLGATHER, CORE[3], senders(48), 378.1),
        (ALLGATHER, CORE[3], senders(32), 379.6),
        (ALLGATHER, CORE[3], senders(20), 385.3),
        (ALLGATHER, CORE[4], WIDE, 750.9),
        (ALLGATHER, CORE[4], senders(32), 735.7),
        (ALLGATHER, CORE[4], senders(20), 732.4),
        (ALLGATHER, CORE[5], WIDE, 120.4),
        (ALLGATHER, CORE[5], senders(48), 126.0),
        (ALLGATHER, CORE[5], NARROW, 127.2),
        (ALLGATHER, CORE[6], WIDE, 229.0),
        (ALLGATHER, CORE[6], senders(48), 233.7),
        (ALLGATHER, CORE[6], NARROW, 246.6),
    )
]
