"""Tuning with an injected timer: what is measured, kept, skipped and printed."""

import functools
import json
import random
import threading
import time
from collections import Counter

import pytest

from entwine_jax import configuration, measured, runtime
from entwine_jax.__main__ import main
from entwine_jax.bench import progress as bench_progress
from entwine_jax.driver import WrongResultError
from entwine_jax.schedule import H200, Problem, Schedule, decide
from entwine_jax.schedule.candidates import tuning_candidates
from entwine_jax.schedule.document import RefusedError
from entwine_jax.schedule.select import DEFAULT_SLOT_BYTES
from entwine_jax.schedule.table import EMPTY, Entry, Key, Table
from entwine_jax.tune import command, files
from entwine_jax.tune.files import Files
from entwine_jax.tune.record import LAX, Record, qualities, quality, read_records, write_records
from entwine_jax.tune.search import NUM_FINALISTS, num_measurements, schedules_to_time, time_problem

SHAPES = "4096,8192,28672;1024,8192,8192;512,8192,28672"
PROBLEMS = [
    Problem(m=m, n=n, k=k, num_ranks=4)
    for m, n, k in ((4096, 8192, 28672), (1024, 8192, 8192), (512, 8192, 28672))
]
# Fastest for the fake timer, though the model has no reason to rank it first.
FASTEST = Schedule(tile_n=128, raster=32)


class FakeTimer:
    """Times that depend on the schedule, with noise; may fail at a given measurement."""

    def __init__(self, lax_us=200.0, stop=None, stop_at=None, wrong=False):
        self.lax, self.stop, self.stop_at, self.wrong = lax_us, stop, stop_at, wrong
        self.noise = random.Random(0)
        self.calls, self.verified = [], []

    def _time(self, problem, schedule, us):
        if len(self.calls) == self.stop_at:
            raise self.stop
        self.calls.append((problem, schedule))
        return us + self.noise.uniform(-0.4, 0.4)

    def fused_us(self, problem, schedule):
        return self._time(problem, schedule, true_us(schedule))

    def lax_us(self, problem):
        return self._time(problem, None, self.lax)

    def verify(self, problem, schedule):
        self.verified.append((problem, schedule))
        if self.wrong:
            raise WrongResultError("3 wrong elements")


def true_us(schedule):
    return 100.0 + (schedule.tile_n == 256) + abs(schedule.raster - 32) + schedule.num_comm_ctas


def time_one(timer, at_most=None, table=EMPTY, **options):
    options = {"num_rounds": 3, "seed": 0} | options
    return time_problem(PROBLEMS[0], table, timer, at_most=at_most, **options)


def test_finds_the_fastest_and_verifies_it():
    timer = FakeTimer()
    record = time_one(timer)
    assert record.key == Key.of(PROBLEMS[0])
    assert record.entry.schedule == FASTEST
    assert record.entry.fused_us == pytest.approx(100, abs=0.5)
    assert record.lax_us == pytest.approx(200, abs=0.5)
    assert timer.verified == [(PROBLEMS[0], FASTEST)]


def test_rounds_are_interleaved_in_random_order():
    timer = FakeTimer()
    time_one(timer, num_rounds=2)
    tried, _ = tuning_candidates(PROBLEMS[0], DEFAULT_SLOT_BYTES)
    left, timed = set(tried), [schedule for _, schedule in timer.calls]
    sizes = [(23, 2), (12, 4), (6, 8), (NUM_FINALISTS + 1, 17)]  # the last with lax: a run-off
    for size, num_rounds in sizes:
        rounds = [timed[start : start + size] for start in range(0, size * num_rounds, size)]
        timed = timed[size * num_rounds :]
        assert all(Counter(part) == Counter(rounds[0]) for part in rounds)
        assert len({tuple(map(str, part)) for part in rounds}) > 1
        assert {FASTEST, decide(PROBLEMS[0]).schedule} <= set(rounds[0]) <= left | {None}
        left = set(rounds[0])
    assert None in left
    assert not timed


def test_times_of_a_run_off_are_those_of_its_rounds_alone():
    class LuckyOnce(FakeTimer):
        def fused_us(self, problem, schedule):
            return super().fused_us(problem, schedule) - 50 * (len(self.calls) <= 3)

    record = time_one(LuckyOnce(), num_rounds=1)
    times = dict(record.fused_us)
    finalists = [record.fused_us[position][0] for position in record.finalists]
    assert len(finalists) == NUM_FINALISTS
    assert all(
        times[schedule] == pytest.approx(true_us(schedule), abs=0.5) for schedule in finalists
    )


def test_few_schedules_go_into_the_run_off_at_once():
    timer = FakeTimer()
    record = time_one(timer, at_most=3, num_rounds=2)
    assert len(record.finalists) == len(record.fused_us) == 3
    assert len(timer.calls) == 17 * 4


