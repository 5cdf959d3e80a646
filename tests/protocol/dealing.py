"""Every way of dealing the items of a rank to few CTAs, and what holds up what then.

Why no wait is cyclic, however few CTAs are resident and however far ahead they claim: A CTA that
sums item p where it was made waits for the peers' partials of p. Every CTA takes its items in the
order in which its rank visits them. AllReduce: all ranks visit them in the same order, so a peer
can be held up before p only by a wait in an earlier item; the first item that is waited for is held
up by none and comes, then the next. ReduceScatter: a rank waits only in its own last items, which
it visits after all items of the others, so a peer's p is never held up. Units are of items that
every rank visits before the first one in which it waits.
"""

import itertools
from collections.abc import Iterator, Sequence

type HeldUp = tuple[tuple[int, int], ...]  # an unfinished task, and the one that comes next


def deals(num_items: int, num_ctas: int) -> Iterator[tuple[int, ...]]:
    """By item the CTA that takes it; CTAs are named in the order of their first items."""
    for ctas in itertools.product(range(num_ctas), repeat=num_items):
        if all(cta in ctas[:i] or cta == len(set(ctas[:i])) for i, cta in enumerate(ctas)):
            yield ctas


def dealings(tasks: Sequence[int], num_ctas: int) -> Iterator[HeldUp]:
    """`tasks`: those of the items, in the order in which the rank visits them."""
    for ctas in deals(len(tasks), num_ctas):
        items_of = [
            [task for task, cta in zip(tasks, ctas, strict=True) if cta == each]
            for each in set(ctas)
        ]
        pairs = (pair for items in items_of for pair in itertools.pairwise(items))
        yield tuple(sorted(pairs))
