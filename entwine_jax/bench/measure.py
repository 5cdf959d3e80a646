"""Measures one shape: chooses the schedule as the op does, verifies, then times."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from entwine_jax import lowering, selection
from entwine_jax.bench import programs, timing, verify
from entwine_jax.bench.breakdown import trace_breakdown
from entwine_jax.bench.cases import Shape
from entwine_jax.bench.ops import OPS, TimedOp
from entwine_jax.driver import WrongResultError
from entwine_jax.problem_arguments import OP_NAMES
from entwine_jax.schedule import H200, Problem, Schedule, hardware_for
from entwine_jax.schedule.cost_model import predict, predict_lax, wire_time_us


@dataclass(frozen=True)
class Settings:
    """What the user asks of every measurement.

    Attributes:
        op: which op, by its name on the command line.
        dtype: name of the dtype of x, w and the result.
        num_rounds: interleaved rounds.
        fewest_calls: calls of one dispatch at least; more where calls are short.
        schedule: overrides the selector's choice.
        verified: whether to compare with float64 first.
    """

    op: str = "ar"
    dtype: str = "bfloat16"
    num_rounds: int = 7
    fewest_calls: int = 32
    schedule: Schedule | None = None
    verified: bool = True

    @property
    def timed_op(self) -> TimedOp:
        """What is timed of the op."""
        return OPS[OP_NAMES[self.op]]


@dataclass(frozen=True)
class Measurement:
    """What was measured on one shape. Times are of one call, in us.

    bound_us and predicted_us are None where the hardware has no profile, error_ratio where
    nothing was verified, the traced times (`bench.breakdown`) where no call could be traced.
    `lax_reason` says why the op ran as plain lax, "" where it ran fused. matmul_us, lax_us and
    ours_us are medians of `rounds_us`: by program, the times in all rounds.
    """

    shape: Shape
    num_ranks: int
    dtype: str
    num_calls: int
    matmul_us: float
    lax_us: float
    ours_us: float
    bound_us: float | None
    predicted_us: float | None
    error_ratio: float | None
    traced_matmul_us: float | None
    traced_exposed_us: float | None
    traced_drain_us: float | None
    schedule: str
    lax_reason: str
    rounds_us: Mapping[str, Sequence[float]]

    @property
    def fraction(self) -> float | None:
        """How near the op comes to the bound; 1 is on it."""
        return None if self.bound_us is None else self.bound_us / self.ours_us

    @property
    def speed_up(self) -> float:
        """Time of plain lax over time of the op."""
        return self.lax_us / self.ours_us


def measure(
    mesh: Mesh,
    shape: Shape,
    settings: Settings,
    seed: int,
    on_dispatch: Callable[[], None] = lambda: None,
) -> Measurement:
    """Verifies and times one shape on all devices of a mesh.

    Raises:
        ValueError: a size that the number of ranks does not divide.
        WrongResultError: a result that is not right; nothing is timed then.
    """
    device = mesh.devices.flat[0]
    hardware = hardware_for(device.device_kind)
    op = settings.timed_op
    as_built_in = op.problem(shape, mesh.size, dtype=settings.dtype, hardware=hardware or H200)
    problem = selection.as_measured(as_built_in)
    schedule, lax_reason = _path(problem, settings.schedule)
    inputs = programs.make_inputs(mesh, op, shape, jnp.dtype(settings.dtype), seed)
    timed = programs.make_programs(mesh, op, op.calls(settings.schedule))
    ratio = _verify(inputs, timed, seed) if settings.verified else None
    num_calls = timing.num_calls(
        settings.fewest_calls,
        programs.NUM_WEIGHTS,
        predict_lax(problem).matmul_us if hardware else None,
    )
    rounds = _time(inputs, timed, num_calls, settings.num_rounds, seed, on_dispatch)
    times = {name: statistics.median(of_rounds) for name, of_rounds in rounds.items()}
    parts = trace_breakdown(problem, schedule)
    return Measurement(
        shape=shape,
        num_ranks=mesh.size,
        dtype=settings.dtype,
        num_calls=num_calls,
        matmul_us=times["matmul"],
        lax_us=times["lax"],
        ours_us=times["ours"],
        # Built-in link rate: one yardstick for all machines of a model, whatever profile they have.
        bound_us=max(times["matmul"], wire_time_us(as_built_in)) if hardware else None,
        predicted_us=predict(problem, schedule).total_us if hardware else None,
        error_ratio=ratio,
        traced_matmul_us=parts and parts.matmul_us,
        traced_exposed_us=parts and parts.exposed_us,
        traced_drain_us=parts and parts.drain_us,
        schedule=str(schedule),
        lax_reason=lax_reason,
        rounds_us=rounds,
    )


def _path(problem: Problem, override: Schedule | None) -> tuple[Schedule, str]:
    """The schedule that the op takes, and why it is plain lax ("" where it is not)."""
    reason = lowering.why_lax(
        problem.m, problem.n_local, problem.k_local, problem.dtype, problem.num_ranks
    )
    if reason is not None:
        return Schedule(fused=False), reason
    # The bench has one device group, the first of its process.
    decision = selection.decide(problem, override=override)
    return decision.schedule, "" if decision.schedule.fused else decision.reason


def _verify(inputs, timed, seed) -> float:
    x, w = inputs.x, inputs.weights[0]
    ours, lax = (programs.once(timed[name])(x, w) for name in ("ours", "lax"))
    result = verify.verify(x, w, ours, lax, seed)
    if not result.holds:
        raise WrongResultError(
            f"distance from float64 {result.ours:.4g}, of lax {result.lax:.4g} "
            f"(at most {verify.MAX_ERROR_RATIO:g} times that); "
            f"ranks {'equal' if result.ranks_equal else 'DIFFER'}"
        )
    return result.error_ratio


def _time(inputs, timed, num_calls, num_rounds, seed, on_dispatch) -> dict[str, list[float]]:
    compiled = {name: programs.repeated(program, num_calls) for name, program in timed.items()}

    def start(name: str) -> Callable[[], tuple[jax.Array, ...]]:
        x = inputs.whole_x if name == "matmul" else inputs.x
        return lambda: compiled[name](x, inputs.weights)

    return timing.interleaved_times(
        {name: start(name) for name in compiled},
        calls_per_dispatch=num_calls,
        num_rounds=num_rounds,
        seed=seed,
        after_dispatch=on_dispatch,
    )
