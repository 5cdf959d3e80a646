"""How the workspace is shared out: every device group has slots of its own, for good.

A group keeps its slots as long as the process lives, because launched programs may use them at
any time, and ranks of other groups may be sent tiles meanwhile. The first group gets half of the
limit, the next half of the rest, and so on: any number of groups stays within the limit, and the
later ones split large results into more launches. The share is an attribute of the custom call, so
all ranks and the compiled library have the same number.
"""

import threading
from collections.abc import Hashable

MIB = 2**20

_lock = threading.Lock()
_shares: dict[Hashable, int] = {}


def share(position: int, limit_bytes: int) -> int:
    """Slot bytes of the group that came `position`-th (from 0), whole MiB."""
    return (limit_bytes >> (position + 1)) // MIB * MIB


def slot_bytes(group: Hashable, limit_bytes: int) -> int:
    """Slot bytes of a device group; the first call for a group gives it its place. 0: none left."""
    with _lock:
        if group not in _shares:
            _shares[group] = share(len(_shares), limit_bytes)
        return _shares[group]
