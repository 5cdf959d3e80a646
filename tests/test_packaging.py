import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import entwine_jax
from entwine_jax import configuration, lowering
from entwine_jax.schedule.problem import OPS

PACKAGE = Path(entwine_jax.__file__).parent

CUOBJDUMP = shutil.which("cuobjdump") or next(
    (str(p) for site in sys.path for p in Path(site).glob("nvidia/cu*/bin/cuobjdump")), None
)


@pytest.fixture
def cuda_build(compiled):
    """The compiled module, where it has its CUDA part."""
    if not compiled.build_info()["cuda"]:
        pytest.skip("built without CUDA: there is no device code to look at")
    return compiled


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_package_is_typed(compiled):
    assert (PACKAGE / "py.typed").exists()
    stub = Path(compiled.__file__).with_name("_ffi.pyi").read_text()
    assert "def build_info() -> dict" in stub
    assert "def tile_coordinates(" in stub


def test_stable_abi(compiled):
    assert Path(compiled.__file__).name == "_ffi.abi3.so"


def test_versions_agree(compiled):
    assert compiled.build_info()["version"] == entwine_jax.__version__


def test_public_names_exist():
    for name in entwine_jax.__all__:
        assert hasattr(entwine_jax, name)


def test_import_without_the_compiled_module():
    hidden = "import sys; sys.modules['entwine_jax._ffi'] = None; import entwine_jax as e; "
    code = hidden + "assert 'not built' in e.why_unavailable(), e.why_unavailable()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf is not installed")
def test_links_no_cuda_library(compiled):
    lines = output("readelf", "-d", compiled.__file__).splitlines()
    needed = [line for line in lines if "NEEDED" in line]
    assert needed
    for library in ("libcuda", "libcudart", "libnccl", "libpython"):
        assert not any(library in line for line in needed)


def test_device_code_is_for_sm_90a(cuda_build):
    assert CUOBJDUMP, "cuobjdump, of the CUDA toolkit that built the module, must be on the PATH"
    images = output(CUOBJDUMP, "--list-elf", cuda_build.__file__).splitlines()
    assert images
    assert all("sm_90a" in image for image in images)
    # Machine code only: PTX would be compiled at load time, by a compiler that may not know it.
    assert "sm_90a" not in output(CUOBJDUMP, "--list-ptx", cuda_build.__file__)


RECORDS = """
import jax
names = []
jax.ffi.register_ffi_target = lambda name, handlers, platform: names.append((name, platform))
import entwine_jax
# Raises once a backend runs.
jax.config.update("jax_num_cpu_devices", 3)
print(*(word for name in names for word in name))
"""


def test_import_registers_the_handlers_and_starts_no_backend(cuda_build):
    done = output(sys.executable, "-c", RECORDS)
    assert done.split() == [str(x) for name in cuda_build.registrations() for x in (name, "CUDA")]


def test_handlers_of_every_stage_are_there(cuda_build, monkeypatch):
    targets = cuda_build.registrations()
    names = [lowering.target_name(op) for op in OPS]
    monkeypatch.setattr(configuration, "_overridden", configuration.Configuration(graphs=True))
    assert set(targets) == {*names, *map(lowering.target_name, OPS)}
    assert len(targets) == 2 * len(OPS)
    for handlers in targets.values():
        assert set(handlers) == {"prepare", "initialize", "execute"}


def test_no_import_of_tools_by_the_package():
    """The package itself needs JAX and NumPy only; rich and matplotlib come with extras."""
    code = "import sys, entwine_jax; assert not {'rich', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)
