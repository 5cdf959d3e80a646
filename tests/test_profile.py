"""The hardware profile, measured with injected times, and the probes on CPU devices."""

import dataclasses
import json

import pytest

from entwine_jax import configuration, measured, runtime
from entwine_jax.__main__ import main
from entwine_jax.driver import WrongResultError
from entwine_jax.schedule import H200, Problem, Schedule
from entwine_jax.schedule.cost_model import predict, predict_lax
from entwine_jax.schedule.hardware import Collective
from entwine_jax.schedule.legality import MAX_RANKS, MIN_RANKS
from entwine_jax.schedule.problem import ALLGATHER, ALLREDUCE, OPS, REDUCESCATTER, ring_steps
from entwine_jax.tune import gpu, probes, profile
from entwine_jax.tune.gpu import GpuTimer
from entwine_jax.tune.probes import JaxProbes
from entwine_jax.tune.profile import line_through, measure_profile, wire_bytes

# What the fake times are made of, and the profile has to find.
TRUE = dataclasses.replace(
    H200,
    matmul_tflops=640.0,
    memory_gb_s=2900.0,
    link_gb_s=371.0,
    store_link_gb_s=333.0,
    allreduce=Collective(301.0, 21.0),
    reducescatter=Collective(302.0, 22.0),
    allgather=Collective(303.0, 23.0),
)


class FakeProbes:
    def __init__(self, num_ranks=4):
        self.num_ranks = num_ranks

    def matmul_us(self, m, n, k):
        num_bytes = 2 * (m * k + k * n + m * n)
        return max(2 * m * n * k / (TRUE.matmul_tflops * 1e6), num_bytes / TRUE.memory_gb_s / 1e3)

    def copy_us(self, num_bytes):
        return num_bytes / (TRUE.link_gb_s * 1e3)

    def collective_us(self, op, m, n):
        collective = {
            ALLREDUCE: TRUE.allreduce,
            REDUCESCATTER: TRUE.reducescatter,
            ALLGATHER: TRUE.allgather,
        }[op]
        num_steps = ring_steps(op, self.num_ranks)
        return collective.time_us(wire_bytes(op, m, n, self.num_ranks), num_steps)

    def fused_us(self, problem, schedule):
        return predict(dataclasses.replace(problem, hardware=TRUE), schedule).total_us


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_finds_the_true_rates_on_any_number_of_ranks(num_ranks):
    steps = []
    found = measure_profile(H200, num_ranks, FakeProbes(num_ranks), lambda: steps.append(1))
    assert len(steps) == profile.NUM_STEPS == len(found)
    for name, value in found.items():
        assert value == pytest.approx(getattr(TRUE, name), rel=0.01), name
    missing = {field.name for field in dataclasses.fields(H200)} - set(found)
    assert missing == {"name", "num_sms", "flag_latency_us", "launch_us"}


