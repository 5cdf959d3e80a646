"""Tables of schedules: read back as written, refused where anything is wrong, never trusted."""

import dataclasses
import json
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from entwine_jax.schedule import Problem, Schedule, document, table
from entwine_jax.schedule.candidates import tuning_candidates
from entwine_jax.schedule.document import RefusedError
from entwine_jax.schedule.legality import LackOfMemory, fit
from entwine_jax.schedule.problem import ALLGATHER
from entwine_jax.schedule.select import DEFAULT_SLOT_BYTES, NOT_AS_MEASURED, decide
from entwine_jax.schedule.table import EMPTY, Entry, Key, Table

VERSION = "0.1.0"
PROBLEM = Problem(m=4096, n=8192, k=28672, num_ranks=4)
# Not the model's choice.
SCHEDULE = Schedule(num_comm_ctas=4, num_spare_warps=0, raster=8)
ENTRY = Entry(SCHEDULE, fused_us=700.5, lax_us=981.0)


def one_entry(problem=PROBLEM, entry=ENTRY):
    return Table({Key.of(problem): entry})


def read(text):
    content = text if isinstance(text, bytes) else text.encode()
    return table.parse_table(document.parse(content), VERSION)


def changed(**fields):
    """The document of one entry, with other values of fields at any depth."""
    value = json.loads(table.format_table(one_entry(), VERSION))
    (item,) = value["entries"]
    for name, new in fields.items():
        parts = (value, item, item["schedule"])
        next((part for part in parts if name in part), value)[name] = new
    return value


def test_text_is_read_back():
    problems = [
        PROBLEM,
        Problem(op="matmul_reducescatter", m=4096, n=64, k=128, num_ranks=2, num_batches=8),
        Problem(op="allgather_matmul", m=256, n=64, k=64, num_ranks=8, dtype="float16"),
    ]
    entries = {Key.of(problem): Entry(Schedule(tile_n=128), 1.25, 2.5) for problem in problems}
    text = table.format_table(Table(entries), VERSION)
    assert read(text) == Table(entries)
    assert read(text).digest == Table(dict(reversed(entries.items()))).digest
    assert read(text).digest != one_entry().digest
    assert len(text.splitlines()) == len(problems) + 2
    assert [Key.of(key.problem()) for key in entries] == list(entries)
    assert read(table.format_table(EMPTY, VERSION)) == EMPTY


def test_later_tables_win():
    other = one_entry(entry=ENTRY._replace(fused_us=1.0))
    assert (one_entry() | other).lookup(PROBLEM).fused_us == 1.0
    assert (other | one_entry()).lookup(PROBLEM) == ENTRY
    assert (EMPTY | other) == other


def test_measured_schedule_is_chosen():
    decision = decide(PROBLEM, table=one_entry())
    assert (decision.schedule, decision.source) == (SCHEDULE, "table")
    assert "700.5 us" in decision.reason
    assert decide(PROBLEM).source == "model"
    assert decide(PROBLEM).schedule != SCHEDULE
    override = decide(PROBLEM, override=Schedule(tile_n=128), table=one_entry())
    assert (override.schedule.tile_n, override.source) == (128, "override")


@pytest.mark.parametrize(
    "other",
    [
        Problem(m=4096 + 128, n=8192, k=28672, num_ranks=4),
        Problem(m=4096, n=8192, k=28672, num_ranks=2),
        Problem(m=4096, n=8192, k=28672, num_ranks=4, dtype="float16"),
        Problem(op="matmul_reducescatter", m=4096, n=8192, k=28672, num_ranks=4),
    ],
    ids=str,
)
def test_other_problems_are_left_to_the_model(other):
    assert decide(other, table=one_entry()) == decide(other)


@pytest.mark.parametrize(("fused_us", "fused"), [(99.9, True), (100.0, False), (200.0, False)])
def test_lax_is_chosen_where_it_was_measured_to_win(fused_us, fused):
    decision = decide(PROBLEM, table=one_entry(entry=Entry(SCHEDULE, fused_us, 100.0)))
    assert (decision.schedule.fused, decision.source) == (fused, "table")


def test_batches_of_whole_tiles_are_the_tiles_of_one_batch():
    sizes = {"op": "matmul_reducescatter", "n": 8192, "k": 28672, "num_ranks": 4}
    whole = Problem(m=4096, **sizes)
    measured = one_entry(whole, Entry(SCHEDULE, 1.0, 2.0))
    for num_batches, source in ((1, "table"), (8, "table"), (16, "model")):  # rows of 128, of 64
        problem = dataclasses.replace(whole, num_batches=num_batches)
        assert decide(problem, table=measured).source == source
    exact = one_entry(dataclasses.replace(whole, num_batches=8), Entry(Schedule(), 1.0, 2.0))
    both = measured | exact
    assert decide(dataclasses.replace(whole, num_batches=8), table=both).schedule == Schedule()
    assert decide(whole, table=both).schedule == SCHEDULE