def test_median_is_not_moved_by_one_outlier():
    class Disturbed(FakeTimer):
        def fused_us(self, problem, schedule):
            us = super().fused_us(problem, schedule)
            return us + 1000 * (len(self.calls) < 10)

    assert time_one(Disturbed()).entry.schedule == FASTEST


def test_times_what_the_model_ranks_highest_and_what_is_chosen():
    problem = PROBLEMS[0]
    by_model = decide(problem).schedule
    schedules, model, table = schedules_to_time(problem, EMPTY, 3)
    assert (model, table) == (by_model, by_model)
    assert schedules[0] == by_model
    assert len(schedules) == 3
    # A table's choice is timed even where it is no candidate.
    odd = Schedule(raster=7)
    measured_before = Table({Key.of(problem): Entry(odd, 1.0, 2.0)})
    schedules, model, table = schedules_to_time(problem, measured_before, 3)
    assert (model, table) == (by_model, odd)
    assert odd in schedules
    assert by_model in schedules
    record = time_one(FakeTimer(), at_most=3, table=measured_before)
    assert record.fused_us[record.by_table][0] == odd
    assert record.fused_us[record.by_model][0] == by_model


def test_what_is_left_to_lax_is_timed_too():
    problem = Problem(m=64, n=8192, k=28672, num_ranks=4)
    assert not decide(problem).schedule.fused
    timer = FakeTimer()
    record = time_problem(problem, EMPTY, timer, at_most=None, num_rounds=1, seed=0)
    assert (record.by_model, record.by_table) == (LAX, LAX)
    assert record.entry.schedule == FASTEST
    assert all(schedule is None or schedule.fused for _, schedule in timer.calls)


@pytest.mark.parametrize("at_most", [1, 4, 5, 9, None])
def test_number_of_measurements_is_known_before(at_most):
    ticks = []
    timer = FakeTimer()
    time_one(timer, at_most=at_most, before_each=lambda: ticks.append(len(timer.calls)))
    assert ticks == list(range(num_measurements(PROBLEMS[:1], EMPTY, at_most, 3)))


def make_record(lax_us, by_model, by_table, *fused_us, problem=PROBLEMS[0]):
    schedules = [Schedule(raster=raster + 1) for raster in range(len(fused_us))]
    pairs = tuple(zip(schedules, fused_us, strict=True))
    return Record(Key.of(problem), lax_us, pairs, tuple(range(len(pairs))), by_model, by_table)


def test_the_fastest_is_a_finalist():
    record = make_record(200.0, 1, 1, 90.0, 110.0, 100.0)._replace(finalists=(1, 2))
    assert (record.entry.fused_us, record.ratio(1)) == (100.0, 1.1)


def test_the_model_is_believed_within_noise():
    record = make_record(200.0, 1, 1, 98.5, 100.0, 99.0)
    assert record.entry.fused_us == 100.0
    assert record.ratio(1) == pytest.approx(100 / 98.5)
    assert record._replace(by_model=LAX).entry.fused_us == 98.5
    assert make_record(200.0, 1, 1, 97.5, 100.0).entry.fused_us == 97.5


def test_quality_of_choice():
    records = [
        make_record(200.0, 0, 1, 110.0, 100.0),
        make_record(50.0, 0, LAX, 55.0, 60.0),  # lax is the best
        make_record(120.0, LAX, 0, 100.0, 101.0),
    ]
    assert [record.best_us for record in records] == [100.0, 50.0, 100.0]
    found = qualities(records)
    assert found["table"] == pytest.approx((1.0, 1.0))
    assert found["model"] == pytest.approx(((1.1 * 1.1 * 1.2) ** (1 / 3), 1.2))
    assert quality([1.0, 4.0]) == pytest.approx((2.0, 4.0))
    assert str(quality([1.05])) == "geomean 5.0% above the best, worst 5.0%"


def test_records_are_read_back(tmp_path):
    path = tmp_path / "deep" / "times.json"
    assert read_records(path) == []
    records = [make_record(200.0, 0, LAX, 110.0, 99.5)]
    write_records(path, records, {"device_kind": "NVIDIA H200"})
    assert read_records(path) == records
    assert json.loads(path.read_text())["quality"]["model"]["worst"] == pytest.approx(110 / 99.5)
    assert [file.name for file in path.parent.iterdir()] == ["times.json"]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"by_model": 2}, "by_model must be one of finalists"),
        ({"by_table": -2}, "by_table must be one of finalists"),
        ({"finalists": []}, "finalists must be positions"),
        ({"finalists": [0, 2]}, "finalists must be positions"),
        ({"finalists": [0, True]}, "finalists must be positions"),
        ({"fused": []}, "must not be empty"),
        ({"fused": [3]}, r"fused\[0\] must be an object"),
        ({"lax_us": 0}, "lax_us must be above 0"),
        ({"m": -1}, "must be an int of 1 or more"),
        ({"nope": 1}, "unknown field"),
    ],
)
def test_wrong_records_are_refused(tmp_path, change, rule):
    path = tmp_path / "times.json"
    write_records(path, [make_record(200.0, 0, LAX, 110.0, 99.5)], {})
    value = json.loads(path.read_text())
    value["records"][0] |= change
    path.write_text(json.dumps(value))
    with pytest.raises(RefusedError, match=rule):
        read_records(path)


