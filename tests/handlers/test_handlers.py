"""The handlers of the custom calls on the host: XLA, NCCL and the CUDA runtime are played.

Threads play the ranks, kernels only say what they were launched with. The attributes are those that
lowering.py writes, XLA's own headers decode them, and ThreadSanitizer watches.
"""

import os
import select
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.ffi
import jax.numpy as jnp
import pytest
from jax.extend.mlir import ir
from sharded import OPS, make_mesh, specs_of

import entwine_jax
from entwine_jax import configuration
from entwine_jax.schedule.legality import num_flags

HOST = Path(__file__).with_name("host")
FFI = HOST.parents[2] / "ffi"
# All but the bindings for Python.
HANDLERS = ("handlers", "decode", "communicator", "failed_runs")
SOURCES = [HOST / f"{name}.cc" for name in ("main", "xla", "cuda", "launches")]
SOURCES += [FFI / "handlers" / f"{name}.cc" for name in HANDLERS]
SOURCES += [*sorted((FFI / "peer").glob("*.cc")), FFI / "launch" / "launch.cc"]
FLAGS = ["-std=c++20", "-O0", "-g1", "-fPIC", "-fsanitize=thread", "-Wall", "-Wextra", "-Werror"]
# A rank says by this name of which process it is.
FLAGS += ["-Dgetpid=process_of_rank"]

KINDS = ("allreduce", "reducescatter", "allgather")
M, N, K = 4096, 4096, 4096


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    compiler = os.environ.get("CXX") or shutil.which("g++")
    assert compiler, "the handlers are tested with g++, which is not installed"
    folder = tmp_path_factory.mktemp("handlers")
    paths = [f"-I{HOST}", f"-I{FFI}", "-isystem", jax.ffi.include_dir()]

    def run(*arguments):
        done = subprocess.run(
            [compiler, *FLAGS, *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

    def compiled(source):
        run(*paths, "-c", source, "-o", folder / f"{source.stem}.o")
        return folder / f"{source.stem}.o"

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, SOURCES))
    nccl = folder / "libnccl.so.2"
    run(*paths, "-shared", f"-Wl,-soname,{nccl.name}", HOST / "nccl.cc", "-o", nccl)
    run(*objects, nccl, "-rdynamic", f"-Wl,-rpath,{folder}", "-ldl", "-o", folder / "handlers")
    return folder / "handlers"


class Machine:
    """Several GPUs with one custom call on all of them."""

    def __init__(self, process):
        self._process = process

    def ask(self, *words):
        print(*words, file=self._process.stdin, flush=True)
        lines = []
        while (line := self._process.stdout.readline()) != "\n":
            assert line, f"the program ended on {words}: {self._process.stderr.read()}"
            lines.append(line.rstrip())
        return lines

    def load(self, call, num_devices, *other_calls, **changes):
        """Each call is a program for all devices; `changes` are attributes, by name."""
        self.num_calls = (1 + len(other_calls)) * num_devices
        self.ask("programs", 1 + len(other_calls), num_devices)
        for i, program in enumerate((call, *other_calls)):
            self.ask("program", i)
            for device in range(num_devices):
                for name, value in (program["attributes"] | changes).items():
                    self.change(device, name, value)
                for role in ("operand", "result"):
                    for dtype, sizes in program[role]:
                        self.ask(role, device, dtype, *sizes)

    def change(self, device, name, value):
        if isinstance(value, dict):
            for field, number in value.items():
                self.ask("attribute", device, f"{name}.{field}", number)
        elif isinstance(value, list):
            self.ask("attribute", device, name, "[", *value, "]")
        elif value is not None:
            self.ask("attribute", device, name, value)

    def read_stderr(self):
        """The next line, if one comes within ten seconds."""
        ready, _, _ = select.select([self._process.stderr], [], [], 10)
        assert ready, "nothing was written to standard error"
        return self._process.stderr.readline()

    def launches(self):
        """What was launched since the last time, by device."""
        lines = [dict(word.split("=") for word in line.split()) for line in self.ask("launches")]
        return sorted(lines, key=lambda line: int(line["device"]))

    def succeed(self, *stage):
        """Runs a stage of every program on every device, which must succeed."""
        assert self.ask(*stage) == ["ok"] * self.num_calls

    def start(self):
        """Begins a run, up to the point where the calls execute."""
        for stage in ("prepare", "initialize"):
            self.succeed(stage)


