"""Files of measurements: where they are found, which win, and that wrong ones are only ignored."""

import json
import logging
import os
from pathlib import Path

import pytest

import entwine_jax
from entwine_jax import configuration, measured, runtime, selection
from entwine_jax.__main__ import main
from entwine_jax.configuration import Configuration
from entwine_jax.schedule import H100, H200, Problem, Schedule, decide, document, table
from entwine_jax.schedule.hardware import Collective, format_profile
from entwine_jax.schedule.table import Entry, Key, Table
from entwine_jax.version import __version__

PROBLEM = Problem(m=4096, n=8192, k=28672, num_ranks=4)
SCHEDULE = Schedule(num_comm_ctas=4, num_spare_warps=0, raster=8)


@pytest.fixture
def places(monkeypatch, tmp_path):
    """Empty folders for shipped and for the user's files; nothing that was read before counts."""
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    monkeypatch.setattr(measured, "SHIPPED", shipped)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(configuration, "_overridden", Configuration())
    monkeypatch.setattr(measured, "_load", measured._load.__wrapped__)
    return shipped, tmp_path / "cache" / "entwine_jax" / __version__


def write_table(path, fused_us=700.0, schedule=SCHEDULE, version=__version__):
    entries = {Key.of(PROBLEM): Entry(schedule, fused_us, 981.0)}
    measured.write(path, table.format_table(Table(entries), version))


def write_profile(path, **fields):
    measured.write(path, format_profile("H200", fields, __version__))


def fused_us():
    entry = measured.current().table.lookup(PROBLEM)
    return entry and entry.fused_us


def test_user_files_win_over_shipped_ones(places):
    shipped, cache = places
    assert str(measured.current()).startswith("none, so the cost model chooses")
    write_table(shipped / "H200.json", 700.0)
    assert fused_us() == 700.0
    write_table(cache / "schedules.json", 600.0)
    assert fused_us() == 600.0
    assert measured.current().files == (shipped / "H200.json", cache / "schedules.json")


def test_files_add_to_those_before_them(places):
    shipped, cache = places
    other = Key.of(Problem(m=512, n=8192, k=28672, num_ranks=4))
    write_table(shipped / "schedules.json")
    write_profile(shipped / "hardware.json", matmul_tflops=500.0)
    text = table.format_table(Table({other: Entry(SCHEDULE, 1.0, 2.0)}), __version__)
    measured.write(cache / "schedules.json", text)
    write_profile(cache / "hardware.json", matmul_tflops=600.0)
    assert set(measured.current().table.entries) == {Key.of(PROBLEM), other}
    assert measured.profile(H200).matmul_tflops == 600.0


def test_the_last_file_of_a_folder_by_name_wins(places, monkeypatch):
    _, cache = places
    write_table(cache / "a.json", 700.0)
    write_table(cache / "b.json", 600.0)
    found = Path.glob
    for backwards in (False, True):  # a file system lists its files in any order
        monkeypatch.setattr(
            Path, "glob", lambda *args, b=backwards: sorted(found(*args), reverse=b)
        )
        assert fused_us() == 600.0


def test_another_file_or_folder_can_be_named(places, tmp_path):
    shipped, cache = places
    write_table(shipped / "H200.json", 700.0)
    write_table(cache / "schedules.json", 600.0)
    for where in (tmp_path / "mine.json", tmp_path / "mine"):
        write_table(where if where.suffix else where / "any-name.json", 500.0)
        configuration.configure(measured=str(where))
        assert fused_us() == 500.0
    configuration.configure(measured=measured.OFF)
    assert fused_us() is None
    assert measured.current() == measured.Measured()


def test_a_name_that_is_not_there_is_reported(places, caplog):
    configuration.configure(measured="/nowhere/table.json")
    assert fused_us() is None
    assert "/nowhere/table.json" in caplog.text


def test_cache_folder(monkeypatch, places):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert measured.folder() == Path.home() / ".cache/entwine_jax" / __version__
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert measured.folder() == Path.home() / ".cache/entwine_jax" / __version__


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"[" * 10_000, "nested too deeply"),
        (b"{}", "has no field 'format'"),
        (b"\x80", "is not JSON"),
        (b'{"format": "entwine_jax.hardware"}', "has no field 'format_version'"),
        (b'{"format": "entwine_jax.tuning"}', "format must be 'entwine_jax.schedules'"),
        (b" " * (document.MAX_BYTES + 1), "must have at most"),
    ],
    ids=range(6),
)
def test_wrong_files_are_ignored_with_one_warning(places, caplog, content, rule):
    shipped, cache = places
    write_table(shipped / "H200.json", 700.0)
    wrong = cache / "wrong.json"
    measured.write(wrong, "")
    wrong.write_bytes(content)
    assert fused_us() == 700.0
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert str(wrong) in warning.getMessage()
    assert rule in warning.getMessage()


def test_files_are_read_once(monkeypatch, tmp_path):
    path = tmp_path / "once.json"
    write_table(path, 500.0)
    monkeypatch.setattr(configuration, "_overridden", Configuration(measured=str(path)))
    first = measured.current()
    path.write_text("broken")
    assert measured.current() is first


def test_tables_of_another_version_are_ignored(places, caplog):
    _, cache = places
    write_table(cache / "schedules.json", version="0.0.1")
    assert fused_us() is None
    assert "but it is '0.0.1'" in caplog.text


def test_pipes_do_not_block(places, caplog):
    _, cache = places
    cache.mkdir(parents=True)
    os.mkfifo(cache / "pipe.json")
    assert fused_us() is None
    assert "regular file" in caplog.text


