import sys
from importlib import metadata
from types import SimpleNamespace

import jax
import pytest

import entwine_jax
from entwine_jax import configuration, lowering, runtime
from entwine_jax.schedule import H100, H200
from entwine_jax.schedule.legality import LackOfMemory
from entwine_jax.version import CALL_VERSION

GIB = 2**30


def gpu(ordinal, **changes):
    return {
        "ordinal": ordinal,
        "name": "NVIDIA H200",
        "compute_capability": (9, 0),
        "free_bytes": 30 * GIB,
        "peer_access": [True, True],
        **changes,
    }


class Ffi:
    """A compiled module on a machine with two H200s, unless told otherwise."""

    def __init__(
        self,
        *,
        version=entwine_jax.__version__,
        calls=CALL_VERSION,
        cuda=True,
        headers="0.11.2",
        driver=13000,
        gpus=None,
        workspace=(),
    ):
        self.calls = calls
        self.info = {
            "version": version,
            "jaxlib_headers": headers,
            "cuda": cuda,
            "nvcc": "13.0.88" if cuda else "",
        }
        self.driver = driver
        self.gpus = gpus or [gpu(0), gpu(1)]
        self.workspace = workspace

    def build_info(self):
        return self.info

    def registrations(self):
        assert self.info["cuda"], "only the CUDA part has it"
        return {f"entwine_jax.matmul_allreduce.v{self.calls}": {}}

    def driver_version(self):
        return self.driver

    def probe_devices(self, ordinals):
        assert ordinals == [2, 3]
        if isinstance(self.gpus, Exception):
            raise self.gpus
        return self.gpus

    def workspace_report(self):
        return self.workspace


@pytest.fixture
def machine(monkeypatch):
    """Pretends to be a machine with GPUs; call it to change what is found."""
    # Others of the machine are none of JAX's.
    devices = [SimpleNamespace(device_kind="NVIDIA H200", local_hardware_id=i) for i in (2, 3)]

    def pretend(ffi, num_processes=1):
        monkeypatch.setattr(runtime, "load_ffi", lambda: ffi)
        monkeypatch.setattr(jax, "local_devices", lambda backend=None: devices)
        monkeypatch.setattr(jax, "process_count", lambda: num_processes)

    pretend(Ffi())
    return pretend


@pytest.mark.usefixtures("machine")
def test_available_on_two_h200():
    assert runtime.why_unavailable() is None
    assert entwine_jax.is_available(2)


@pytest.mark.parametrize(
    ("ffi", "reason"),
    [
        (None, "kernel library: entwine_jax._ffi is not built"),
        (Ffi(version="0.0.9"), "entwine_jax._ffi is of version 0.0.9"),
        (
            Ffi(calls=CALL_VERSION - 1),
            f"kernel library: entwine_jax._ffi has the calls entwine_jax.matmul_allreduce.v"
            f"{CALL_VERSION - 1}, the package v{CALL_VERSION}",
        ),
        (Ffi(cuda=False), "kernel library: built without CUDA. Install the CUDA toolkit"),
        (Ffi(headers="99.1.0"), "kernel library: built with jaxlib 99.1.0, jaxlib "),
        (Ffi(driver=12080), "driver: supports CUDA 12.8; built with 13.0.88"),
        (Ffi(gpus=RuntimeError("CUDA error 999")), "GPU probe: CUDA error 999"),
        (Ffi(gpus=[gpu(0)]), "number of GPUs: 1 found, 2 needed"),
        (
            Ffi(gpus=[gpu(0), gpu(1, name="NVIDIA A100-SXM4", compute_capability=(8, 0))]),
            "GPU model: NVIDIA A100-SXM4 (sm_80)",
        ),
        (Ffi(gpus=[gpu(0), gpu(1, name="NVIDIA H100 NVL")]), "GPU model: NVIDIA H100 NVL (sm_90)"),
        (Ffi(gpus=[gpu(0), gpu(1, name="NVIDIA L40S")]), "GPU model: NVIDIA L40S (sm_90)"),
        (
            Ffi(gpus=[gpu(0, peer_access=[False, False]), gpu(1)]),
            "peer access: missing between GPUs 0-1",
        ),
        (
            Ffi(gpus=[gpu(0), gpu(1, free_bytes=2**28)]),
            "workspace: 0 of 512 MiB a GPU allocated, 256 MiB free",
        ),
    ],
)
def test_reason(machine, ffi, reason):
    machine(ffi)
    said = runtime.why_unavailable(2)
    assert said is not None
    assert said.startswith(reason) or reason in said
    assert isinstance(said, LackOfMemory) == said.startswith("workspace: ")


