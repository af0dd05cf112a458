"""The performance page of the documentation, rendered from recorded runs: ``python -m ortplugins.bench.render [--check]``.

Every figure on the page comes from a file under ``plugins/perf``. A run made with other kernel sources than the tree's is
shown as stale.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .. import console
from ..files import replace_atomically
from .digest import kernel_digest

PAGE = Path("docs/performance.md")
RECORDS = Path("plugins/perf")

_INTRODUCTION = """\
# Performance

Rendered by `python -m ortplugins.bench.render` from the recorded runs under `plugins/perf`; not written by hand. Times are
medians; each rival was measured in the same run by the same method, in alternation. "2.0x" beside a rival means that
ours takes half its time. `copy` is a copy of the same tensor on the device, the bound for an op that reads and writes it
once. `error` is the largest against float64 (for GEMM divided by |A||B|).
"""


def _table(records: list[Mapping[str, Any]]) -> Iterable[str]:
    rivals = list(dict.fromkeys(name for r in records for name in r["baselines"]))
    header = ["problem", "type", "variant", "error", "time", *rivals]
    yield "| " + " | ".join(header) + " |"
    yield "|" + "---|" * len(header)
    for r in records:
        kind = r["dtype"] if not r["precision"] else f"{r['dtype']} {r['precision']}"
        cells = [console.problem(r["shape"]), kind, f"`{r['variant']}`", console.error(r["error"]), console.microseconds(r["median_us"])]
        for name in rivals:
            rival = r["baselines"].get(name)
            cells.append("" if rival is None else f"{console.microseconds(rival['median_us'])} ({rival['median_us'] / r['median_us']:.2f}x)")
        yield "| " + " | ".join(cells) + " |"


def _run(path: str, run: Mapping[str, Any], digest: str) -> Iterable[str]:
    environment = run["environment"]
    versions = ", ".join(f"{name} {environment[key]}" for name, key in
                         (("driver", "driver"), ("CUDA", "cuda"), ("ONNX Runtime", "onnxruntime"), ("PyTorch", "torch"))
                         if environment.get(key))
    yield f"## {environment['device']}: {Path(path).stem}"
    yield ""
    yield f"`{environment['command']}`, {environment['date']}, {versions} (`{path}`)"
    yield ""
    if run["kernel_digest"] != digest:
        yield "**Stale**: the kernel sources have changed since this run."
        yield ""
    if ceilings := environment.get("ceilings"):
        yield "Ceilings measured on this device: " + ", ".join(f"{k.replace('_per_', '/').replace('_', ' ')} {v:.3g}" for k, v in ceilings.items()) + "."
        yield ""
    for op in dict.fromkeys(r["op"] for r in run["records"]):
        yield f"### {op}"
        yield ""
        yield from _table([r for r in run["records"] if r["op"] == op])
        yield ""


def render(tree: Path) -> str:
    """The page for the records and kernel sources of ``tree``."""
    digest = kernel_digest(tree)
    lines = [_INTRODUCTION]
    for path in sorted((tree / RECORDS).rglob("*.json")):
        lines += _run(path.relative_to(tree).as_posix(), json.loads(path.read_text()), digest)
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Writes the page, or with ``--check`` says whether it is what the records give."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tree", type=Path, nargs="?", default=Path.cwd())
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if the page is not up to date")
    args = parser.parse_args()
    text, page = render(args.tree), args.tree / PAGE
    if args.check:
        sys.exit(0 if page.is_file() and page.read_text() == text else f"{PAGE} is not what {RECORDS} gives; render it again")
    page.parent.mkdir(exist_ok=True)
    replace_atomically(page, text)


if __name__ == "__main__":
    main()
