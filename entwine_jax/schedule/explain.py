"""Says which schedule a problem gets, why, and what it was compared with."""

from dataclasses import dataclass
from itertools import groupby

from entwine_jax.schedule.cost_model import Prediction, predict
from entwine_jax.schedule.problem import ALLGATHER, Problem
from entwine_jax.schedule.select import Decision
from entwine_jax.schedule.table import Table

NUM_NEXT_BEST = 3


@dataclass(frozen=True)
class Explanation:
    """A problem, the decision about it and the bound of its time in us. `str()` prints it all.

    `table` is what was looked up, measured schedules by problem.
    """

    problem: Problem
    bound_us: float
    decision: Decision
    table: Table

    @property
    def chosen(self) -> Prediction:
        """The predicted time of the chosen schedule."""
        return predict(self.problem, self.decision.schedule)

    @property
    def next_best(self) -> tuple[Prediction, ...]:
        """The cheapest fused schedules that were not chosen."""
        others = [p for p in self.decision.ranked if p.schedule != self.decision.schedule]
        return tuple(others[:NUM_NEXT_BEST])

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        problem, chosen = self.problem, self.chosen
        wire_mb = problem.wire_bytes / 1e6
        lines = [
            f"problem   {problem}",
            f"bound     {self.bound_us:.1f} us = max(matmul alone, {wire_mb:.1f} MB each way "
            f"/ {problem.hardware.link_gb_s:.0f} GB/s)",
            f"chosen    {chosen.schedule}",
            f"because   {self.decision.reason}",
            f"source    {self.decision.source}; {self._table_text()}",
            f"predicted {_time_and_terms(chosen)}, {self.bound_us / chosen.total_us:.2f} of bound",
        ]
        if chosen.schedule.fused and problem.op == ALLGATHER:
            lines.append("senders   compute too; half of the CTAs send where no number is given")
        if chosen.schedule.fused:
            lines.append("overlap   matmul and link: the terms add up to more than the total")
            lines.append(f"limit     {chosen.limited_by}")
            lines.append(f"lax       {_time_and_terms(self.decision.lax)}")
        lines += [f"next best {p.total_us:.1f} us  {p.schedule}" for p in self.next_best]
        for reason, group in groupby(self.decision.rejected, key=lambda r: r.reason):
            number = len(list(group))
            lines.append(f"rejected  {number} schedule{'s' if number > 1 else ''}: {reason}")
        return "\n".join(lines)

    def _table_text(self) -> str:
        num_entries = len(self.table.entries)
        if num_entries == 0:
            return "no table of measured schedules"
        return f"table of {num_entries} measured schedules"


def _time_and_terms(prediction: Prediction) -> str:
    terms = ", ".join(f"{name} {value:.1f}" for name, value in prediction.terms().items())
    return f"{prediction.total_us:.1f} us ({terms})"