def test_a_schedule_that_would_run_otherwise_than_measured_is_not_taken():
    """In half of the slots it would be split, or would not fit."""
    problem = Problem(m=8192, n=8192, k=8192, num_ranks=4)
    whole = one_entry(problem, Entry(SCHEDULE, 1.0, 2.0))
    assert decide(problem, DEFAULT_SLOT_BYTES, table=whole).source == "table"
    by_model = decide(problem, DEFAULT_SLOT_BYTES // 2, table=whole)
    assert (by_model.source, by_model.reason.endswith(NOT_AS_MEASURED)) == ("model", True)
    assert isinstance(decide(problem, 0, table=whole).reason, LackOfMemory)
    split = Schedule(rows_per_launch=4096)
    table_of_split = one_entry(problem, Entry(split, 1.0, 2.0))
    assert decide(problem, DEFAULT_SLOT_BYTES, table=table_of_split).source == "model"
    assert decide(problem, DEFAULT_SLOT_BYTES // 2, table=table_of_split).schedule == split
    assert decide(problem, DEFAULT_SLOT_BYTES // 4, table=table_of_split).source == "model"
    assert decide(problem, 0, table=whole).schedule == Schedule(fused=False)


def test_same_table_same_choice():
    """Nothing but the content counts: not the order of entries, nor earlier calls."""
    other = Problem(m=512, n=8192, k=28672, num_ranks=4)
    entries = {Key.of(PROBLEM): ENTRY, Key.of(other): Entry(Schedule(tile_n=128), 100.0, 130.0)}
    backwards = dict(reversed(entries.items()))
    first = decide(PROBLEM, table=Table(entries))
    assert first == decide(PROBLEM, table=Table(backwards)) == decide(PROBLEM, table=Table(entries))
    assert list(backwards) == list(reversed(entries))


HUGE = 10**30


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"format": "nope", "machine": {}}, "format must be 'entwine_jax.schedules', but it is 'n"),
        ({"format": []}, "format must be 'entwine_jax.schedules', but it is something else"),
        ({"format_version": 1}, "format_version must be 2"),
        ({"format_version": True}, "format_version must be 2, but it is True"),
        ({"entwine_jax": "0.0.9"}, "entwine_jax must be '0.1.0', but it is '0.0.9'"),
        ({"entries": {}}, "entries must be of type list"),
        ({"entries": [1]}, r"entries\[0\] must be an object"),
        ({"nope": 1}, "unknown field 'nope'"),
        ({"hardware": "B200"}, "hardware must be one of H100, H200"),
        ({"op": "system"}, "must be one of matmul_allreduce"),
        ({"op": "x" * 10_000}, r"Problem.op = 'xxxx"),
        ({"m": -HUGE}, "must be an int of 1 or more"),
        ({"op": 3}, "op must be of type str"),
        ({"dtype": "float32"}, "the kernel takes bfloat16 and float16"),
        ({"dtype": "int4"}, "must be one of bfloat16"),
        ({"m": 0}, "must be an int of 1 or more"),
        ({"m": -128}, "must be an int of 1 or more"),
        ({"m": HUGE}, "m must be at most"),
        ({"m": 4096.0}, "m must be of type int"),
        ({"m": True}, "m must be of type int"),
        ({"n": 8191}, "must be a multiple of 8"),
        ({"k": 28673}, "must be a multiple of num_ranks"),
        ({"num_ranks": 1}, "nothing to reduce"),
        ({"num_ranks": 16}, "the kernel takes 2 to 8"),
        ({"num_batches": 2}, "must be 1 for matmul_allreduce"),
        ({"schedule": []}, "schedule must be of type dict"),
        ({"schedule": {"tile_n": 256}}, "has no field 'tile_m'"),
        ({"tile_n": 64}, "must be 128 or 256"),
        ({"num_comm_ctas": 65}, "between 0 and 64"),
        ({"num_spare_warps": -1}, "between 0 and 2"),
        ({"raster": 0}, "between 1 and 1024"),
        ({"push_spread": 101}, "between 0 and 100"),
        ({"rows_per_launch": 100}, "multiple of tile_m"),
        ({"rows_per_launch": -128}, "multiple of tile_m"),
        ({"rows_per_launch": 128 * HUGE}, "rows_per_launch must be at most"),
        ({"fused_us": 0}, "fused_us must be above 0"),
        ({"fused_us": -1.0}, "fused_us must be above 0"),
        ({"fused_us": 1e300}, "at most"),
        ({"lax_us": HUGE}, "at most"),
        ({"lax_us": "fast"}, "lax_us must be of type float"),
        ({"lax_us": None}, "lax_us must be of type float"),
        ({"lax_us": 10**400}, "lax_us must be of type float"),
    ],
)
def test_wrong_fields_are_refused(fields, rule):
    with pytest.raises(RefusedError, match=rule) as refused:
        read(json.dumps(changed(**fields)))
    assert len(str(refused.value)) < 300