def test_full_waves_only():
    shapes = []

    class Probes(FakeProbes):
        def matmul_us(self, m, n, k):
            shapes.append((m, n))
            return super().matmul_us(m, n, k)

    measure_profile(H200, 4, Probes())
    m, n = shapes[0]
    assert (m // 128) * (n // 256) % H200.num_sms == 0


@pytest.mark.parametrize("num_ranks", range(MIN_RANKS, MAX_RANKS + 1))
def test_collectives_can_be_timed_on_every_number_of_ranks(num_ranks):
    assert all(m % num_ranks == 0 for m, _ in profile.COLLECTIVE_SIZES)


@pytest.mark.parametrize("op", OPS)
def test_bytes_of_a_collective_are_those_of_the_op(op):
    problem = Problem(op=op, m=1024, n=512, k=256, num_ranks=4)
    columns = problem.k if op == ALLGATHER else problem.n
    assert wire_bytes(op, problem.m, columns, 4) == problem.wire_bytes


def test_base_of_a_collective_is_never_below_its_least():
    class Quick(FakeProbes):
        def collective_us(self, op, m, n):
            return wire_bytes(op, m, n, self.num_ranks) / 300e3

    found = measure_profile(H200, 4, Quick())
    assert found["allreduce"].base_us == profile.MIN_BASE_US


def test_line_through_two_times():
    assert line_through((1e6, 30.0), (11e6, 130.0)) == pytest.approx((100.0, 20.0))
    with pytest.raises(ValueError, match="11000000 bytes took 30"):
        line_through((1e6, 30.0), (11e6, 30.0))


@pytest.fixture
def doctor(monkeypatch, tmp_path):
    """Runs `doctor --measure` with fake times, as if four H200s were there."""
    monkeypatch.setattr(runtime, "checks", lambda num_ranks: iter([]))
    monkeypatch.setattr(runtime, "hardware", lambda: H200)

    def run(fake, output=tmp_path / "profile.json"):
        monkeypatch.setattr(probes, "JaxProbes", lambda num_ranks: fake)
        return main(["doctor", "--measure", *(["--output", str(output)] if output else [])])

    return run


def test_command_writes_a_profile_that_is_read_back(doctor, tmp_path, capsys):
    assert doctor(FakeProbes()) == 0
    printed = capsys.readouterr().out
    assert "matmul_tflops: 640 (built in: 693)" in printed
    assert "allreduce: 301 GB/s after 21.0 us (built in: 403 GB/s after 12.0 us)" in printed
    profiles = measured._load.__wrapped__(str(tmp_path / "profile.json")).profiles
    assert profiles["H200"].allgather == pytest.approx(TRUE.allgather)
    assert json.loads((tmp_path / "profile.json").read_text())["hardware"] == "H200"


@pytest.mark.parametrize("us", [1e-3, 1e9, float("nan")])
def test_command_writes_nothing_that_makes_no_sense(doctor, us, tmp_path, capsys):
    class Nonsense(FakeProbes):
        def copy_us(self, num_bytes):
            return us

    assert doctor(Nonsense()) == 1
    assert "no profile was written" in capsys.readouterr().err
    assert not (tmp_path / "profile.json").exists()


def test_command_overwrites_no_other_file(doctor, tmp_path, capsys):
    path = tmp_path / "profile.json"
    path.write_text('{"mine": 1}')
    probes = FakeProbes()
    assert doctor(probes) == 2
    assert f"{path} is not overwritten: " in capsys.readouterr().err
    assert path.read_text() == '{"mine": 1}'


def test_command_says_that_the_profile_cannot_be_written(doctor, monkeypatch, capsys):
    def fail(*_):
        raise OSError("disk is full")

    monkeypatch.setattr(measured, "write", fail)
    assert doctor(FakeProbes()) == 1
    printed = capsys.readouterr()
    assert "matmul_tflops: 640" in printed.out
    assert printed.err.endswith("doctor: disk is full\n")


def test_command_checks_its_default_folder_first(doctor, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    settings = configuration.Configuration(measured=str(tmp_path / "file"))
    monkeypatch.setattr(configuration, "_overridden", settings)
    assert doctor(None, output=None) == 2
    assert "doctor: the default of --output cannot be written: " in capsys.readouterr().err


def test_command_does_not_measure_where_the_kernel_cannot_run(capsys):
    assert main(["doctor", "--measure"]) == 1
    printed = capsys.readouterr()
    assert "plain lax" in printed.out
    assert "doctor: no profile was measured" in printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "1"], "--ranks 1: must be 2 or more"),
        (["--measure", "--ranks", "0"], "--ranks 0: must be 2 or more"),
        (["--output", "profile.json"], "--output: only --measure writes a file"),
    ],
)
def test_command_refuses_wrong_arguments(arguments, message, capsys):
    assert main(["doctor", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def short_dispatches(monkeypatch):
    monkeypatch.setattr(gpu.timing, "SHORTEST_DISPATCH_US", 1e3)


def test_probes_time_on_the_devices_at_hand(short_dispatches):
    timed = JaxProbes(4)
    assert timed.matmul_us(8, 8, 8) > 0
    assert timed.copy_us(1024) > 0
    assert all(timed.collective_us(op, 8, 8) > 0 for op in OPS)


@pytest.mark.parametrize("op", OPS)
def test_lax_is_timed_on_the_devices_at_hand(op, short_dispatches, monkeypatch):
    compiled = []
    honest = gpu.programs.repeated
    monkeypatch.setattr(
        gpu.programs, "repeated", lambda *args: compiled.append(args) or honest(*args)
    )
    timer = GpuTimer()
    problem = Problem(op=op, m=16, n=32, k=64, num_ranks=4)
    assert min(timer.lax_us(problem), timer.lax_us(problem)) > 0
    assert len(compiled) == 1
    _, num_calls = compiled[0]
    assert num_calls * predict_lax(problem).total_us >= 1e3


class FakeFfi:
    def __init__(self, **result):
        self.result = {"wrong_elements": 0, "wrong_partials": 0} | result
        self.made, self.timed = [], []

    def run_virtual_ranks(self, problems, num_ranks, devices, dtype, num_ctas, num_calls):
        return self.result

    def TimedRanks(self, *arguments):  # noqa: N802
        self.made.append(arguments)
        return self

    def microseconds(self, schedule, num_calls):
        self.timed.append((schedule, num_calls))
        return 1.5


def test_driver_gets_the_product_of_one_rank(monkeypatch):
    ffi, timer = FakeFfi(), GpuTimer()
    monkeypatch.setattr(runtime, "load_ffi", lambda: ffi)
    monkeypatch.setattr(runtime, "ordinals", lambda: [2, 3, 5])
    schedule = Schedule(tile_n=128, raster=8)
    problem = Problem(m=4096, n=8192, k=28672, num_ranks=2)
    assert timer.fused_us(problem, schedule) == 1.5
    ((driven, *where),) = ffi.made
    assert driven["op"] == "matmul_allreduce"
    assert (driven["m"], driven["n"], driven["k"], driven["w_transposed"]) == (4096, 8192, 14336, 0)
    assert where == [2, [2, 3], "bfloat16", 132]
    ((timed, num_calls),) = ffi.timed
    assert (timed["tile_n"], timed["raster"]) == (128, 8)
    # And as many before them.
    assert 2 * num_calls * predict(problem, schedule).total_us == pytest.approx(50_000, rel=0.05)
    # Another schedule finds the operands where they are, another problem does not.
    timer.fused_us(problem, Schedule())
    assert len(ffi.made) == 1
    gather = Problem(op=ALLGATHER, m=4096, n=8192, k=1024, num_ranks=2)
    timer.fused_us(gather, schedule)
    assert len(ffi.made) == 2
    driven = ffi.made[-1][0]
    assert (driven["m"], driven["n"], driven["k"]) == (4096, 4096, 1024)


@pytest.mark.parametrize("wrong", ["wrong_elements", "wrong_partials"])
def test_wrong_elements_are_found(monkeypatch, wrong):
    problem = Problem(m=4096, n=8192, k=28672, num_ranks=2)
    monkeypatch.setattr(runtime, "load_ffi", FakeFfi)
    GpuTimer().verify(problem, Schedule())
    monkeypatch.setattr(runtime, "load_ffi", lambda: FakeFfi(**{wrong: 7}))
    with pytest.raises(WrongResultError, match="7 wrong elements"):
        GpuTimer().verify(problem, Schedule())
