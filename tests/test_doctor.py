"""The doctor: every mismatch it knows, on made-up machines, and its findings on this one."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace

import pytest

from ortplugins import doctor
from ortplugins.doctor import Facts, Gpu, Library, diagnose
from test_cli import run

HEALTHY = Facts(
    distributions={"onnxruntime-gpu": "1.31.1"},
    ort_version="1.31.1",
    ort_providers=["CUDAExecutionProvider", "CPUExecutionProvider"],
    libraries=[Library("libortplugins_onnxruntime.so", True), Library("_native", True)],
    cpu_isa="avx512",
    with_cuda=True,
    build_cuda="13.0.88",
    build_sms=[80, 90],
    driver="580.65.06",
    driver_cuda=13000,
    gpus=[Gpu("NVIDIA H200", 90, 141 << 30)],
    toolkit="13.0",
)


def statuses(facts: Facts) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for f in diagnose(facts):
        found.setdefault(f.status, []).append(f"{f.what}: {f.found}; {f.advice}")
    return found


def test_healthy_machine():
    assert set(statuses(HEALTHY)) == {"ok"}


def test_cpu_only_machine_is_healthy():
    facts = replace(
        HEALTHY,
        distributions={"onnxruntime": "1.32.0"},
        ort_version="1.32.0",
        ort_providers=["CPUExecutionProvider"],
        with_cuda=False,
        build_cuda=None,
        build_sms=[],
        driver=None,
        driver_cuda=None,
        gpus=[],
        toolkit=None,
    )
    found = statuses(facts)
    assert set(found) == {"ok", "note"}
    assert any("everything runs on the CPU" in line for line in found["note"])


@pytest.mark.parametrize(
    "status, words, changes",
    [
        ("fail", "needs 1.21 or newer", {"ort_version": "1.20.1"}),
        ("fail", "cannot be imported: no module", {"ort_version": None, "ort_error": "no module"}),
        ("note", "newer than 1.32", {"ort_version": "1.33.0"}),
        ("fail", "installed together", {"distributions": {"onnxruntime": "1.32.0", "onnxruntime-gpu": "1.31.1"}}),
        (
            "fail",
            "does not load: undefined symbol",
            {
                "libraries": [
                    Library("libortplugins_onnxruntime.so", True, "undefined symbol"),
                    Library("_native", True),
                ]
            },
        ),
        ("fail", "not in", {"libraries": [Library("libortplugins_onnxruntime.so", False), Library("_native", True)]}),
        ("fail", "op on CPU: boom", {"op_error": "boom"}),
        ("fail", "Linux on x86_64", {"machine": "aarch64"}),
        ("fail", "built with CUDA 13.0.88: update the driver", {"driver_cuda": 12080, "toolkit": None}),
        ("warn", "will not run on this driver, which knows CUDA 12.8", {"driver_cuda": 12080, "build_cuda": "12.6.20"}),
        ("fail", "check the driver", {"driver_error": "cuInit gives error 999", "gpus": []}),
        ("note", "none visible", {"gpus": []}),
        ("fail", "need 8.0 or newer", {"gpus": [Gpu("Tesla V100", 70, 16 << 30)]}),
        ("note", "translated from PTX", {"gpus": [Gpu("NVIDIA B200", 100, 180 << 30)]}),
        (
            "fail",
            "too old to translate",
            {"gpus": [Gpu("NVIDIA B200", 100, 180 << 30)], "driver_cuda": 13000, "build_cuda": "13.1.0"},
        ),
        ("fail", "no code for it", {"gpus": [Gpu("NVIDIA A100", 80, 80 << 30)], "build_sms": [90]}),
        ("warn", "this build has none", {"with_cuda": False, "build_cuda": None, "build_sms": []}),
        ("warn", "pip install onnxruntime-gpu", {"ort_providers": ["CPUExecutionProvider"]}),
        ("fail", "libcudnn.so.9", {"cuda_provider_error": "libcudnn.so.9: cannot open shared object file"}),
    ],
)
def test_mismatch_is_named(status, words, changes):
    found = statuses(replace(HEALTHY, **changes))
    assert any(words in line for line in found.get(status, [])), found
    assert status == "fail" or "fail" not in found


def test_related_gpu_of_the_same_generation_is_fine():
    assert set(statuses(replace(HEALTHY, gpus=[Gpu("NVIDIA L40S", 89, 48 << 30)]))) == {"ok"}


def test_this_machine(tmp_path):
    path = tmp_path / "doctor.json"
    status, output = run("doctor", "--json", path)
    findings = json.loads(path.read_text())
    by_name = {f["what"]: f for f in findings}
    assert (
        by_name["libortplugins_onnxruntime.so"]["status"]
        == by_name["_native"]["status"]
        == by_name["op on CPU"]["status"]
        == "ok"
    )
    assert status == (1 if any(f["status"] == "fail" for f in findings) else 0)
    assert "FusedSoftmax runs and is right" in output


def test_missing_library_is_found_and_fails(monkeypatch, tmp_path):
    for module in (
        doctor,
        importlib.import_module("ortplugins.build_info"),
        importlib.import_module("ortplugins.register"),
    ):
        monkeypatch.setattr(module, "LIBRARY_FOLDER", tmp_path)
    status, output = run("doctor")
    assert status == 1 and "to mend" in output


def test_broken_library_is_tried_in_another_process(monkeypatch, tmp_path):
    (tmp_path / "libortplugins_onnxruntime.so").write_bytes(b"\x7fELF nonsense")
    monkeypatch.setattr(doctor, "LIBRARY_FOLDER", tmp_path)
    library = doctor.collect().libraries[0]
    assert library.exists and library.error
