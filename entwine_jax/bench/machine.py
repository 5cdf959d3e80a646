"""On what, and with which versions, a benchmark ran."""

import os
from dataclasses import dataclass
from importlib import metadata

import jax

from entwine_jax.version import __version__

NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


@dataclass(frozen=True)
class Machine:
    """Devices and versions; nccl is None where its package is not installed."""

    device_kind: str
    num_devices: int
    platform: str
    jax: str
    jaxlib: str
    entwine_jax: str
    nccl: str | None
    nvls_disabled: bool

    def __str__(self) -> str:
        text = (
            f"{self.num_devices} x {self.device_kind}, jax {self.jax}, jaxlib {self.jaxlib}, "
            f"entwine_jax {self.entwine_jax}"
        )
        if self.platform == "cpu":
            return text
        nvls = "NVLS off (NCCL_NVLS_ENABLE=0)" if self.nvls_disabled else "NVLS as NCCL chooses"
        return f"{text}, NCCL {self.nccl or 'of unknown version'} with {nvls}"


def describe_machine(num_devices: int) -> Machine:
    """Describes the first `num_devices` local devices."""
    device = jax.local_devices()[0]
    return Machine(
        device_kind=device.device_kind,
        num_devices=num_devices,
        platform=device.platform,
        jax=jax.__version__,
        jaxlib=metadata.version("jaxlib"),
        entwine_jax=__version__,
        nccl=next(filter(None, map(_version, NCCL_PACKAGES)), None),
        nvls_disabled=os.environ.get("NCCL_NVLS_ENABLE") == "0",
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
