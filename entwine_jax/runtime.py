"""Is the fused kernel usable here, and if not, why and what helps."""

import importlib
import sys
from collections.abc import Iterator
from importlib import metadata
from types import ModuleType
from typing import Any, NamedTuple

import jax

from entwine_jax import configuration
from entwine_jax.schedule import H200, Hardware, hardware_for
from entwine_jax.schedule.legality import MIN_RANKS, LackOfMemory
from entwine_jax.version import CALL_VERSION, __version__

OLDEST_JAX, FIRST_UNSUPPORTED_JAX = (0, 11, 2), (0, 13)


class Check(NamedTuple):
    """One condition of the fused kernel: what was found, and what helps where it does not hold.

    `of_memory` says that free memory is what it asks for.
    """

    topic: str
    found: str
    holds: bool
    remedy: str = ""
    of_memory: bool = False


def is_available(num_ranks: int | None = None) -> bool:
    """Whether the fused kernel can run in this process (between `num_ranks` GPUs)."""
    return why_unavailable(num_ranks) is None


def why_unavailable(num_ranks: int | None = None) -> str | None:
    """What stands in the way of the fused kernel, with the remedy; None if nothing does."""
    for check in checks(num_ranks):
        if not check.holds:
            reason = f"{check.topic}: {check.found}. {check.remedy}"
            return LackOfMemory(reason) if check.of_memory else reason
    return None


def hardware() -> Hardware:
    """The profile of this machine's GPUs; that of the H200 where no GPU is seen."""
    devices, _ = _find_devices()
    return (hardware_for(devices[0].device_kind) if devices else None) or H200


def sees_gpus() -> bool:
    """Whether JAX sees CUDA devices in this process."""
    return bool(_find_devices()[0])


def ordinals() -> list[int]:
    """CUDA's numbers of the GPUs that JAX uses in this process, in JAX's order."""
    return [device.local_hardware_id for device in _find_devices()[0]]


def load_ffi() -> ModuleType | None:
    """The compiled module, or None where it was not built, or not for this system."""
    try:
        return importlib.import_module("entwine_jax._ffi")
    except ImportError:
        return None


def checks(num_ranks: int | None = None) -> Iterator[Check]:
    """Yields the conditions in order; ends after the first that the later ones depend on."""
    yield _check_switch()
    yield _check_jax_version()
    yield from _check_library()
    devices, check = _find_devices()
    yield check
    yield _check_processes()
    if not devices:
        return
    ffi = load_ffi()
    if ffi is None or not ffi.build_info()["cuda"]:
        return
    yield _check_driver(ffi)
    try:
        gpus = ffi.probe_devices(ordinals())
    except RuntimeError as error:
        yield Check("GPU probe", str(error), False, "Run nvidia-smi and repair the driver first.")
        return
    yield _check_number(gpus, num_ranks)
    yield _check_model(gpus)
    yield _check_peers(gpus)
    yield _check_memory(ffi, gpus)


def _check_switch() -> Check:
    disabled = configuration.current().disabled
    return Check(
        "switch",
        "the fused kernel is switched off" if disabled else "the fused kernel is switched on",
        not disabled,
        "Unset ENTWINE_JAX_DISABLE, or call entwine_jax.configure(disabled=False).",
    )


def supports_jax() -> bool:
    """Whether XLA's collectives extension has the form that the handlers use, in this JAX."""
    return OLDEST_JAX <= jax.__version_info__ < FIRST_UNSUPPORTED_JAX


def takes_handlers_of(jaxlib_version: str) -> bool:
    """Whether the installed XLA takes handlers that were compiled with the headers of a jaxlib.

    An XLA that is older than the headers does not, and its backend would not start with them.
    """
    return _numbers(jaxlib_version) <= _numbers(metadata.version("jaxlib"))


def _numbers(version: str) -> list[int]:
    public, _, _ = version.partition("+")
    return [int(part) for part in public.split(".") if part.isdecimal()]


def _check_jax_version() -> Check:
    oldest, end = (".".join(map(str, v)) for v in (OLDEST_JAX, FIRST_UNSUPPORTED_JAX))
    return Check(
        "FFI collectives extension",
        f"jax {jax.__version__}",
        supports_jax(),
        f"Install jax>={oldest},<{end}.",
    )


