#!/usr/bin/env python3
"""What the compiler made of the CUDA kernels: registers, shared memory and spills of each, and the instructions meant.

    scripts/check_kernels.py FILE [FILE ...]        shared libraries or object files with CUDA code

Lists every kernel. The exit status is 1 if one of them uses local memory (a spill, or an array that is indexed at run
time) or lacks an instruction that its speed rests on. Needs cuobjdump and nvdisasm, of the CUDA toolkit or of the
packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
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
    """A kernel whose name matches ``kernel`` must have each of ``instructions`` (patterns of SASS), on architectures that
    match ``arch``; elsewhere it is never launched."""

    kernel: str
    instructions: tuple[str, ...]
    arch: str = ""


_BULK_COPIES = r"sm_(9|1\d)\d"

EXPECTATIONS = (
    Expectation(
        r"softmax_(warp_per_row|block_registers|online)_",
        (r"LDG\.E\.128", r"STG\.E\.128", r"MUFU\.EX2"),
    ),
    Expectation(
        r"softmax_resident_",
        (r"LDG\.E\.128", r"LDGSTS\.E\.\S*128", r"LDS\.128", r"STG\.E\.128", r"MUFU\.EX2"),
    ),
    Expectation(r"softmax_shared_", (r"LDGSTS\.E\.\S*128", r"LDS\.128", r"STG\.E\.128", r"MUFU\.EX2")),
    Expectation(r"softmax_split_", (r"LDG\.E\.128", r"MUFU\.EX2")),
    Expectation(r"layer_norm_ring_", (r"UBLKCP", r"LDS\.128"), _BULK_COPIES),
    Expectation(r"layer_norm_", (r"LDG\.E\.128", r"STG\.E\.128")),
    Expectation(r"(gemm|attention)_simt_", (r"FFMA",)),
    Expectation(r"gemm_mma_|attention_(mma|split|tf32)_", (r"HMMA", r"LDGSTS\.E\.\S*128")),
    Expectation(r"gemm_sm90a_|attention_(wgmma|fp16)_", (r"HGMMA", r"UTMALDG")),
    Expectation(r"attention_short_", (r"HGMMA", r"LDGSTS\.E\.\S*128", r"STG\.E\.128")),
    Expectation(r"gemm_skinny_", (r"UTMALDG",)),
    Expectation(r"gemm_skinny_.*HalfProducts", (r"HMMA",)),
    Expectation(r"gemm_small_", (r"LDGSTS\.E\.\S*128",)),
    Expectation(r"(gemm|attention)_scale_", (r"LDG\.E\.128",)),
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


def parse_sass(text: str) -> Iterator[tuple[str, str]]:
    """Name and instructions of each kernel in the output of ``nvdisasm --print-code``."""
    for part in re.split(r"^\.text\.", text, flags=re.MULTILINE)[1:]:
        name, _, body = part.partition(":\n")
        yield name, body


def short_name(mangled: str) -> str:
    """``softmax_shared_kernel<float, true>`` of a mangled name, as far as c++filt can be found."""
    if shutil.which("c++filt") is None:
        return mangled
    name = subprocess.run(["c++filt", mangled], capture_output=True, text=True, check=True).stdout.strip()
    name = re.sub(r"\(anonymous namespace\)::|ortplugins::|^void ", "", name)
    return name.partition("(")[0] if name.count("(") == 1 else re.sub(r"\((?!int\)|bool\)).*", "", name)


def find_cuobjdump() -> Path | None:
    """cuobjdump with nvdisasm beside it: on the PATH, of the toolkit, or of the packages installed for this Python."""
    folders = [Path(found).parent for found in [shutil.which("cuobjdump")] if found]
    folders += [Path("/usr/local/cuda/bin")]
    for package in ("nvidia.cu13", "nvidia.cu12"):
        with contextlib.suppress(ModuleNotFoundError):
            spec = importlib.util.find_spec(package)
            folders += [Path(p) / "bin" for p in spec.submodule_search_locations or ()] if spec else []
    for folder in folders:
        if (folder / "cuobjdump").is_file() and (folder / "nvdisasm").is_file():
            return folder / "cuobjdump"
    return None


def examine(file: Path, cuobjdump: Path) -> list[tuple[Kernel, list[str]]]:
    """Each kernel of a library or object file and its faults. Its parts are disassembled side by side."""

    def run(tool: str, *options: str, folder: Path) -> str:
        command = [str(cuobjdump.with_name(tool)), *options]
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout

    def faults(cubin: Path) -> list[tuple[Kernel, list[str]]]:
        sass = dict(parse_sass(run("nvdisasm", "--print-code", cubin.name, folder=cubin.parent)))
        kernels = parse_resources(run("cuobjdump", "--dump-resource-usage", cubin.name, folder=cubin.parent))
        arch = cubin.suffixes[-2].removeprefix(".")  # NAME.3.sm_90.cubin
        kernels = [k._replace(arch=arch) for k in kernels]
        return [(k, faults_of(k, sass[k.name])) for k in kernels]

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        run("cuobjdump", "--extract-elf", "all", str(file.resolve()), folder=Path(folder))
        cubins = sorted(Path(folder).iterdir(), key=lambda p: -p.stat().st_size)
        return sorted(chain.from_iterable(pool.map(faults, cubins)))


def missing_instructions(kernel: Kernel, sass: str) -> list[str]:
    """Patterns that the kernel should match and does not."""
    expected = [e for e in EXPECTATIONS if re.search(e.kernel, kernel.name) and re.match(e.arch, kernel.arch)]
    wanted = [p for e in expected for p in e.instructions]
    return [p for p in wanted if not re.search(p, sass)]


def faults_of(kernel: Kernel, sass: str) -> list[str]:
    """What is wrong with a kernel; empty if nothing is."""
    faults = []
    if kernel.local or " LDL" in sass or " STL" in sass:
        faults.append(f"local memory ({kernel.stack + kernel.local} bytes a thread)")
    faults += [f"no {p}" for p in missing_instructions(kernel, sass)]
    return faults


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--cuobjdump",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=find_cuobjdump,
    help="The disassembler. [default: that on the PATH, of the toolkit or of its package]",
)
@click.option("--all/--faulty", "every", default=True, help="List all kernels, or only those with a fault.")
def main(files: tuple[Path, ...], cuobjdump: Path | None, every: bool) -> None:
    """Lists registers, shared memory and faults of the CUDA kernels in FILES."""
    if cuobjdump is None:
        raise click.ClickException(
            "cuobjdump and nvdisasm are not there: they come with the CUDA toolkit, and with pip install "
            "nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
        )
    table = Table("arch", "kernel", "registers", "shared", "fault")
    examined = [result for file in files for result in examine(file, cuobjdump)]
    for kernel, faults in examined:
        if every or faults:
            table.add_row(
                kernel.arch, short_name(kernel.name), str(kernel.registers), str(kernel.shared), ", ".join(faults)
            )
    faulty = sum(bool(faults) for _, faults in examined)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    console.print(f"{len(examined)} kernels, {faulty} with a fault")
    if not examined:
        raise click.ClickException("there is no CUDA code in these files")
    sys.exit(1 if faulty else 0)


if __name__ == "__main__":
    main()
