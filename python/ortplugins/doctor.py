"""What is installed, what works together, and which mismatch would bite.

Facts are collected by :func:`collect`; :func:`diagnose` only reads them, so that every mismatch can be tested anywhere.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from . import __version__
from .build_info import build_info
from .errors import OrtPluginsError
from .register import LIBRARY_FOLDER, MINIMUM_ONNXRUNTIME
from .session import PROVIDERS

NEWEST_TESTED_ONNXRUNTIME = (1, 32)
MINIMUM_SM = 80


@dataclass
class Gpu:
    """One CUDA device. ``sm`` is 10 * major + minor of its compute capability."""

    name: str
    sm: int
    memory_bytes: int


@dataclass
class Library:
    """A shared library of the package and why it does not load, if it does not."""

    name: str
    exists: bool
    error: str | None = None


@dataclass
class Facts:
    """What was found. CUDA versions are numbers such as 13000 for 13.0; None means that there is none."""

    system: str = "Linux"
    machine: str = "x86_64"
    distributions: dict[str, str] = field(default_factory=dict)  # installed ONNX Runtime packages and their versions
    ort_version: str | None = None
    ort_error: str | None = None
    ort_providers: list[str] = field(default_factory=list)
    libraries: list[Library] = field(default_factory=list)
    op_error: str | None = None  # why an op of ours does not run on the CPU
    cpu_isa: str | None = None
    with_cuda: bool = False
    build_cuda: str | None = None  # toolkit that built the library
    build_sms: list[int] = field(default_factory=list)
    driver: str | None = None
    driver_cuda: int | None = None
    driver_error: str | None = None
    gpus: list[Gpu] = field(default_factory=list)
    toolkit: str | None = None
    cuda_provider_error: str | None = None  # why a session on the CUDA provider fails


@dataclass
class Finding:
    """One line of the diagnosis. ``status``: ok, note (fine as it is), warn (something is lost), fail (broken)."""

    what: str
    status: str
    found: str
    advice: str = ""


def collect() -> Facts:
    """Looks at this machine. Nothing that it finds missing raises; libraries are tried in a process of their own."""
    info = build_info()
    facts = Facts(system=platform.system(), machine=platform.machine(), build_cuda=info.get("cuda"))
    facts.build_sms = sorted({int(sm) for sm in re.findall(r"\d+", " ".join(info.get("cuda_architectures", [])))})
    for name in ("onnxruntime", "onnxruntime-gpu"):
        try:
            facts.distributions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    try:
        import onnxruntime

        facts.ort_version = onnxruntime.__version__
        facts.ort_providers = onnxruntime.get_available_providers()
    except Exception as error:
        facts.ort_error = str(error)
    for name in ("libortplugins_onnxruntime.so", "libortplugins_tensorrt.so"):
        path = LIBRARY_FOLDER / name
        if path.is_file() or name == "libortplugins_onnxruntime.so":
            facts.libraries.append(Library(name, path.is_file(), _load_error(path) if path.is_file() else None))
    try:
        from . import native

        facts.libraries.append(Library("_native", True))
        facts.cpu_isa, facts.with_cuda = native.cpu_isa(), native.with_cuda
    except ImportError as error:
        facts.libraries.append(Library("_native", True, str(error)))
    if facts.ort_version is not None and facts.libraries[0].exists:
        facts.op_error = _try_op("cpu")
    _ask_driver(facts)
    facts.toolkit = _toolkit_version()
    if facts.gpus and PROVIDERS["cuda"] in facts.ort_providers:
        facts.cuda_provider_error = _try_op("cuda")
    return facts


def _load_error(path: Path) -> str | None:
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
    result = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    if result.returncode == 0:
        return None
    return _last_line(result)


def _last_line(result: subprocess.CompletedProcess[str]) -> str:
    line = result.stderr.strip().rpartition("\n")[2]
    return re.sub(r"^[\w.]*(Error|Exception): ", "", line) or f"the process ended with status {result.returncode}"


def _try_op(provider: str) -> str | None:
    """Why one small softmax of ours does not run on ``provider``, or None."""
    code = f"from ortplugins.doctor import run_one_op; run_one_op({provider!r})"
    # The child must find the package where this process found it.
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    if result.returncode == 0:
        return None
    return _last_line(result)


def run_one_op(provider: str) -> None:
    """Runs a softmax of ours on ``provider`` and checks its result."""
    import numpy as np

    from .bench.graphs import one_op_model
    from .session import make_session

    x = np.array([[1.0, 2.0, 3.0]], np.float32)
    session = make_session(one_op_model("FusedSoftmax", [x]), provider=provider)
    y = session.run(None, {"x": x})[0]
    expected = np.exp(x) / np.exp(x).sum()
    if not np.allclose(y, expected, atol=1e-6):
        raise OrtPluginsError(f"FusedSoftmax gives {y.tolist()} instead of {expected.tolist()}")


def driver_version() -> str | None:
    """Version of the NVIDIA kernel driver, such as ``580.65.06``."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return found[1] if found else None