def _check_library() -> Iterator[Check]:
    topic, ffi = "kernel library", load_ffi()
    # Isolated from nvidia-cutlass, pip would leave the CUDA part out.
    build = (
        "in the folder of the sources, with the packages of README's Install: "
        f"`make inplace PYTHON={sys.executable}` to run from there, or else "
        "`pip install --no-build-isolation .`."
    )
    if ffi is None:
        found = "entwine_jax._ffi is not built, or not for this system"
        yield Check(topic, found, False, f"Build it {build}")
        return
    rebuild = f"They must be of the same sources. Build them {build}"
    info = ffi.build_info()
    if info["version"] != __version__:
        yield Check(
            topic,
            f"entwine_jax._ffi is of version {info['version']}, the package of {__version__}",
            False,
            rebuild,
        )
        return
    targets = ffi.registrations() if info["cuda"] else ()
    others = [name for name in targets if not name.endswith(f".v{CALL_VERSION}")]
    if others:
        found = f"entwine_jax._ffi has the calls {', '.join(others)}, the package v{CALL_VERSION}"
        yield Check(topic, found, False, rebuild)
        return
    if not takes_handlers_of(info["jaxlib_headers"]):
        headers, installed = info["jaxlib_headers"], metadata.version("jaxlib")
        found = f"built with jaxlib {headers}, jaxlib {installed} is here"
        yield Check(
            topic, found, False, f"Install a newer jaxlib, or build it with this one {build}"
        )
        return
    found = f"compiled with nvcc {info['nvcc']}" if info["cuda"] else "built without CUDA"
    remedy = (
        f"Install the CUDA toolkit (nvcc 12.8 or newer) and nvidia-cutlass, then build it {build}"
    )
    yield Check(topic, found, info["cuda"], remedy)


def _find_devices() -> tuple[list[Any], Check]:
    topic = "JAX CUDA plugin"
    remedy = 'Install it with `pip install "jax[cuda13]"` and leave JAX_PLATFORMS unset.'
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        return [], Check(topic, "JAX sees no CUDA device", False, remedy)
    names = sorted({device.device_kind for device in devices})
    return devices, Check(topic, f"{len(devices)} x {', '.join(names)}", True)


def _check_processes() -> Check:
    num_processes = jax.process_count()
    return Check(
        "processes",
        f"{num_processes} JAX process{'es' if num_processes > 1 else ''}",
        num_processes == 1,
        "Drive all GPUs of the group from one process.",
    )


def _check_driver(ffi: ModuleType) -> Check:
    version = ffi.driver_version()
    toolkit = ffi.build_info()["nvcc"]
    return Check(
        "driver",
        f"supports CUDA {version // 1000}.{version % 1000 // 10}; built with {toolkit}",
        version // 1000 >= int(toolkit.split(".")[0]),
        "Update the NVIDIA driver, or build with an older CUDA toolkit.",
    )


def _check_number(gpus: list[dict], num_ranks: int | None) -> Check:
    needed = MIN_RANKS if num_ranks is None else num_ranks
    return Check(
        "number of GPUs",
        f"{len(gpus)} found, {needed} needed",
        len(gpus) >= needed,
        "Use more GPUs, or a smaller mesh axis; check CUDA_VISIBLE_DEVICES.",
    )


def _check_model(gpus: list[dict]) -> Check:
    unfit = [
        gpu
        for gpu in gpus
        if tuple(gpu["compute_capability"]) != (9, 0) or hardware_for(gpu["name"]) is None
    ]
    names = {"{name} (sm_{0}{1})".format(*g["compute_capability"], **g) for g in unfit or gpus}
    return Check(
        "GPU model",
        ", ".join(sorted(names)),
        not unfit,
        "The kernel needs H100 or H200 SXM GPUs, not PCIe or NVL: set CUDA_VISIBLE_DEVICES.",
    )


def _check_peers(gpus: list[dict]) -> Check:
    cut = [
        f"{a['ordinal']}-{b['ordinal']}"
        for a in gpus
        for position, b in enumerate(gpus)
        if a["ordinal"] != b["ordinal"] and not a["peer_access"][position]
    ]
    return Check(
        "peer access",
        f"missing between GPUs {', '.join(cut)}" if cut else "between all GPUs",
        not cut,
        "The GPUs must be joined by NVLink, without MIG; see `nvidia-smi topo -p2p w`.",
    )


def _check_memory(ffi: ModuleType, gpus: list[dict]) -> Check:
    limit = configuration.current().workspace_bytes
    held = {gpu["ordinal"]: 0 for gpu in gpus}
    for row in ffi.workspace_report():
        held[row["device"]] += row["slot_bytes"]
    least_free = min(gpu["free_bytes"] for gpu in gpus)
    held_mib, limit_mib, free_mib = (n >> 20 for n in (max(held.values()), limit, least_free))
    return Check(
        "workspace",
        f"{held_mib} of {limit_mib} MiB a GPU allocated, {free_mib} MiB free",
        all(gpu["free_bytes"] + held[gpu["ordinal"]] >= limit for gpu in gpus),
        "Lower ENTWINE_JAX_WORKSPACE_MIB, or XLA_CLIENT_MEM_FRACTION (JAX's own share).",
        of_memory=True,
    )