@pytest.fixture
def tune(monkeypatch, tmp_path):
    """Runs the command with a fake timer, as if four GPUs were there."""
    monkeypatch.setattr(runtime, "why_unavailable", lambda num_ranks=None: None)
    monkeypatch.setattr(runtime, "hardware", lambda: H200)

    def run(*arguments, timer=None, shapes=SHAPES, output=tmp_path / "table.json"):
        timer = timer or FakeTimer()
        monkeypatch.setattr(command, "GpuTimer", lambda: timer)
        output = ["--output", str(output)] if output else []
        status = main(["tune", "--shapes", shapes, "--rounds", "2", *output, *arguments])
        return status, timer

    run.table = lambda: measured.read_table(tmp_path / "table.json")
    return run


def test_command_writes_a_table_that_the_selector_takes(tune, tmp_path, monkeypatch, capsys):
    assert tune("--exhaustive")[0] == 0
    assert list(tune.table().entries) == sorted(map(Key.of, PROBLEMS))
    printed = capsys.readouterr()
    assert "chosen by model: geomean" in printed.out
    assert "chosen by table: geomean" in printed.out
    assert "3 of 3 shapes measured" in printed.err
    monkeypatch.setattr(
        configuration,
        "_overridden",
        configuration.Configuration(measured=str(tmp_path / "table.json")),
    )
    for problem in PROBLEMS:
        assert decide(problem, table=measured.current().table).schedule == FASTEST


def test_command_goes_on_where_it_was_interrupted(tune, capsys):
    per_shape = num_measurements(PROBLEMS[:1], EMPTY, 8, 2)
    interrupted = FakeTimer(stop=KeyboardInterrupt(), stop_at=per_shape + 5)
    assert tune(timer=interrupted)[0] == 130
    assert "interrupted: 1 of 3 shapes measured" in capsys.readouterr().err
    assert list(tune.table().entries) == [Key.of(PROBLEMS[0])]
    status, rest = tune()
    assert status == 0
    assert {problem for problem, _ in rest.calls} == set(PROBLEMS[1:])
    assert len(tune.table().entries) == 3
    assert "2 of 2 shapes measured, 1 were there" in capsys.readouterr().err
    assert tune()[1].calls == []
    assert {problem for problem, _ in tune("--again")[1].calls} == set(PROBLEMS)


def test_command_keeps_all_times_and_goes_on_by_them(tune, tmp_path, capsys):
    times = ["--json", str(tmp_path / "times.json"), "--exhaustive"]
    assert tune(shapes=SHAPES.split(";")[0])[0] == 0
    # The table has the first shape, but its times were not kept.
    assert len({problem for problem, _ in tune(*times)[1].calls}) == 3
    capsys.readouterr()
    status, timer = tune(*times)
    assert (status, timer.calls) == (0, [])
    assert "over 3 shapes" in capsys.readouterr().out
    assert {record.key for record in read_records(tmp_path / "times.json")} == set(
        map(Key.of, PROBLEMS)
    )


@pytest.mark.parametrize(
    ("timer", "status", "message"),
    [
        (
            FakeTimer(stop=RuntimeError("did not arrive"), stop_at=2 * 5 * 17 + 5),
            1,
            "did not arrive",
        ),
        (FakeTimer(stop=OSError("disk is full"), stop_at=2 * 5 * 17 + 5), 1, "disk is full"),
        (FakeTimer(wrong=True), 1, "WRONG RESULT: 3 wrong elements"),
    ],
)
def test_command_stops_at_failures(tune, timer, status, message, capsys):
    assert tune("--candidates", "4", timer=timer)[0] == status
    assert message in capsys.readouterr().err
    assert len(tune.table().entries) == (0 if timer.wrong else 2)


def test_command_stops_where_another_process_has_spoilt_the_table(tune, tmp_path, capsys):
    class Spoils(FakeTimer):
        def verify(self, problem, schedule):
            (tmp_path / "table.json").write_text("precious")

    assert tune(timer=Spoils())[0] == 1
    assert "table.json is not overwritten: is not JSON" in capsys.readouterr().err
    assert (tmp_path / "table.json").read_text() == "precious"


def add_all_of(folder):
    """What three processes that started together do: each adds what it measured."""
    paths = folder / "table.json", folder / "times.json"
    records = [make_record(200.0, 0, 0, 100.0, problem=problem) for problem in PROBLEMS]
    return [functools.partial(Files(*paths).add, record) for record in records]