def _ask_driver(facts: Facts) -> None:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    if error := cuda.cuInit(0):
        facts.driver_error = f"cuInit gives error {error}"
    version = ctypes.c_int()
    if cuda.cuDriverGetVersion(ctypes.byref(version)) == 0:
        facts.driver_cuda = version.value
    facts.driver = driver_version()
    count = ctypes.c_int()
    if facts.driver_error or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return
    for ordinal in range(count.value):
        device, name, nbytes = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
        major, minor = ctypes.c_int(), ctypes.c_int()
        cuda.cuDeviceGet(ctypes.byref(device), ordinal)
        cuda.cuDeviceGetName(name, 256, device)
        cuda.cuDeviceTotalMem_v2(ctypes.byref(nbytes), device)
        cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
        cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)  # ..._MINOR
        facts.gpus.append(Gpu(name.value.decode(), 10 * major.value + minor.value, nbytes.value))


def _toolkit_version() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")
    if nvcc is None:
        return None
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"release (\d+\.\d+)", text)
    return found[1] if found else None


def diagnose(facts: Facts) -> list[Finding]:
    """The findings for ``facts``, in the order of the table."""
    kernels = f", CPU kernels: {facts.cpu_isa}, CUDA kernels: {_built_with(facts)}" if facts.cpu_isa else ""
    findings = [Finding("ortplugins", "ok", __version__ + kernels)]
    if (facts.system, facts.machine) != ("Linux", "x86_64"):
        findings.append(
            Finding("platform", "fail", f"{facts.system} {facts.machine}", "the library is built for Linux on x86_64")
        )
    findings += _diagnose_onnxruntime(facts)
    for library in facts.libraries:
        if not library.exists:
            findings.append(
                Finding(library.name, "fail", f"not in {LIBRARY_FOLDER}", "install the package again from its source")
            )
        elif library.error:
            findings.append(
                Finding(
                    library.name, "fail", f"does not load: {library.error}", "install the package again from its source"
                )
            )
        else:
            findings.append(Finding(library.name, "ok", "loads"))
    if facts.ort_version is not None and facts.libraries and facts.libraries[0].exists:
        findings.append(
            Finding("op on CPU", "fail", facts.op_error, "this must work; see the lines above")
            if facts.op_error
            else Finding("op on CPU", "ok", "FusedSoftmax runs and is right")
        )
    findings += _diagnose_cuda(facts)
    return findings


def _built_with(facts: Facts) -> str:
    if not facts.with_cuda:
        return "none (CPU-only build)"
    return f"CUDA {facts.build_cuda or '?'}" + (
        f" for sm {', '.join(map(str, facts.build_sms))}" if facts.build_sms else ""
    )


def _diagnose_onnxruntime(facts: Facts) -> list[Finding]:
    what = "ONNX Runtime"
    if facts.ort_version is None:
        return [
            Finding(
                what,
                "fail",
                f"cannot be imported: {facts.ort_error}",
                "pip install onnxruntime, or onnxruntime-gpu for NVIDIA GPUs",
            )
        ]
    findings = []
    numbers = tuple(map(int, re.findall(r"\d+", facts.ort_version)[:2]))
    oldest, newest = (".".join(map(str, v)) for v in (MINIMUM_ONNXRUNTIME, NEWEST_TESTED_ONNXRUNTIME))
    if numbers < MINIMUM_ONNXRUNTIME:
        findings.append(Finding(what, "fail", facts.ort_version, f"ortplugins {__version__} needs {oldest} or newer"))
    elif numbers > NEWEST_TESTED_ONNXRUNTIME:
        findings.append(Finding(what, "note", facts.ort_version, f"newer than {newest}, the newest tested"))
    else:
        findings.append(Finding(what, "ok", facts.ort_version))
    if len(facts.distributions) > 1:
        both = " and ".join(f"{n} {v}" for n, v in facts.distributions.items())
        findings.append(
            Finding(
                what, "fail", f"{both} are installed together", "they overwrite each other: uninstall both, install one"
            )
        )
    short = [p.removesuffix("ExecutionProvider") for p in facts.ort_providers]
    findings.append(Finding("providers", "ok", ", ".join(short)))
    return findings