@pytest.mark.parametrize(
    "ffi",
    [
        None,
        Ffi(version="0.0.9"),
        Ffi(calls=CALL_VERSION - 1),
        Ffi(headers="99.1.0"),
        Ffi(cuda=False),
    ],
)
def test_what_to_build_where_the_library_is_missing_or_another(machine, ffi):
    machine(ffi)
    said = runtime.why_unavailable()
    assert f"`make inplace PYTHON={sys.executable}`" in said
    assert "`pip install --no-build-isolation .`" in said


@pytest.mark.parametrize(
    ("headers", "installed", "taken"),
    [
        ("0.11.2", "0.11.2", True),
        ("0.11.2", "0.12.0.1", True),
        ("0.12.0.1", "0.11.2", False),
        ("0.12.0.1", "0.12.0", False),
        ("0.11.2", "0.11.2+cuda13", True),
        ("0.12.0", "0.12.0.dev20261110", True),
    ],
)
def test_handlers_of_newer_headers_are_not_registered(
    machine, monkeypatch, headers, installed, taken
):
    registered = []
    ffi = Ffi(headers=headers)
    ffi.set_deadline = lambda seconds: None
    machine(ffi)
    monkeypatch.setattr(metadata, "version", lambda name: installed)
    monkeypatch.setattr(configuration, "watch", lambda react: None)
    monkeypatch.setattr(
        jax.ffi, "register_ffi_target", lambda name, handlers, platform: registered.append(name)
    )
    lowering.register_targets()
    assert bool(registered) == taken
    assert (runtime.why_unavailable() is None) == taken


def test_handlers_are_not_registered_in_a_jax_out_of_range(machine, monkeypatch):
    machine(Ffi())
    monkeypatch.delattr(jax.ffi, "register_ffi_target")
    monkeypatch.delattr(configuration, "watch")
    monkeypatch.setattr(jax, "__version_info__", (0, 13, 0))
    lowering.register_targets()


def test_too_few_gpus_for_the_group(machine):
    machine(Ffi())
    assert runtime.why_unavailable(4).startswith("number of GPUs: 2 found, 4 needed")


def test_one_gpu_has_nobody_to_work_with(machine):
    machine(Ffi(gpus=[gpu(0)]))
    assert runtime.why_unavailable().startswith("number of GPUs: 1 found, 2 needed")


def test_what_the_groups_have_allocated_need_not_be_free_too(machine):
    mib = 2**20
    groups = [{"device": 1, "slot_bytes": slots * mib} for slots in (256, 128)]
    enough, too_little = ([gpu(0), gpu(1, free_bytes=free * mib)] for free in (128, 127))
    machine(Ffi(gpus=enough, workspace=groups))
    assert runtime.why_unavailable() is None
    machine(Ffi(gpus=too_little, workspace=groups))
    said = "workspace: 384 of 512 MiB a GPU allocated, 127 MiB free"
    assert runtime.why_unavailable().startswith(said)


def test_the_conditions_that_need_cuda_end_with_a_library_without_it(machine):
    machine(Ffi(cuda=False))
    assert [check.topic for check in runtime.checks() if not check.holds] == ["kernel library"]


def test_a_library_for_another_system_counts_as_none(monkeypatch):
    def fail(name):
        raise ImportError(f"{name}: undefined symbol")

    monkeypatch.setattr(runtime.importlib, "import_module", fail)
    assert runtime.load_ffi() is None


@pytest.mark.parametrize(
    ("kind", "profile"), [("NVIDIA H100 80GB HBM3", H100), ("NVIDIA H200", H200), ("B200", H200)]
)
def test_hardware_is_that_of_the_gpus(monkeypatch, kind, profile):
    devices = [SimpleNamespace(device_kind=kind)]
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: devices)
    assert runtime.hardware() is profile


def test_several_processes(machine):
    machine(Ffi(), num_processes=2)
    assert runtime.why_unavailable().startswith("processes: 2 JAX processes")


@pytest.mark.usefixtures("machine")
def test_switched_off(monkeypatch):
    monkeypatch.setattr(configuration, "_overridden", configuration.Configuration(disabled=True))
    assert runtime.why_unavailable().startswith("switch: the fused kernel is switched off")


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("version", [(0, 11, 1), (0, 13, 0)])
def test_jax_out_of_range(monkeypatch, version):
    monkeypatch.setattr(jax, "__version_info__", version)
    assert "Install jax>=0.11.2,<0.13" in runtime.why_unavailable()


def test_every_failing_check_has_a_remedy(machine):
    machine(None)
    failing = [check for check in runtime.checks() if not check.holds]
    assert failing
    assert all(check.remedy for check in failing)


def test_this_machine_has_no_cuda_device():
    assert not entwine_jax.is_available()
    assert "JAX CUDA plugin" in [check.topic for check in runtime.checks() if not check.holds]