def test_selector_of_the_package_uses_them(places):
    _, cache = places
    by_model = entwine_jax.select_schedule(PROBLEM)
    write_table(cache / "schedules.json")
    assert entwine_jax.select_schedule(PROBLEM) == SCHEDULE != by_model
    assert selection.decide(PROBLEM).source == "table"
    assert selection.decide(PROBLEM, override=by_model).source == "override"
    text = str(entwine_jax.explain(PROBLEM))
    assert "source    table; table of 1 measured schedules" in text
    entwine_jax.configure(measured="off")
    assert entwine_jax.select_schedule(PROBLEM) == by_model
    assert "no table" in str(entwine_jax.explain(PROBLEM))


def test_measured_profile_takes_the_place_of_the_built_in_one(places):
    _, cache = places
    before = selection.decide(PROBLEM)
    write_profile(cache / "hardware.json", matmul_tflops=600.0, allreduce=Collective(300.0, 30.0))
    hardware = measured.profile(H200)
    assert (hardware.matmul_tflops, hardware.allreduce) == (600.0, Collective(300.0, 30.0))
    assert (hardware.num_sms, hardware.allgather) == (H200.num_sms, H200.allgather)
    assert measured.profile(H100) is H100
    assert selection.decide(PROBLEM).lax.matmul_us > before.lax.matmul_us
    # A profile that the user made stays as it is.
    own = Problem(m=512, n=512, k=512, num_ranks=2, hardware=hardware)
    assert selection.as_measured(own) is own
    assert entwine_jax.explain(PROBLEM).problem.hardware == hardware


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"hardware": "B200"}, "must be one of H100, H200"),
        ({"measured": {"num_sms": 1}}, "unknown field 'num_sms'"),
        ({"measured": {"name": "x"}}, "unknown field 'name'"),
        ({"measured": {"matmul_tflops": 1e300}}, "within 10x of 693"),
        ({"measured": {"matmul_tflops": -693}}, "within 10x of 693"),
        ({"measured": {"matmul_tflops": "fast"}}, "must be of type float"),
        ({"measured": {"allreduce": 380.0}}, "allreduce must be an object"),
        ({"measured": {"allreduce": {"gb_s": 380.0}}}, "has no field 'base_us'"),
        (
            {"measured": {"allreduce": {"gb_s": 380.0, "base_us": 0}}},
            "must be over 0 and at most 300",
        ),
        ({"measured": {"allreduce": {"gb_s": 30.0, "base_us": 9}}}, "within 10x of 403"),
        ({"measured": []}, "measured must be of type dict"),
        ({"entwine_jax": "0.0.1"}, "but it is '0.0.1'"),
        # There the base of a collective had its steps in it.
        ({"format_version": 2}, "format_version must be 3, but it is 2"),
    ],
)
def test_wrong_profiles_are_ignored(places, caplog, change, rule):
    _, cache = places
    path = cache / "hardware.json"
    write_profile(path, matmul_tflops=600.0)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert measured.profile(H200) is H200
    assert rule in caplog.text


def test_digest_is_that_of_the_content(places):
    _, cache = places
    digests = [measured.current().digest]
    write_table(cache / "schedules.json", 600.0)
    digests.append(measured.current().digest)
    (cache / "schedules.json").rename(cache / "renamed.json")
    assert measured.current().digest == digests[1]
    write_table(cache / "renamed.json", 601.0)
    digests.append(measured.current().digest)
    write_profile(cache / "hardware.json", matmul_tflops=600.0)
    digests.append(measured.current().digest)
    assert len(set(digests)) == 4


def test_doctor_prints_the_digest(places, monkeypatch, capsys):
    _, cache = places
    write_table(cache / "schedules.json")
    monkeypatch.setattr(runtime, "checks", lambda num_ranks: iter([]))
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert f"measured: 1 schedules, profiles: none, digest {measured.current().digest}" in printed
    assert str(cache / "schedules.json") in printed


def test_an_interrupted_write_leaves_the_old_file(monkeypatch, tmp_path):
    path = tmp_path / "table.json"
    measured.write(path, "old")

    def interrupt(self, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        measured.write(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_shipped_files_are_right():
    """They are of this version: whoever raises it measures again."""
    tables = [measured.read_table(path) for path in measured._json_files(measured.SHIPPED)]
    assert tables
    for shipped in tables:
        assert shipped.entries
        for key, entry in shipped.entries.items():
            choice = decide(key.problem(), table=shipped)
            assert choice.source == "table"
            assert choice.schedule.fused == (entry.fused_us < entry.lax_us)


def test_new_files_go_where_they_are_read(places, monkeypatch, tmp_path):
    _, cache = places

    def name(where):
        monkeypatch.setattr(configuration, "_overridden", Configuration(measured=str(where)))
        return measured.output_folder()

    table_of_mine = tmp_path / "mine.json"
    assert name("") == name("off") == name(table_of_mine) == cache
    assert measured.is_read(table_of_mine)
    assert not measured.is_read(cache / "schedules.json")
    assert name(tmp_path / "new") == tmp_path / "new"
    assert measured.is_read(tmp_path / "new" / "schedules.json")
    assert not measured.is_read(tmp_path / "new" / "schedules.txt")
    assert not measured.is_read(cache / "schedules.json")
    name("off")
    assert not measured.is_read(cache / "schedules.json")
    name("")
    assert measured.is_read(cache / "schedules.json")
