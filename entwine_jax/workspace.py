"""How the workspace is shared out: every device group has slots of its own, for good.

A group keeps its slots as long as the process lives, because launched programs may use them at
any time, and ranks of other groups may be sent tiles meanwhile. The first group gets half of the
limit, the next half of the rest, and so on: any number of groups stays within the limit, also one
that is lowered later, and the later ones split large results into more launches. The share is an
attribute of the custom call, so all ranks and the compiled library have the same number.
"""

import threading
from collections.abc import Hashable

MIB = 2**20

_lock = threading.Lock()
_shares: dict[tuple[tuple[int, ...], Hashable], int] = {}


def share(given_bytes: int, limit_bytes: int) -> int:
    """Slot bytes of the next group, whole MiB, where others were given so many."""
    return max(limit_bytes - given_bytes, 0) // (2 * MIB) * MIB


def slot_bytes(
    devices: tuple[int, ...], groups: Hashable, limit_bytes: int, *, keep: bool = True
) -> int:
    """Slot bytes of a device group, for good once a call keeps them. 0: none left.

    An abstract mesh does not know its `devices`: () stands for those that have, or will have, the
    same `groups`. All calls of a group have the same slots, so that one workspace is enough.
    """
    with _lock:
        for known, other in _shares:
            if other == groups and (known == devices or not known or not devices):
                slots = _shares[known, groups]
                break
        else:
            known, slots = (), share(sum(_shares.values()), limit_bytes)
        if keep and not known:
            _shares.pop(((), groups), None)
            _shares[devices, groups] = slots
        return slots
