"""scripts/check_kernels.py: what it reads out of cuobjdump's output, and what it calls a fault."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from ortplugins import native
from ortplugins.register import get_library_path

_SPEC = importlib.util.spec_from_file_location("check_kernels", Path(__file__).parents[1] / "scripts/check_kernels.py")
check_kernels = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(check_kernels)

RESOURCES = """
Fatbin elf code:
================
arch = sm_80
code version = [1,8]

Resource usage:
 Common:
  GLOBAL:0
 Function softmax_warp_per_row_kernel:
  REG:40 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:740 TEXTURE:0 SURFACE:0 SAMPLER:0

Fatbin elf code:
================
arch = sm_90

Resource usage:
 Function gemm_mma_kernel:
  REG:255 STACK:16 SHARED:0 LOCAL:0 CONSTANT[0]:740 TEXTURE:0 SURFACE:0 SAMPLER:0
"""

SASS = """
	.target	sm_90

//--------------------- .text.softmax_warp_per_row_kernel --------------------------
	.section	.text.softmax_warp_per_row_kernel,"ax",@progbits
.text.softmax_warp_per_row_kernel:
        /*0010*/                   LDG.E.128.CONSTANT R4, [R2.64] ;
        /*0020*/                   MUFU.EX2 R4, R4 ;
        /*0030*/                   STG.E.128 [R2.64], R4 ;

//--------------------- .text.gemm_mma_kernel --------------------------
	.section	.text.gemm_mma_kernel,"ax",@progbits
.text.gemm_mma_kernel:
        /*0010*/              @!P0 STL [R1], R4 ;
        /*0020*/                   HMMA.16816.F32 R4, R4, R6, R4 ;
"""


def test_reads_every_kernel_of_every_architecture() -> None:
    kernels = list(check_kernels.parse_resources(RESOURCES))
    assert kernels == [
        check_kernels.Kernel("sm_80", "softmax_warp_per_row_kernel", 40, 0, 1024, 0),
        check_kernels.Kernel("sm_90", "gemm_mma_kernel", 255, 16, 0, 0),
    ]
    assert [name for name, _ in check_kernels.parse_sass(SASS)] == [k.name for k in kernels]


def test_finds_spills_and_missing_instructions() -> None:
    bodies = [body for _, body in check_kernels.parse_sass(SASS)]
    kernels = check_kernels.parse_resources(RESOURCES)
    faults = [check_kernels.faults_of(kernel, body) for kernel, body in zip(kernels, bodies, strict=True)]
    assert faults == [[], ["local memory (16 bytes a thread)", r"no LDGSTS\.E\.\S*128"]]


@pytest.mark.parametrize("store", ["STG.E", "STG.E.64"])
def test_element_wise_stores_are_a_fault(store: str) -> None:
    kernel = check_kernels.Kernel("sm_90", "softmax_block_registers_kernel", 40, 0, 0, 0)
    sass = f"LDG.E.128 R4, [R2] ;\nMUFU.EX2 R4, R4 ;\n{store} [R2], R4 ;"
    assert check_kernels.faults_of(kernel, sass) == [r"no STG\.E\.128"]


def test_kernels_of_this_build() -> None:
    """What `scripts/check_kernels.py` says of the library, for the newest architecture in it, which the kernels are tuned
    for: no spills, and the instructions meant."""
    if not native.with_cuda:
        pytest.skip("the library was built without CUDA")
    cuobjdump = check_kernels.find_cuobjdump()
    if cuobjdump is None:
        pytest.skip("cuobjdump and nvdisasm are not installed")
    examined = check_kernels.examine(Path(get_library_path()), cuobjdump)
    assert len(examined) > 50
    capability = {k.arch: int(k.arch.strip("sm_af")) for k, _ in examined}
    of_newest = [(k, faults) for k, faults in examined if capability[k.arch] == max(capability.values())]
    assert [(k.arch, check_kernels.short_name(k.name), *faults) for k, faults in of_newest if faults] == []