def test_allgather_without_spare_warps_is_refused():
    key = Key.of(Problem(op="allgather_matmul", m=4096, n=8192, k=8192, num_ranks=4))
    entry = ENTRY._replace(schedule=Schedule(num_spare_warps=0))
    with pytest.raises(RefusedError, match="num_spare_warps = 0"):
        read(table.format_table(Table({key: entry}), VERSION))


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a": 1, "a": 2}', "repeats a name"),
        (b"[NaN]", "not a finite number"),
        (b"[-Infinity]", "not a finite number"),
        (b"[1e999]", "not a finite number"),
        (b"1" * 5000, "is not JSON"),
        (b"[]", "the file must be an object"),
        (b"null", "the file must be an object"),
    ],
    ids=range(11),
)
def test_broken_documents_are_refused(content, rule):
    with pytest.raises(RefusedError, match=rule) as refused:
        read(content)
    assert len(str(refused.value)) < 300


def test_repeated_problems_are_refused():
    value = changed()
    value["entries"] *= 2
    with pytest.raises(RefusedError, match=r"entries\[1\] is about the same problem"):
        read(json.dumps(value))


def test_files_are_read_in_bounds(tmp_path):
    path = tmp_path / "table.json"
    for content in (b"x" * document.MAX_BYTES, b""):
        path.write_bytes(content)
        assert document.read(path) == content
    path.write_bytes(b"x" * (document.MAX_BYTES + 1))
    with pytest.raises(RefusedError, match=f"at most {document.MAX_BYTES} bytes"):
        document.read(path)
    for other in (tmp_path, tmp_path / "missing", "/dev/zero"):
        with pytest.raises(RefusedError, match=r"^must be a regular file"):
            document.read(tmp_path / other)


def test_tables_of_many_problems_are_read_back():
    problems = [Problem(m=256 * m, n=8192, k=8192, num_ranks=4) for m in range(1, 4001)]
    of_many = Table({Key.of(problem): ENTRY for problem in problems})
    text = table.format_table(of_many, VERSION)
    assert read(text) == of_many
    assert len(text) < document.MAX_BYTES / 8


def safe(content):
    """Content is refused, or becomes a table whose every entry the selector can deal with."""
    try:
        found = read(content)
    except RefusedError as error:
        assert len(str(error)) < 300  # noqa: PT017
        return
    for key, entry in found.entries.items():
        problem = key.problem()
        assert math.isfinite(entry.fused_us)
        for slot_bytes in (0, 2**20, DEFAULT_SLOT_BYTES):
            schedule = decide(problem, slot_bytes, table=found).schedule
            unsplit = dataclasses.replace(schedule, rows_per_launch=0)
            assert not schedule.fused or fit(problem, unsplit, slot_bytes) == schedule


names = st.sampled_from([*table._ENTRY_KINDS, *SCHEDULE.as_attributes(), "format", "entries", "x"])
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, 2, 128, 256, 2**31, "H200", "matmul_allreduce", "bfloat16"])
    | st.floats()
    | st.text(max_size=8)
    | st.just("long" * 1000)
    | st.sampled_from([10**400, -(10**4000)]),  # float() holds neither
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=8),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(values)
def test_any_document_is_safe(value):
    safe(json.dumps(value))
    safe(json.dumps(changed() | {"entries": value if isinstance(value, list) else [value]}))


@settings(max_examples=300, deadline=None)
@given(names, values)
@example("m", 2**31 - 1)
@example("rows_per_launch", 2**31 - 128)
def test_any_change_of_a_field_is_safe(name, value):
    safe(json.dumps(changed(**{name: value})))


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_any_change_of_bytes_is_safe(data):
    content = bytearray(table.format_table(one_entry(), VERSION).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(content) - 1))
        kind = data.draw(st.sampled_from(["replace", "insert", "delete", "cut"]))
        if kind == "replace":
            content[position] = data.draw(st.integers(0, 255))
        elif kind == "insert":
            content.insert(position, data.draw(st.sampled_from(b'0123456789-.eE[]{}",:N')))
        elif kind == "delete" and len(content) > 1:
            del content[position]
        elif kind == "cut":
            del content[position + 1 :]
    safe(bytes(content))


@pytest.mark.parametrize("op", ["matmul_allreduce", "matmul_reducescatter", "allgather_matmul"])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_tuning_tries_at_most_24_schedules(op, num_ranks):
    problem = Problem(op=op, m=4096, n=8192, k=8192, num_ranks=num_ranks)
    tried, _ = tuning_candidates(problem, DEFAULT_SLOT_BYTES)
    assert 8 <= len(tried) <= 24
    assert len(set(tried)) == len(tried)
    assert {schedule.tile_n for schedule in tried} == {128, 256}
    assert {schedule.raster for schedule in tried} >= {8, 16, 32}
    if op == ALLGATHER:
        assert {schedule.num_senders for schedule in tried} == {0, 20, 32, 48}
    else:
        assert {schedule.push_spread for schedule in tried} >= {0, 40, 80}
    assert all(fit(problem, schedule, DEFAULT_SLOT_BYTES) == schedule for schedule in tried)
