"""Times a whole decoder layer of Llama-3-70B, forward and with backward: fused beside plain lax.

The layer is that of `sharded_transformer_layer.py`, in both its forms. Before it is timed, its
result and all gradients are compared with plain lax in float32: fused in bfloat16 may be at most
twice as far from it as plain lax in bfloat16. Without GPUs it runs with small widths on virtual
CPU devices, where there is nothing to gain.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import sharded_transformer_layer as example
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from entwine_jax.argument_types import existing_file, output_file
from entwine_jax.bench import report, timing
from entwine_jax.bench.machine import describe_machine
from entwine_jax.bench.verify import Verification

LLAMA_70B = example.Config(
    width=8192,
    num_heads=64,
    num_kv_heads=8,
    head_size=128,
    hidden=28672,
    batch=1,
    sequence=4096,
    dtype="bfloat16",
    attention="cudnn",
)
SMALL = example.SMALL._replace(dtype="bfloat16")

# By name: the form in plain lax and the fused one.
FORMS = {
    "allreduce": (example.ALLREDUCE_LAX, example.ALLREDUCE),
    "sequence": (example.SEQUENCE_LAX, example.SEQUENCE),
}

# Params, x and cotangent; and the layer, or the layer and its gradients, as a function of them.
Inputs = tuple[example.Params, jax.Array, jax.Array]
Step = Callable[[example.Params, jax.Array, jax.Array], Any]


class Result(NamedTuple):
    """Times of one layer in us, and the fused form's distance from float32 over that of lax."""

    tokens: int
    form: str
    forward_lax_us: float
    forward_us: float
    both_lax_us: float
    both_us: float
    error_ratio: float


def step(mesh: Mesh, config: example.Config, form: example.Form, *, backward: bool) -> Step:
    """The layer, or with `backward` the layer and the gradients of params and x."""
    layer = example.run_layer(mesh, config, form)

    def both(params: example.Params, x: jax.Array, ct: jax.Array) -> Any:
        y, pull_back = jax.vjp(layer, params, x)
        return y, pull_back(ct)

    return both if backward else lambda params, x, ct: layer(params, x)


def repeated(
    mesh: Mesh, config: example.Config, form: example.Form, *, backward: bool, num_calls: int
) -> Step:
    """`num_calls` steps in one program, one after the other; gives the results of the last."""
    one = step(mesh, config, form, backward=backward)
    specs = (form.activations, (example.SPECS, form.activations)) if backward else form.activations

    def program(params: example.Params, x: jax.Array, ct: jax.Array) -> Any:
        def again(_: int, carry: Any) -> Any:
            operands, _ = carry
            # The barrier ties all operands to the call before, weights too: what is computed from
            # weights alone would otherwise leave the loop.
            return lax.optimization_barrier((operands, one(*operands)))

        empty = jax.tree.map(
            lambda y, spec: jnp.zeros(y.shape, y.dtype, device=NamedSharding(mesh, spec)),
            jax.eval_shape(one, params, x, ct),
            specs,
        )
        return lax.fori_loop(0, num_calls, again, ((params, x, ct), empty))[1]

    return jax.jit(program)


def make_inputs(mesh: Mesh, config: example.Config, seed: int) -> Inputs:
    """Random params, x and cotangent where they are needed."""

    def make(key: jax.Array) -> Inputs:
        params_key, x_key, ct_key = jax.random.split(key, 3)
        shape = config.batch, config.sequence, config.width
        x, ct = (jax.random.normal(k, shape, config.dtype) for k in (x_key, ct_key))
        return example.cast(example.make_params(config, params_key), config.dtype), x, ct

    specs = example.SPECS, P(), P()
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    return jax.jit(make, out_shardings=shardings)(jax.random.key(seed))


def in_float32(mesh: Mesh, config: example.Config, inputs: Inputs) -> Any:
    """Result and gradients of the layer in plain lax, computed in float32."""
    inputs = jax.tree.map(lambda v: v.astype(jnp.float32), inputs)
    config = config._replace(dtype="float32", attention="xla")
    with jax.default_matmul_precision("highest"):
        return jax.jit(step(mesh, config, example.ALLREDUCE_LAX, backward=True))(*inputs)


@jax.jit
def distances(results: Any, exact: Any) -> Any:
    """Of every array from the exact one, in the Frobenius norm."""
    return jax.tree.map(lambda a, b: jnp.linalg.norm(a.astype(jnp.float32) - b), results, exact)


def error_ratio(fused: Any, plain: Any, exact: Any) -> float:
    """Largest ratio, over the result and all gradients, of the two distances from the exact one.

    Raises:
        ValueError: names the array that is too far off.
    """
    checks = jax.tree.map(
        lambda ours, theirs: Verification(float(ours), float(theirs), ranks_equal=True),
        distances(fused, exact),
        distances(plain, exact),
    )
    for path, check in jax.tree.leaves_with_path(checks):
        if not check.holds:
            raise ValueError(f"WRONG RESULT: {jax.tree_util.keystr(path)}: {check}")
    return max(check.error_ratio for check in jax.tree.leaves(checks))