@pytest.fixture
def machine(program):
    with subprocess.Popen(
        [program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1 exitcode=66 atexit_sleep_ms=50"},
        text=True,
    ) as process:
        machine = Machine(process)
        yield machine
        errors, _ = machine.ask("count")[0].split()
        process.stdin.close()
        assert (process.wait(), int(errors)) == (0, 0), process.stderr.read()
        assert "ThreadSanitizer" not in process.stderr.read()


def plain(attribute):
    """An attribute of MLIR as Python's int, list of ints or dict."""
    if isinstance(attribute, ir.DictAttr):
        return {item.name: plain(item.attr) for item in attribute}
    if isinstance(attribute, ir.DenseIntElementsAttr):
        return list(attribute)
    return ir.IntegerAttr(attribute).value


@pytest.fixture
def lowered(fused_lowering):
    """The custom call that an op is lowered to: target, attributes, operands and results."""

    def lower(kind, dtype=jnp.bfloat16, shape=(4,), names=("tp",), axis="tp", w_transposed=False):
        x_spec, w_spec, y_spec = specs_of(kind, axis)
        mesh = make_mesh(shape, names)
        f = jax.shard_map(
            lambda x, w: OPS[kind](x, w, axis),
            mesh=mesh,
            in_specs=(x_spec, w_spec),
            out_specs=y_spec,
        )

        def gradient(x, w):
            return jax.grad(lambda x: jnp.sum(f(x, w).astype(jnp.float32)))(x)

        arguments = [jax.ShapeDtypeStruct(sizes, dtype) for sizes in ((M, K), (K, N))]
        traced = jax.jit(gradient if w_transposed else f).trace(*arguments)
        found = []

        def visit(op):
            if op.name == "stablehlo.custom_call":
                call = as_dict(op.operation)
                if call["attributes"]["w_transposed"] == w_transposed:
                    found.append(call)
            return ir.WalkResult.ADVANCE

        traced.lower(lowering_platforms=("cuda",)).compiler_ir().operation.walk(visit)
        (call,) = found
        return call

    return lower


def as_dict(op):
    def types(values):
        return [(str(v.type.element_type), list(v.type.shape)) for v in values]

    return {
        "target": ir.StringAttr(op.attributes["call_target_name"]).value,
        "attributes": plain(op.attributes["mhlo.backend_config"]),
        "operand": types(op.operands),
        "result": types(op.results),
    }


# What each op's product is on one of 4 ranks, and where the gathered x stands among the arrays.
LAUNCHED = {
    "allreduce": {"op": 0, "m": M, "n": N, "k": K // 4, "gathered": -1},
    "reducescatter": {"op": 1, "m": M, "n": N, "k": K // 4, "gathered": -1},
    "allgather": {"op": 2, "m": M, "n": N // 4, "k": K, "gathered": 3},
}
# The op whose gradient of x is this op with the weight transposed.
TRANSPOSE = {
    "allreduce": "column_parallel",
    "reducescatter": "allgather",
    "allgather": "reducescatter",
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("w_transposed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_lowered_is_launched(machine, lowered, kind, w_transposed, dtype):
    call = lowered(TRANSPOSE[kind] if w_transposed else kind, dtype, w_transposed=w_transposed)
    machine.load(call, 4)
    machine.start()
    machine.succeed("execute", call["target"])
    ranks = machine.launches()
    assert [int(rank["device"]) for rank in ranks] == [0, 1, 2, 3]
    attributes = call["attributes"]
    for i, rank in enumerate(ranks):
        expected = {
            **LAUNCHED[kind],
            **attributes["schedule"],
            "num_batches": 1,
            "float16": int(dtype == jnp.float16),
            "w_transposed": int(w_transposed),
            "device": i,
            "own_stream": 1,
            "x": 0,
            "w": 1,
            "output": 2,
            "num_ctas": 132,
            "rank": i,
            "num_ranks": 4,
            "control": "0,1,2,3",
            "slots": "0,1,2,3",
            "failure": i,
            "reached": "1111",
            "loaded": 1,
            "ready": 1,
            "max_slots": num_flags(attributes["slot_bytes"]),
            "parity_bytes": attributes["slot_bytes"] // 2,
            "deadline_ns": 10_000_000_000,
        }
        assert rank == {name: str(value) for name, value in expected.items()}


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_any_number_of_ranks(machine, lowered, num_ranks):
    call = lowered("allreduce")
    machine.load(call, num_ranks, replica_groups=list(range(num_ranks)), group_size=num_ranks)
    machine.start()
    machine.succeed("execute", call["target"])
    everyone = ",".join(map(str, range(num_ranks)))
    assert [(rank["control"], rank["slots"]) for rank in machine.launches()] == [
        (everyone, everyone)
    ] * num_ranks


def test_groups_of_a_mesh_have_workspaces_of_their_own(machine, lowered):
    for axis, groups in (("rows", [(0, 2), (1, 3)]), ("columns", [(0, 1), (2, 3)])):
        call = lowered("allreduce", shape=(2, 2), names=("rows", "columns"), axis=axis)
        machine.load(call, 4)
        machine.start()
        machine.succeed("execute", call["target"])
        for rank in machine.launches():
            (group,) = (g for g in groups if int(rank["device"]) in g)
            assert rank["control"] == rank["slots"] == ",".join(map(str, group))
            assert group[int(rank["rank"])] == int(rank["device"])
    found = sorted(tuple(map(int, line.split()))[:3] for line in machine.ask("report"))
    assert found == sorted((d, r, 2) for d in range(4) for r in (d // 2, d % 2))


def calls_of_two_axes(lowered):
    axes = ("rows", "columns")
    return [lowered("allreduce", shape=(2, 2), names=axes, axis=axis) for axis in axes]


def test_programs_that_begin_at_the_same_time_do_not_disturb_each_other(machine, lowered):
    rows, columns = calls_of_two_axes(lowered)
    machine.load(rows, 4, columns)
    machine.start()
    machine.succeed("execute", rows["target"])
    found = sorted((line["device"], line["control"]) for line in machine.launches())
    assert found == sorted(
        (str(device), ",".join(map(str, group)))
        for group in ((0, 1), (2, 3), (0, 2), (1, 3))
        for device in group
    )


def test_a_workspace_is_made_once(machine, lowered):
    machine.load(lowered("allreduce"), 4)
    machine.start()
    before = machine.ask("count")
    for _ in range(3):
        machine.start()
    assert machine.ask("count") == before
    assert len(machine.ask("report")) == 4


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_programs_of_other_shares_have_other_workspaces(machine, lowered, order):
    """As an exported program has, which brings the share of who wrote it."""
    call = lowered("allreduce")
    for mib in (64 * i for i in order):
        machine.load(call, 4, slot_bytes=mib << 20)
        machine.start()
        machine.succeed("execute", call["target"])
        assert {rank["parity_bytes"] for rank in machine.launches()} == {str(mib << 19)}
    assert len(machine.ask("report")) == 8


WANTING = {
    "malloc": "no workspace for rank 1: allocating the control words: out of memory",
    "host_alloc": "no workspace for rank 1: allocating the failure record: out of memory",
    "attribute": "no workspace for rank 1: asking for the number of SMs: out of memory",
    "peer_access": "no workspace for rank 1: enabling peer access to device 0: peer access is not",
}


@pytest.mark.parametrize("what", WANTING)
def test_what_one_rank_cannot_have_is_an_error_on_all(machine, lowered, what):
    call = lowered("allreduce")
    machine.load(call, 4)
    machine.succeed("prepare")
    before = machine.ask("count")
    machine.ask("fail", what, 1)
    machine.succeed("initialize")
    for end in machine.ask("execute", call["target"]):
        assert end.startswith(f"13 entwine_jax: {WANTING[what]}"), end
        assert end.endswith("ENTWINE_JAX_DISABLE=1 runs everything as plain lax."), end
    assert machine.launches() == []
    assert machine.ask("count") == before
    machine.ask("fail", "nothing", -1)
    machine.start()
    machine.succeed("execute", call["target"])


@pytest.mark.parametrize("what", WANTING)
def test_nobody_waits_for_a_device_that_lacks_something(machine, lowered, what):
    """A program of two calls, in groups of which one has the device and the other has not."""
    rows, columns = calls_of_two_axes(lowered)
    machine.load(rows, 4, columns)
    machine.ask("one_program")
    machine.succeed("prepare")
    machine.ask("fail", what, 1)
    machine.succeed("initialize")
    ends = machine.ask("execute", rows["target"])
    assert all("no workspace for rank" in end for end in ends[:4]), ends
    assert ends[4:] == ["not made"] * 4
    assert machine.launches() == []
    machine.ask("fail", "nothing", -1)
    machine.start()
    machine.succeed("execute", rows["target"])


def test_a_device_that_cannot_load_the_kernels_ends_the_run_on_all(machine, lowered):
    call = lowered("allreduce")
    machine.load(call, 4)
    machine.ask("fail", "load", 1)
    machine.start()
    ends = machine.ask("execute", call["target"])
    assert ends == ["13 entwine_jax: loading the fused kernel"] * 4
    assert machine.launches() == []
    machine.ask("fail", "nothing", -1)
    machine.start()
    machine.succeed("execute", call["target"])


def test_the_exchange_finds_its_memory_in_prepare(machine, lowered):
    machine.load(lowered("allreduce"), 4)
    machine.ask("fail", "malloc", 2)
    ends = machine.ask("prepare")
    assert ends[2].startswith("13 entwine_jax: allocating for the exchange of addresses")
    assert [end for i, end in enumerate(ends) if i != 2] == ["ok"] * 3


def test_programs_that_begin_without_memory_do_not_wait(machine, lowered):
    """What the first Prepare took is enough for exchanges at the same time."""
    rows, columns = calls_of_two_axes(lowered)
    machine.load(rows, 4)
    machine.succeed("prepare")
    machine.load(rows, 4, columns)
    machine.ask("fail", "malloc", 1)
    machine.start()
    ends = machine.ask("execute", rows["target"])
    assert all("no workspace for rank" in end for end in ends), ends


def test_a_run_that_failed_does_not_fail_others(machine, lowered):
    call = lowered("allreduce")
    machine.load(call, 4)
    machine.succeed("prepare")
    machine.ask("fail", "malloc", 1)
    for _ in range(70):  # more than are kept
        machine.start()
        assert all("no workspace" in end for end in machine.ask("execute", call["target"]))
    assert machine.launches() == []
    machine.ask("fail", "nothing", -1)
    machine.start()
    machine.succeed("execute", call["target"])


@pytest.mark.parametrize(
    ("words", "change"),
    [("is in another process", ("process", 3)), ("has a workspace of another size", None)],
)
def test_ranks_that_cannot_go_together_are_refused_on_all(machine, lowered, words, change):
    call = lowered("allreduce")
    machine.load(call, 4)
    if change is None:
        machine.change(0, "slot_bytes", 1 << 20)
    else:
        machine.ask(*change)
    machine.start()
    assert all(words in end for end in machine.ask("execute", call["target"]))
    assert machine.ask("report") == []


def test_communicators_at_the_addresses_of_others_are_refused(machine, lowered):
    call = lowered("allreduce")
    machine.load(call, 4)
    machine.start()
    machine.ask("shuffle")
    machine.start()
    changed = "13 entwine_jax: the communicators of XLA have changed; start the process anew"
    assert machine.ask("execute", call["target"]) == [changed] * 4
    assert machine.launches() == []


def test_once_a_wait_has_failed_every_rank_says_so(machine, lowered):
    call = lowered("allreduce")
    machine.load(call, 4)
    machine.start()
    machine.succeed("execute", call["target"])
    machine.launches()
    machine.ask("late_peer", 2, 3)
    ends = machine.ask("execute", call["target"])
    said = (
        f"13 entwine_jax: matmul_allreduce of m={M}, n={N}, k={K // 4} in bfloat16: "
        "rank 2 waited for rank 3 to start the same call past the deadline"
    )
    assert all(end.startswith(said) for end in ends), ends
    assert machine.launches() == []
    # XLA's own error says less, so that it is printed too.
    assert machine.read_stderr().startswith(said.removeprefix("13 "))


def test_the_rank_that_waits_for_nobody_is_named(machine, lowered):
    call = lowered("allgather")
    machine.load(call, 4)
    machine.start()
    machine.succeed("execute", call["target"])
    # Rank 1 did not send to 0 for want of 2, nor 0 to 3.
    for rank, peer, named in ((0, 1, "1 or 2 or 3"), (1, 2, "2 or 3"), (3, 0, "2")):
        machine.ask("late_peer", rank, peer)
        ends = machine.ask("execute", call["target"])
        words = f"seen). Rank {named} did not arrive or arrived too late"
        assert all("rank 0 waited for rank 1 to start" in end for end in ends), ends
        assert all(words in end for end in ends), ends


@pytest.mark.parametrize(
    ("state", "stage", "words"),
    [
        ("missing", "prepare", "CollectivesExtension not found"),
        ("new_major_version", "prepare", "Extension version mismatch for CollectivesExtension"),
        ("refusing", "prepare", "XLA refused to take the request: no cliques today"),
        ("right", "initialize", "XLA refused to give the communicator: nobody has requested"),
    ],
)
def test_an_xla_that_gives_no_communicators_is_an_error(machine, lowered, state, stage, words):
    machine.load(lowered("allreduce"), 4)
    machine.ask("collectives", state)
    assert all(words in end for end in machine.ask(stage))


def test_a_communicator_of_another_size_is_refused(machine, lowered):
    call = lowered("allreduce")
    machine.load(call, 4)
    machine.ask("collectives", "other_size")
    machine.start()
    ends = machine.ask("execute", call["target"])
    assert all("group_size: must be the number of ranks" in end for end in ends), ends


@pytest.mark.parametrize("kind", KINDS)
def test_only_calls_in_graphs_may_be_captured(machine, lowered, monkeypatch, kind):
    call = lowered(kind)
    monkeypatch.setattr(configuration, "_overridden", None)
    entwine_jax.configure(graphs=True)
    captured = lowered(kind)
    assert machine.ask("captured", call["target"]) == ["0"]
    assert machine.ask("captured", captured["target"]) == ["1"]
    for target in (call["target"], captured["target"]):
        machine.load(call, 4)
        machine.start()
        machine.succeed("execute", target)
        assert {rank["op"] for rank in machine.launches()} == {str(LAUNCHED[kind]["op"])}
    assert machine.ask("executions") == ["8"]


def test_the_deadline_holds_for_calls_from_now_on(machine, lowered):
    call = lowered("allreduce")
    machine.load(call, 4)
    machine.start()
    machine.ask("deadline", 0.25)
    machine.succeed("execute", call["target"])
    assert {rank["deadline_ns"] for rank in machine.launches()} == {"250000000"}


def test_peers_that_xla_has_enabled_are_no_error(machine, lowered):
    call = lowered("allreduce")
    for device, peer in ((0, 1), (0, 2), (3, 0)):
        machine.ask("reaches", device, peer)
    machine.load(call, 4)
    machine.start()
    machine.succeed("execute", call["target"])
    assert {rank["reached"] for rank in machine.launches()} == {"1111"}


def without(dictionary, name):
    return {key: value for key, value in dictionary.items() if key != name}


WRONG = {
    "no schedule": (lambda a: without(a, "schedule"), "Wrong number of attributes"),
    "schedule of version 3": (
        lambda a: a | {"schedule": without(a["schedule"], "num_senders")},
        "Wrong number of attributes",
    ),
    "unknown field": (
        lambda a: a | {"schedule": without(a["schedule"], "raster") | {"rooster": 1}},
        "raster",
    ),
    "int for a list": (lambda a: a | {"replica_groups": 4}, "expected array but got scalar"),
    "list for an int": (lambda a: a | {"slot_bytes": [1]}, "expected scalar but got array"),
    "groups that do not divide": (
        lambda a: a | {"group_size": 3},
        "group_size=3: must divide the 4 ids of replica_groups",
    ),
    "groups of none": (lambda a: a | {"group_size": 0}, "group_size=0: must divide"),
    "no groups": (lambda a: a | {"replica_groups": []}, "must divide the 0 ids"),
    "slots of no bytes": (lambda a: a | {"slot_bytes": 0}, "slot_bytes=0: must be a positive"),
    "slots of odd bytes": (lambda a: a | {"slot_bytes": 1000}, "slot_bytes=1000: must be"),
}


def test_an_all_gather_of_one_rank_is_refused(machine, lowered):
    # Its kernel would leave what it gathers as it was.
    call = lowered("allgather")
    machine.load(call, 1, replica_groups=[0], group_size=1)
    machine.start()
    (end,) = machine.ask("execute", call["target"])
    assert "group_size: must be at least 2" in end


@pytest.mark.parametrize("name", WRONG)
def test_wrong_attributes_are_refused_by_name(machine, lowered, name):
    call = lowered("allreduce")
    change, words = WRONG[name]
    machine.load(call | {"attributes": change(call["attributes"])}, 4)
    ends = machine.ask("prepare")
    if ends == ["ok"] * 4:
        ends = machine.ask("initialize")
    assert all(end.startswith("3 ") and words in end for end in ends), ends


SHAPES = {
    "x of 3 dimensions": ("operand", 0, ("bf16", [M, K // 4, 1]), "x, w: must have 2 dimensions"),
    "w of other rows": ("operand", 1, ("bf16", [K, N]), f"w: the shape must be [{K // 4}, {N}]"),
    "w of another dtype": ("operand", 1, ("f16", [K // 4, N]), "w: the dtype must be that of x"),
    "y too small": ("result", 0, ("bf16", [M // 2, N]), f"y: the shape must be [{M}, {N}]"),
    "y of another dtype": ("result", 0, ("f32", [M, N]), "y: the dtype must be that of x"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_operands_that_do_not_fit_are_refused_by_name(machine, lowered, name):
    call = lowered("allreduce")
    role, place, wrong, words = SHAPES[name]
    call[role][place] = wrong
    machine.load(call, 4)
    machine.start()
    assert all(words in end for end in machine.ask("execute", call["target"]))
    assert machine.launches() == []


@pytest.mark.parametrize(
    ("kind", "place", "name"),
    [("allgather", 0, "y"), ("allgather", 1, "gathered"), ("reducescatter", 0, "y")],
)
def test_results_of_other_rows_are_refused(machine, lowered, kind, place, name):
    call = lowered(kind)
    call["result"][place][1][0] -= 128
    machine.load(call, 4)
    machine.start()
    assert all(f"{name}: the shape" in end for end in machine.ask("execute", call["target"]))


def test_rows_that_the_ranks_do_not_divide_are_refused(machine, lowered):
    call = lowered("reducescatter")
    call["operand"][0][1][0] -= 1
    machine.load(call, 4)
    machine.start()
    ends = machine.ask("execute", call["target"])
    assert all("x: the ranks must divide its rows" in end for end in ends)


def test_float32_is_refused(machine, lowered):
    call = lowered("allreduce")
    for role, place in (("operand", 0), ("operand", 1), ("result", 0)):
        call[role][place] = ("f32", call[role][place][1])
    machine.load(call, 4)
    machine.start()
    ends = machine.ask("execute", call["target"])
    assert all("x: the dtype must be bfloat16 or float16" in end for end in ends)
