"""What ranks do: the calls of an epoch, the rules they keep, and the steps of a task."""

import enum
from typing import NamedTuple


class Op(enum.Enum):
    ALL_REDUCE = "AR"
    REDUCE_SCATTER = "RS"
    ALL_GATHER = "AG"


class Call(NamedTuple):
    """What all ranks do in one epoch.

    AllGather: `num_tiles` counts the pieces of rows that each rank sends, with a flag for each.

    A rank sums tiles that it owns where they were made if they are among the last `num_last` of all
    (AllReduce) or of its own (ReduceScatter). It pushes a partial of each of `num_parts` parts of
    k; of the tiles that it sums where they were made the last one stays where it is.
    """

    op: Op
    num_tiles: int
    num_last: int = 0
    num_parts: int = 1


class Rule(enum.Flag):
    """What the protocol rests on. A mutant lacks one of them."""

    WAIT_READY = enum.auto()  # who stores to a peer waits until the peer's kernel has started
    ADDRESS_BEFORE_EPOCH = enum.auto()  # in a ReadyWord
    DATA_BEFORE_FLAG = enum.auto()  # a flag is set when the data lies in its place
    WAIT_FLAG = enum.auto()  # who reads waits for the flags of the sources
    STORE_BEFORE_COUNT = enum.auto()  # a tile is counted when it has been stored
    WAIT_ARRIVED = enum.auto()  # a kernel ends when its output has arrived
    TWO_PARITIES = enum.auto()  # consecutive epochs use different slots
    SUM_ALL_SENT = enum.auto()  # units are dealt of every tile that was sent to its owner,
    SUM_SENT_ALONE = enum.auto()  # and of no other
    OWN_LAST_IN_ORDER = enum.auto()  # of the last tiles a rank does not visit its own first
    FLAG_OF_ONE_RANK = enum.auto()  # a flag has the same writer in all calls


ALL_RULES = ~Rule(0)


class Kind(enum.IntEnum):  # as an integer it is hashed quickly
    # Task: tell the peers that this kernel has started.
    PUBLISH_ADDRESS = enum.auto()
    PUBLISH_EPOCH = enum.auto()
    # Task: push a tile to its owner (AllReduce, ReduceScatter).
    WRITE_SLOT = enum.auto()
    SET_FLAG = enum.auto()  # also the last step of sending rows
    # Task: sum an owned tile.
    WAIT_READY = enum.auto()  # also the first step of sending rows
    READ_ADDRESSES = enum.auto()
    WAIT_FLAGS = enum.auto()
    WAIT_OTHERS_FLAGS = enum.auto()  # instead, where the tile was made
    READ_SLOTS = enum.auto()
    STORE = enum.auto()  # a tile to an output, or rows to a gathered x
    COUNT = enum.auto()
    # Task: load rows of another rank from the gathered x (AllGather). A flag, then the rows.
    WAIT_ROWS = enum.auto()
    READ_ROWS = enum.auto()


class Step(NamedTuple):
    """`peer`: the rank whose memory is written or, for WAIT_ROWS and READ_ROWS, the source."""

    kind: Kind
    tile: int = -1
    peer: int = -1
    part: int = 0  # of k


# Steps that happen as one. With the fine grain almost every step stands alone.
type Group = tuple[Step, ...]
type Script = tuple[Group, ...]


def apart(steps: list[Step]) -> Script:
    return tuple((step,) for step in steps)