def assert_all_are_in(folder):
    keys = set(map(Key.of, PROBLEMS))
    assert set(measured.read_table(folder / "table.json").entries) == keys
    assert {record.key for record in read_records(folder / "times.json")} == keys


def test_tuners_at_work_together_keep_what_each_has_measured(tmp_path, monkeypatch):
    honest = measured.write
    monkeypatch.setattr(measured, "write", lambda *args: time.sleep(0.05) or honest(*args))
    threads = [threading.Thread(target=add) for add in add_all_of(tmp_path)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_all_are_in(tmp_path)


def test_what_is_measured_again_takes_the_place_of_what_was_there(tmp_path):
    paths = tmp_path / "new" / "table.json", tmp_path / "other" / "times.json"
    for us in (100.0, 110.0):
        Files(*paths).add(make_record(200.0, 0, 0, us))
    assert [entry.fused_us for entry in measured.read_table(paths[0]).entries.values()] == [110.0]
    assert read_records(paths[1]) == [make_record(200.0, 0, 0, 110.0)]
    assert json.loads(paths[1].read_text())["machine"]["num_devices"] == 4


def test_tuners_go_on_where_files_cannot_be_locked(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError("no locks here")

    monkeypatch.setattr(files.fcntl, "flock", flock)
    for add in add_all_of(tmp_path):
        add()
    assert_all_are_in(tmp_path)


def test_command_ends_when_its_time_is_over(tune, monkeypatch, capsys):
    clock = iter(range(10_000))
    monkeypatch.setattr(command.time, "monotonic", lambda: next(clock))
    seconds = 1.5 * num_measurements(PROBLEMS[:1], EMPTY, 8, 2)
    assert tune("--seconds", str(seconds))[0] == 0
    assert "out of time: 1 of 3 shapes measured" in capsys.readouterr().err
    assert list(tune.table().entries) == [Key.of(PROBLEMS[0])]


def test_command_never_makes_the_selector_take_what_is_slower_than_lax(tune):
    assert tune(timer=FakeTimer(lax_us=99.0))[0] == 0
    for problem in PROBLEMS:
        assert decide(problem, table=tune.table()).schedule == Schedule(fused=False)


def test_command_does_not_overwrite_what_it_cannot_read(tune, tmp_path, capsys):
    for name, arguments in (("table.json", []), ("times.json", ["--json", "times.json"])):
        path = tmp_path / name
        path.write_text('{"precious": 1}')
        arguments = [str(path) if argument == name else argument for argument in arguments]
        status, timer = tune(*arguments)
        assert (status, timer.calls) == (2, [])
        assert f"{path} is not overwritten: the file has " in capsys.readouterr().err
        assert path.read_text() == '{"precious": 1}'
        path.unlink()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--candidates", "0"], "--candidates 0: must be greater than 0"),
        (["--rounds", "-1"], "--rounds -1"),
        (["--seconds", "nan"], "--seconds nan"),
        (["--shapes", ";"], "at least one shape"),
        (["--shapes", "8,8,30"], "k must be a multiple of the 4 ranks"),
        (["--shapes", "8,9,64"], "n = 9: must be a multiple of 8"),
        (["--ranks", "1"], "--ranks 1 (default: all devices): must be 2 or more"),
        (["--ranks", "0"], "--ranks 0 "),
        (["--ranks", "-1"], "--ranks -1 "),
    ],
)
def test_command_refuses_wrong_arguments(tune, arguments, message, capsys):
    assert tune(*arguments)[0] == 2
    assert message in capsys.readouterr().err


def test_command_keeps_table_and_times_apart(tune, tmp_path, capsys):
    status, timer = tune("--json", str(tmp_path / "table.json"))
    assert (status, timer.calls) == (2, [])
    assert "--output and --json: both are " in capsys.readouterr().err


def test_command_checks_its_default_folder_first(tune, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    for where in ("file", "file/folder"):
        settings = configuration.Configuration(measured=str(tmp_path / where))
        monkeypatch.setattr(configuration, "_overridden", settings)
        status, timer = tune(output=None)
        assert (status, timer.calls) == (2, [])
        assert "the default of --output cannot be written: " in capsys.readouterr().err


def test_command_says_why_it_cannot_run_here(capsys):
    assert main(["tune"]) == 1
    assert "tune: " in capsys.readouterr().err


def test_progress_has_a_total(tune, monkeypatch):
    totals, ticks = [], []

    class Bar:
        def __enter__(self):
            return lambda name: lambda: ticks.append(name)

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(command, "progress", lambda total: totals.append(total) or Bar())
    assert bench_progress.progress is not command.progress
    assert tune()[0] == 0
    assert totals == [len(ticks)]
