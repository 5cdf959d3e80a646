"""What one GPU and its links give: the constants of the cost model.

All rates are sustained ones, under the power limit of the GPU, not data-sheet peaks: a burst of
a few milliseconds runs about 10% faster, but a training step is not a burst.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_type_hints

from entwine_jax.schedule.document import RefusedError, body, head, json_object

FORMAT = "entwine_jax.hardware"

BYTES_PER_US_AT_1_GB_S = 1e3

# What NCCL's ring takes beside its steps, in times of one step's bytes; presumably to fill and
# drain. From an earlier fit; with RING_STEP_US beside it, 0.25 fits as well.
RING_ENDS = 0.4

# What each step of the ring costs beside its bytes. Fitted with the collectives of the H200, whose
# rings had at most six steps; any more are taken to cost nothing, so that lax is not made out
# slower than it may be.
RING_STEP_US = 4.0
MOST_STEPS = 6

# Small arrays go by NCCL's protocols of low latency: so much for any array, and a lower rate. From
# 64 rows of 8192 on four GPUs (27, 19 and 18 us); the first is assumed, and on the low side.
SMALL_BASE_US, SMALL_GB_S = 9.0, 80.0

# What is measured may differ from the built-in profile by this factor; more is a mistake.
MAX_FACTOR = 10.0
MAX_BASE_US = 300.0


class Collective(NamedTuple):
    """Cost of a collective alone, in a ring of P ranks with P - 1 steps, AllReduce 2 (P - 1).

    base_us + steps_us(steps) + bytes each way * (1 + RING_ENDS / steps) / gb_s or, if that is less,
    as for small arrays: SMALL_BASE_US + bytes each way / SMALL_GB_S.

    The fewer ranks, the fewer steps and the slower a byte. Whatever number of ranks gb_s and
    base_us come from, they hold for others.

    Attributes:
        gb_s: payload rate of the ring's steps, each way and GPU, GB/s.
        base_us: what it costs beside steps and bytes, us.
    """

    gb_s: float
    base_us: float

    def time_us(self, num_bytes: float, num_steps: int) -> float:
        """Time for so many bytes each way, in so many steps of the ring, in us."""
        small_us = SMALL_BASE_US + num_bytes / (SMALL_GB_S * BYTES_PER_US_AT_1_GB_S)
        bytes_us = ring_bytes(num_bytes, num_steps) / (self.gb_s * BYTES_PER_US_AT_1_GB_S)
        return min(small_us, self.base_us + steps_us(num_steps) + bytes_us)


def steps_us(num_steps: int) -> float:
    """What so many steps of the ring cost beside their bytes, in us."""
    return RING_STEP_US * min(num_steps, MOST_STEPS)


def ring_bytes(num_bytes: float, num_steps: int) -> float:
    """What a ring could send in the time in which it sends so many bytes in so many steps."""
    return num_bytes * (1 + RING_ENDS / num_steps)


@dataclass(frozen=True)
class Hardware:
    """Measured rates of one GPU model in a host whose GPUs all reach each other over NVLink.

    Attributes:
        name: model name, as in "H200".
        num_sms: streaming multiprocessors, hence GEMM CTAs of one launch.
        matmul_tflops: bf16 matmul rate of a full wave of 128x256 tiles on all SMs, TFLOP/s.
        memory_gb_s: rate at which a matmul with few rows streams its weights, GB/s.
        link_gb_s: payload that bulk copies move to the peers, each way and GPU, GB/s. The
            benchmark's bound is built on this rate.
        store_link_gb_s: payload rate of all-to-all stores from a kernel, each way and GPU, GB/s.
        flag_latency_us: from a release store at system scope to the acquire load of the peer, us.
        launch_us: start and end of one kernel in a stream of back-to-back kernels, us.
        allreduce: NCCL's AllReduce without multicast.
        reducescatter: NCCL's ReduceScatter without multicast.
        allgather: NCCL's AllGather without multicast.
    """

    name: str
    num_sms: int
    matmul_tflops: float
    memory_gb_s: float
    link_gb_s: float
    store_link_gb_s: float
    flag_latency_us: float
    launch_us: float
    allreduce: Collective
    reducescatter: Collective
    allgather: Collective

    def __post_init__(self) -> None:
        for field, kind in get_type_hints(Hardware).items():
            value = getattr(self, field)
            if kind is str:
                if not isinstance(value, str):
                    raise ValueError(f"Hardware.{field} = {value!r}: must be a str")
                continue
            if kind is Collective and not isinstance(value, Collective):
                raise ValueError(f"Hardware.{field} = {value!r}: must be a Collective")
            for number in value if kind is Collective else (value,):
                if not _is_positive(number, int if kind is int else (int, float)):
                    wanted = "an int" if kind is int else "a finite number"
                    raise ValueError(
                        f"Hardware.{field} = {value!r}: must be {wanted} greater than 0"
                    )


def _is_positive(number: Any, kinds: type | tuple[type, ...]) -> bool:
    if isinstance(number, bool) or not isinstance(number, kinds):
        return False
    return 0 < number < math.inf


# Fitted on four H200s with multicast off. matmul_tflops: 5.25 TFLOP/s an SM, the mean over the
# seven shapes of the benchmark (5.1 to 5.4). memory_gb_s: 1 to 128 rows, 34 to 235 MB of
# weights, on one GPU.
#
# Collectives: whole calls of matmul and collective less the predicted matmul: 84 problems on two
# GPUs by `tune`, the 31 of the README by `bench`, the seven core shapes twice on four; least
# squares of log(predicted / measured), outliers damped. Mean error of the whole call: +2 to +3% on
# two by `tune`, -2 to -4% by `bench`, whose calls last longer at a lower clock, -1 to +1% on four;
# root mean square 5, 4 and 3%. The worst is 512, 7168, 7168 on two, 50 to 70 us: 19 to 42% too
# long. Other numbers of GPUs were not measured; 64 rows were left out, see SMALL_BASE_US. Without a
# matmul before them, two GPUs moved 297, 233 and 256 GB/s each way.
H200 = Hardware(
    name="H200",
    num_sms=132,
    matmul_tflops=693.0,
    memory_gb_s=4300.0,
    link_gb_s=360.0,
    store_link_gb_s=344.0,
    flag_latency_us=1.34,
    launch_us=4.0,
    allreduce=Collective(gb_s=403.0, base_us=12.0),
    reducescatter=Collective(gb_s=380.0, base_us=14.0),
    allgather=Collective(gb_s=388.0, base_us=17.0),
)

# Not measured: the same die and the same links as the H200; the memory rate is scaled by the
# data sheets' bandwidths (3.35 against 4.8 TB/s).
H100 = replace(H200, name="H100", memory_gb_s=3000.0)

PROFILES = {profile.name: profile for profile in (H100, H200)}

# Sold under the same name with fewer SMs or slower links: their profile would be a guess.
_UNLIKE_SXM = ("PCIE", "NVL")


def hardware_for(device_kind: str) -> Hardware | None:
    """The profile of a GPU model, or None where there is none (the op then runs as lax).

    Args:
        device_kind: `jax.Device.device_kind`, as in "NVIDIA H200" or "NVIDIA H100 80GB HBM3".
    """
    words = device_kind.upper().replace("-", " ").split()
    if any(word in _UNLIKE_SXM for word in words):
        return None
    return next((PROFILES[word] for word in words if word in PROFILES), None)


def format_profile(name: str, measured: Mapping[str, float | Collective], version: str) -> str:
    """The document of what was measured of a GPU model: fields of `Hardware` by name."""
    values = {
        field: value._asdict() if isinstance(value, Collective) else value
        for field, value in measured.items()
    }
    return json.dumps({**head(FORMAT, version), "hardware": name, "measured": values}) + "\n"


def parse_profile(document: object, version: str) -> Hardware:
    """The built-in profile of a GPU model with what was measured in its place.

    Raises:
        RefusedError: says what is wrong.
    """
    found = body(document, FORMAT, version, {"hardware": str, "measured": dict})
    if found["hardware"] not in PROFILES:
        raise RefusedError(f"hardware must be one of {', '.join(PROFILES)}")
    profile = PROFILES[found["hardware"]]
    measurable = {k: v for k, v in vars(profile).items() if k not in ("name", "num_sms")}
    measured: dict[str, Any] = {}
    for name, value in found["measured"].items():
        if name not in measurable:
            raise RefusedError(f"measured has the unknown field {name[:40]!r}")
        known = measurable[name]
        if isinstance(known, Collective):
            parts = json_object(value, name, dict.fromkeys(Collective._fields, float))
            _check_near(f"{name}.gb_s", parts["gb_s"], known.gb_s)
            if not 0 < parts["base_us"] <= MAX_BASE_US:
                raise RefusedError(
                    f"{name}.base_us = {parts['base_us']:.4g}: must be over 0 and at most "
                    f"{MAX_BASE_US:.0f}"
                )
            measured[name] = Collective(**{part: float(v) for part, v in parts.items()})
        else:
            json_object({name: value}, "measured", {name: float})
            _check_near(name, value, known)
            measured[name] = float(value)
    return replace(profile, **measured)


def _check_near(name: str, value: float, known: float) -> None:
    if not known / MAX_FACTOR <= value <= known * MAX_FACTOR:
        raise RefusedError(f"{name} = {value:.4g}: must be within {MAX_FACTOR:.0f}x of {known:g}")
