"""Says which schedule a problem gets and why; also the command `python -m entwine_jax explain`."""

import argparse
import sys
from dataclasses import dataclass
from itertools import groupby

from entwine_jax.schedule.cost_model import Prediction, bound_us, predict
from entwine_jax.schedule.hardware import H200, PROFILES
from entwine_jax.schedule.problem import (
    ALLGATHER,
    ALLREDUCE,
    ITEM_BYTES,
    OPS,
    REDUCESCATTER,
    Problem,
)
from entwine_jax.schedule.schedule import Schedule
from entwine_jax.schedule.select import DEFAULT_SLOT_BYTES, Decision, decide

SHORT_NAMES = {"ar": ALLREDUCE, "rs": REDUCESCATTER, "ag": ALLGATHER}
OP_NAMES = SHORT_NAMES | {op: op for op in OPS}

NUM_NEXT_BEST = 3


@dataclass(frozen=True)
class Explanation:
    """A problem, the decision about it and the bound of its time in us. `str()` prints it all."""

    problem: Problem
    bound_us: float
    decision: Decision

    @property
    def chosen(self) -> Prediction:
        """The predicted time of the chosen schedule."""
        return predict(self.problem, self.decision.schedule)

    @property
    def next_best(self) -> tuple[Prediction, ...]:
        """The cheapest fused schedules that were not chosen."""
        others = [p for p in self.decision.ranked if p.schedule != self.decision.schedule]
        return tuple(others[:NUM_NEXT_BEST])

    def __str__(self) -> str:
        problem, chosen = self.problem, self.chosen
        wire_mb = problem.wire_bytes / 1e6
        lines = [
            f"problem   {problem}",
            f"bound     {self.bound_us:.1f} us = max(matmul alone, {wire_mb:.1f} MB each way "
            f"/ {problem.hardware.link_gb_s:.0f} GB/s)",
            f"chosen    {chosen.schedule}",
            f"because   {self.decision.reason}",
            f"predicted {_time_and_terms(chosen)}, {self.bound_us / chosen.total_us:.2f} of bound",
        ]
        if chosen.schedule.fused:
            lines.append(f"limit     {chosen.limited_by}")
            lines.append(f"lax       {_time_and_terms(self.decision.lax)}")
        lines += [f"next best {p.total_us:.1f} us  {p.schedule}" for p in self.next_best]
        for reason, group in groupby(self.decision.rejected, key=lambda r: r.reason):
            lines.append(f"rejected  {len(list(group))} schedules: {reason}")
        return "\n".join(lines)


def explain(
    problem: Problem,
    *,
    slot_bytes: int = DEFAULT_SLOT_BYTES,
    override: Schedule | None = None,
) -> Explanation:
    """Explains which schedule `select_schedule` chooses for a problem, and why.

    Args:
        problem: op, global shape, dtype, number of ranks and hardware.
        slot_bytes: slot memory of the device group on each GPU.
        override: a schedule that is taken instead of the model's choice, where it can run.
    """
    decision = decide(problem, slot_bytes, override)
    return Explanation(problem, bound_us(problem), decision)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument("--op", choices=sorted(OP_NAMES), default="ar", help="default: ar")
    parser.add_argument("--m", type=int, required=True, help="rows of x (of the gathered x)")
    parser.add_argument("--n", type=int, required=True, help="columns of w before sharding")
    parser.add_argument("--k", type=int, required=True, help="contracted size before sharding")
    parser.add_argument("--ranks", type=int, required=True, help="GPUs that work together")
    parser.add_argument("--dtype", choices=sorted(ITEM_BYTES), default="bfloat16")
    parser.add_argument("--hardware", choices=sorted(PROFILES), default=H200.name)
    parser.add_argument(
        "--schedule", type=Schedule.from_text, metavar="FIELD=VALUE,...", help="take this one"
    )
    parser.add_argument("--slot-mib", type=int, default=DEFAULT_SLOT_BYTES // 2**20, metavar="MIB")


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    try:
        problem = Problem(
            op=OP_NAMES[args.op],
            m=args.m,
            n=args.n,
            k=args.k,
            num_ranks=args.ranks,
            dtype=args.dtype,
            hardware=PROFILES[args.hardware],
        )
    except ValueError as error:
        print(f"explain: {error}", file=sys.stderr)
        return 2
    slot_bytes = args.slot_mib * 2**20
    print(explain(problem, slot_bytes=slot_bytes, override=args.schedule))
    return 0


def _time_and_terms(prediction: Prediction) -> str:
    terms = ", ".join(f"{name} {value:.1f}" for name, value in prediction.terms().items())
    return f"{prediction.total_us:.1f} us ({terms})"
