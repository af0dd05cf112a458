#!/usr/bin/env python3
"""What the compiler made of the CUDA kernels: registers, shared memory and spills of each, and the instructions meant.

    scripts/check_kernels.py FILE [FILE ...]        shared libraries or object files with CUDA code

Lists every kernel. The exit status is 1 if one of them uses local memory (a spill, or an array that is indexed at run
time) or lacks an instruction that its speed rests on. Needs cuobjdump of the CUDA toolkit.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
from rich.console import Console
from rich.table import Table


class Kernel(NamedTuple):
    """Resources of one kernel of one architecture; bytes of stack and local memory are per thread."""

    arch: str
    name: str
    registers: int
    stack: int
    shared: int
    local: int


class Expectation(NamedTuple):
    """A kernel whose name matches ``kernel`` must have each of ``instructions`` (patterns of SASS)."""

    kernel: str
    instructions: tuple[str, ...]


EXPECTATIONS = (
    Expectation(
        r"softmax_(warp_per_row|block_registers|cluster_registers|online)_",
        (r"LDG\.E\.128", r"STG\.E\.128", r"MUFU\.EX2"),
    ),
    Expectation(r"softmax_shared_", (r"LDGSTS\.E\.\S*128", r"LDS\.128", r"STG\.E\.128", r"MUFU\.EX2")),
    Expectation(r"layer_norm_", (r"LDG\.E\.128", r"STG\.E\.128")),
    Expectation(r"gemm_simt_", (r"FFMA",)),
    Expectation(r"gemm_mma_|attention_(mma|split|tf32)_", (r"HMMA", r"LDGSTS\.E\.\S*128")),
    Expectation(r"gemm_sm90a_|attention_wgmma_", (r"HGMMA", r"UTMALDG")),
)


def parse_resources(text: str) -> Iterator[Kernel]:
    """Kernels in the output of ``cuobjdump --dump-resource-usage``."""
    arch, name = "", ""
    for line in text.splitlines():
        if match := re.match(r"\s*arch = (\S+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function (\S+):", line):
            name = match[1]
        elif name and (values := dict(re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", line))):
            yield Kernel(arch, name, *(int(values[key]) for key in ("REG", "STACK", "SHARED", "LOCAL")))
            name = ""


def parse_sass(text: str) -> Iterator[tuple[str, str, str]]:
    """Architecture, name and instructions of each kernel in the output of ``cuobjdump --dump-sass``."""
    arch = ""
    for part in re.split(r"^\s*Function : ", text, flags=re.MULTILINE):
        name, _, body = part.partition("\n")
        if arch:
            yield arch, name.strip(), body
        if found := re.findall(r"^\s*arch = (\S+)", part, flags=re.MULTILINE):
            arch = found[-1]


def short_name(mangled: str) -> str:
    """``softmax_shared_kernel<float, true>`` of a mangled name, as far as c++filt can be found."""
    if shutil.which("c++filt") is None:
        return mangled
    name = subprocess.run(["c++filt", mangled], capture_output=True, text=True, check=True).stdout.strip()
    name = re.sub(r"\(anonymous namespace\)::|ortplugins::|^void ", "", name)
    return name.partition("(")[0] if name.count("(") == 1 else re.sub(r"\((?!int\)|bool\)).*", "", name)


def missing_instructions(name: str, sass: str) -> list[str]:
    """Patterns that the kernel should match and does not."""
    wanted = [p for e in EXPECTATIONS if re.search(e.kernel, name) for p in e.instructions]
    return [p for p in wanted if not re.search(p, sass)]


def faults_of(kernel: Kernel, sass: str) -> list[str]:
    """What is wrong with a kernel; empty if nothing is."""
    faults = []
    if kernel.local or re.search(r"\b(LDL|STL)\b", sass):
        faults.append(f"local memory ({kernel.stack + kernel.local} bytes a thread)")
    faults += [f"no {p}" for p in missing_instructions(kernel.name, sass)]
    return faults


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--cuobjdump", default=lambda: shutil.which("cuobjdump") or "/usr/local/cuda/bin/cuobjdump",
              help="The disassembler. [default: that on the PATH]")
@click.option("--all/--faulty", "every", default=True, help="List all kernels, or only those with a fault.")
def main(files: tuple[Path, ...], cuobjdump: str, every: bool) -> None:
    """Lists registers, shared memory and faults of the CUDA kernels in FILES."""

    def dump(option: str, file: Path) -> str:
        return subprocess.run([cuobjdump, option, str(file)], capture_output=True, text=True, check=True).stdout

    if shutil.which(cuobjdump) is None:
        raise click.ClickException(f"{cuobjdump} is not there: it comes with the CUDA toolkit; --cuobjdump names it")
    table = Table("arch", "kernel", "registers", "shared", "fault")
    kernels, faulty = 0, 0
    for file in files:
        sass = {(arch, name): body for arch, name, body in parse_sass(dump("--dump-sass", file))}
        for kernel in parse_resources(dump("--dump-resource-usage", file)):
            faults = faults_of(kernel, sass.get((kernel.arch, kernel.name), ""))
            kernels, faulty = kernels + 1, faulty + bool(faults)
            if every or faults:
                numbers = str(kernel.registers), str(kernel.shared)
                table.add_row(kernel.arch, short_name(kernel.name), *numbers, ", ".join(faults))
    console = Console()
    console.print(table)
    console.print(f"{kernels} kernels, {faulty} with a fault")
    if kernels == 0:
        raise click.ClickException("there is no CUDA code in these files")
    sys.exit(1 if faulty else 0)


if __name__ == "__main__":
    main()
