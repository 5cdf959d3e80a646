import os

import pytest

NUM_VIRTUAL_DEVICES = 4


def pytest_configure(config):
    """Gives JAX virtual CPU devices before it starts, unless GPU tests were asked for."""
    if config.option.markexpr == "not gpu":
        # What was measured on the developer's machine must not decide what the tests see.
        os.environ["ENTWINE_JAX_MEASURED"] = "off"
        os.environ["JAX_PLATFORMS"] = "cpu"
        # Most of the time goes into compiling small programs: without LLVM's optimisation.
        flags = (
            f"--xla_force_host_platform_device_count={NUM_VIRTUAL_DEVICES} "
            "--xla_backend_optimization_level=0"
        )
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    import jax

    # Silent promotions hide what the op does with dtypes and ranks.
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    """Fails a test marked `gpu` (never skips it) where the fused kernel cannot run."""
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    from entwine_jax import runtime

    reason = runtime.why_unavailable(marker.kwargs.get("num_gpus", 2))
    if reason is not None:
        pytest.fail(f"GPU tests were asked for, but {reason}", pytrace=False)


@pytest.fixture(scope="session")
def compiled():
    """The compiled module. Missing, it fails the test: what it is compared with must be checked."""
    from entwine_jax import runtime

    ffi = runtime.load_ffi()
    if ffi is None:
        pytest.fail("entwine_jax._ffi is not built: `make inplace PYTHON=...`", pytrace=False)
    return ffi


@pytest.fixture
def fused_lowering(monkeypatch):
    """Lowers as if this machine could run the fused kernel, with the whole workspace to share."""
    from entwine_jax import lowering, runtime, workspace

    monkeypatch.setattr(workspace, "_shares", {})
    monkeypatch.setattr(lowering, "_warned", set())
    monkeypatch.setattr(runtime, "why_unavailable", lambda num_ranks=None: None)
    monkeypatch.setattr(runtime, "sees_gpus", lambda: True)