def _diagnose_cuda(facts: Facts) -> list[Finding]:
    if facts.driver_cuda is None:
        return [Finding("NVIDIA driver", "note", "none: everything runs on the CPU")] + _diagnose_toolkit(facts)
    findings = []
    version = f"{facts.driver or '?'}, up to CUDA {_dotted(facts.driver_cuda)}"
    if facts.driver_error:
        findings.append(
            Finding("NVIDIA driver", "fail", f"{version}; {facts.driver_error}", "check the driver with nvidia-smi")
        )
    elif facts.with_cuda and facts.build_cuda and facts.driver_cuda // 1000 < int(facts.build_cuda.split(".")[0]):
        findings.append(
            Finding(
                "NVIDIA driver",
                "fail",
                version,
                f"our kernels were built with CUDA {facts.build_cuda}: update the driver, "
                f"or build with a CUDA {facts.driver_cuda // 1000} toolkit",
            )
        )
    else:
        findings.append(Finding("NVIDIA driver", "ok", version))
    if not facts.gpus and not facts.driver_error:
        findings.append(Finding("GPU", "note", "none visible", "CUDA_VISIBLE_DEVICES hides GPUs"))
    for i, gpu in enumerate(facts.gpus):
        findings.append(_diagnose_gpu(f"GPU {i}", gpu, facts))
    findings += _diagnose_toolkit(facts)
    if facts.gpus:
        if not facts.with_cuda:
            findings.append(
                Finding(
                    "CUDA kernels",
                    "warn",
                    "this build has none",
                    "install the CUDA toolkit and the package again to use the GPU",
                )
            )
        if PROVIDERS["cuda"] not in facts.ort_providers:
            findings.append(
                Finding(
                    "CUDA provider",
                    "warn",
                    "ONNX Runtime has none",
                    "pip uninstall onnxruntime; pip install onnxruntime-gpu",
                )
            )
        elif facts.cuda_provider_error:
            findings.append(
                Finding(
                    "CUDA provider",
                    "fail",
                    facts.cuda_provider_error,
                    "onnxruntime-gpu needs certain versions of CUDA and cuDNN; the message names what is missing",
                )
            )
        else:
            findings.append(Finding("CUDA provider", "ok", "FusedSoftmax runs and is right"))
    return findings


def _diagnose_gpu(what: str, gpu: Gpu, facts: Facts) -> Finding:
    found = f"{gpu.name}, compute capability {gpu.sm // 10}.{gpu.sm % 10}, {gpu.memory_bytes / 2**30:.0f} GiB"
    if gpu.sm < MINIMUM_SM:
        return Finding(
            what,
            "fail",
            found,
            f"our CUDA kernels need {MINIMUM_SM // 10}.{MINIMUM_SM % 10} or newer; use the CPU provider",
        )
    if facts.build_sms and not any(sm // 10 == gpu.sm // 10 and sm <= gpu.sm for sm in facts.build_sms):
        toolkit = tuple(map(int, (facts.build_cuda or "0.0").split(".")[:2]))
        if gpu.sm < max(facts.build_sms):
            return Finding(
                what,
                "fail",
                found,
                f"this build has no code for it, only for sm {', '.join(map(str, facts.build_sms))}: "
                f"build with -DORTPLUGINS_CUDA_ARCHITECTURES={gpu.sm}",
            )
        if facts.driver_cuda is not None and facts.driver_cuda < 1000 * toolkit[0] + 10 * toolkit[1]:
            return Finding(
                what,
                "fail",
                found,
                f"this build has only PTX of CUDA {facts.build_cuda} for it, which the driver is too old to translate",
            )
        return Finding(what, "note", found, "kernels are translated from PTX at the first use, which takes a while")
    return Finding(what, "ok", found)


def _diagnose_toolkit(facts: Facts) -> list[Finding]:
    if facts.toolkit is None:
        return [Finding("CUDA toolkit", "note", "no nvcc: only needed to build CUDA kernels")]
    major = int(facts.toolkit.split(".")[0])
    if facts.driver_cuda is not None and major > facts.driver_cuda // 1000:
        return [
            Finding(
                "CUDA toolkit",
                "warn",
                facts.toolkit,
                f"what it builds will not run on this driver, which knows CUDA {_dotted(facts.driver_cuda)}",
            )
        ]
    return [Finding("CUDA toolkit", "ok", facts.toolkit)]


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