def measure(mesh: Mesh, config: example.Config, args: argparse.Namespace) -> list[Result]:
    """Verifies and times all forms on one number of tokens, in the same interleaved rounds."""

    def label(form: example.Form, backward: bool) -> str:
        return f"{form.name}, {'with backward' if backward else 'forward'}"

    params, x, ct = make_inputs(mesh, config, args.seed)
    exact = in_float32(mesh, config, (params, x, ct))
    ratios, programs = {}, {}
    for name, forms in FORMS.items():
        inputs = params, *jax.device_put((x, ct), NamedSharding(mesh, forms[0].activations))
        for form, backward in itertools.product(forms, (False, True)):
            program = repeated(mesh, config, form, backward=backward, num_calls=args.calls)
            programs[label(form, backward)] = partial(program, *inputs)
        plain, fused = (programs[label(form, True)]() for form in forms)
        ratios[name] = error_ratio(fused, plain, exact)
        del plain, fused
    del exact
    rounds = timing.interleaved_times(
        programs, calls_per_dispatch=args.calls, num_rounds=args.rounds, seed=args.seed
    )
    times = {name: statistics.median(of_rounds) for name, of_rounds in rounds.items()}
    return [
        Result(
            tokens=config.batch * config.sequence,
            form=name,
            forward_lax_us=times[label(plain, False)],
            forward_us=times[label(fused, False)],
            both_lax_us=times[label(plain, True)],
            both_us=times[label(fused, True)],
            error_ratio=ratios[name],
        )
        for name, (plain, fused) in FORMS.items()
    ]


def markdown(title: str, rounds: int, results: list[Result]) -> str:
    """The table, with the machine above it and the notes below."""
    head = "tokens | form | forward, lax | fused | speed-up | with backward, lax | fused | speed-up"
    rows = [f"| {head} | error ratio |", "| --- " * 9 + "|"]
    for r in results:
        forward, both = r.forward_lax_us / r.forward_us, r.both_lax_us / r.both_us
        rows.append(
            f"| {r.tokens} | {r.form} | {r.forward_lax_us:.0f} | {r.forward_us:.0f} | {forward:.3f}"
            f" | {r.both_lax_us:.0f} | {r.both_us:.0f} | {both:.3f} | {r.error_ratio:.3f} |"
        )
    notes = (
        f"Times of one layer in us, median of {rounds} interleaved rounds; error ratio = largest "
        "distance from float32, of the result and all gradients, over that of lax."
    )
    return "\n\n".join([f"{title}:", "\n".join(rows), notes])


def write(
    args: argparse.Namespace, mesh: Mesh, config: example.Config, results: list[Result]
) -> str:
    """Writes the files that were asked for; gives the table."""
    machine = describe_machine(mesh.size)
    heads = f"{config.num_heads} heads, {config.num_kv_heads} key-value heads"
    widths = f"width {config.width}, {heads}"
    title = f"Decoder layer, {widths}, hidden {config.hidden}, {config.dtype}, {machine}"
    table = markdown(title, args.rounds, results)
    if args.markdown is not None:
        report.rewrite_markdown(args.markdown, table, mesh.size, "layer")
    if args.json is not None:
        settings = {"config": config._asdict(), "rounds": args.rounds, "calls": args.calls}
        document = {"machine": asdict(machine), **settings}
        document["results"] = [result._asdict() for result in results]
        args.json.write_text(json.dumps(document, indent=2) + "\n")
    return table


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", help="default: 1 and 2 sequences")
    parser.add_argument("--ranks", type=int, help="GPUs: 1, 2, 4 or 8 (default: as many as can be)")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default: 7)")
    parser.add_argument("--calls", type=int, default=8, help="layers a dispatch (default: 8)")
    parser.add_argument("--attention", choices=("xla", "cudnn"), help="default: cudnn on GPUs")
    parser.add_argument("--seed", type=int, default=0, help="of inputs and order")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write everything as JSON")
    parser.add_argument(
        "--markdown", type=existing_file, metavar="FILE", help="put the table into FILE"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns 0, or 1 for a wrong result or argument."""
    args = parse(argv)
    config = LLAMA_70B if jax.default_backend() == "gpu" else SMALL
    config = config._replace(attention=args.attention or config.attention)
    try:
        for name in ("rounds", "calls"):
            if getattr(args, name) < 1:
                raise ValueError(f"--{name} {getattr(args, name)}: must be 1 or more")
        num_devices = jax.device_count()
        num_ranks = num_devices if args.ranks is None else args.ranks
        mesh = example.make_mesh(config, max(1, min(num_ranks, num_devices)))
        if args.ranks not in (None, mesh.size):
            raise ValueError(
                f"--ranks {args.ranks}: must be 1, 2, 4 or 8, and not more than the {num_devices} "
                f"devices or the {config.num_kv_heads} key-value heads"
            )
        if args.markdown:
            report.around_table(args.markdown, mesh.size, "layer")
        results: list[Result] = []
        table = ""
        for tokens in args.tokens or (config.sequence, 2 * config.sequence):
            batch, rest = divmod(tokens, config.sequence)
            if rest or batch < 1:
                raise ValueError(f"--tokens {tokens}: must be a multiple of {config.sequence}")
            print(f"{tokens} tokens", file=sys.stderr, flush=True)
            results += measure(mesh, config._replace(batch=batch), args)
            # Each time, so that what was measured outlasts an interruption.
            table = write(args, mesh, config, results)
        print(table)
    except ValueError as error:
        print(f"benchmark_layer: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
