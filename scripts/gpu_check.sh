#!/usr/bin/env bash
# Everything that needs a GPU, in one command: build for the GPU of this machine, run the GPU tests, compute-sanitizer, and
# benchmarks.
#
#   scripts/gpu_check.sh [STAGE ...]        stages: build kernels test ort sanitize ladder bench:ARGS run:COMMAND;
#                                           default: build kernels test ort sanitize
#
# On a machine without a network, KIT names a folder with what pip cannot fetch there:
#   *.whl              Python packages, installed beside the system's
#   ort_gpu.tar.xz     an unpacked onnxruntime-gpu package
#   ort-headers/ trt-headers/   C headers of ONNX Runtime 1.21 and TensorRT
# SANITIZE_JOBS is the number of processes of the long ones under compute-sanitizer. OUT receives logs and records, BUILD the build tree (kept between calls).
set -uo pipefail
cd "$(dirname "$0")/.."
root=$PWD
: "${KIT:=$root/.gpu}" "${OUT:=$root/build/gpu_check}" "${BUILD:=/tmp/ortplugins-build}" "${PYTHON:=python3}" "${JOBS:=$(nproc)}" "${TEST_JOBS:=8}"
site=/tmp/ortplugins-site
mkdir -p "$OUT" "$BUILD"

if compgen -G "$KIT/*.whl" >/dev/null && [ ! -d "$site" ]; then
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$KIT"/*.whl || exit 1
fi
if [ -f "$KIT/ort_gpu.tar.xz" ] && [ ! -d /tmp/ortplugins-kit ]; then
  mkdir -p /tmp/ortplugins-kit && tar xJf "$KIT/ort_gpu.tar.xz" -C /tmp/ortplugins-kit || exit 1
fi
export ORTPLUGINS_BUILD="$BUILD" PYTHONPATH="$BUILD/python:/tmp/ortplugins-kit:$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

sm=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
status=0
stage() { # NAME COMMAND...
  local name=$1 start=$SECONDS
  shift
  echo "=== $name"
  "$@" >"$OUT/$name.log" 2>&1
  local rc=$?
  echo "    $name: exit status $rc after $((SECONDS - start)) s"
  [ $rc -eq 0 ] || { status=1; tail -n "${TAIL:-40}" "$OUT/$name.log"; grep ^FAILED "$OUT/$name.log"; }
  return $rc
}

# Every test file under every tool at once, each with a log of its own and at most LIMIT seconds; the long ones in two parts, by
# the rows of Hopper and the others. More processes than a handful in a part take longer, not less: each starts under the tool.
sanitize() {
  local tool file part name rc job start jobs=()
  local -A names=()
  for tool in memcheck racecheck; do
    for file in "${kernel_tests[@]}" tests/test_ladder.py tests/test_tensorrt_host.py; do
      local parts=("") workers=0
      case $file in *gemm* | *attention*) parts=("sm90a" "not sm90a") workers=${SANITIZE_JOBS:-4} ;; esac
      for part in "${parts[@]}"; do
        name=sanitize-$tool-$(basename "$file" .py)${part:+-${part// /-}}
        timeout -k 5 "${LIMIT:-240}" compute-sanitizer --tool "$tool" --error-exitcode 9 --target-processes all \
          "$PYTHON" -m pytest -q -n "$workers" -m "gpu and small" -k "$part" -p no:cacheprovider "$file" >"$OUT/$name.log" 2>&1 &
        names[$!]=$name
        jobs+=($!)
      done
    done
  done
  echo "=== sanitize"
  start=$SECONDS
  for job in "${jobs[@]}"; do
    wait "$job"
    rc=$?
    grep -qE "SUMMARY: [1-9]" "$OUT/${names[$job]}.log" && rc=9  # of one of several processes
    echo "    ${names[$job]}: exit status $rc after at most $((SECONDS - start)) s: $(grep -E "^[0-9]+ (passed|failed|skipped)|SUMMARY" "$OUT/${names[$job]}.log" | tr '\n' ' ')"
    [ $rc -eq 0 ] || { status=1; tail -n "${TAIL:-40}" "$OUT/${names[$job]}.log"; grep ^FAILED "$OUT/${names[$job]}.log"; }
  done
}

configure_and_build() {
  local options=(-G Ninja -DORTPLUGINS_CUDA=ON -DORTPLUGINS_TESTS=ON "-DORTPLUGINS_CUDA_ARCHITECTURES=$sm-real" "-DPython_EXECUTABLE=$(command -v "$PYTHON")"
    "-Dpybind11_DIR=$("$PYTHON" -m pybind11 --cmakedir)")
  [ "$sm" = 90 ] || options+=(-DORTPLUGINS_SM90A=OFF)
  [ -d "$KIT/ort-headers" ] && options+=("-DONNXRUNTIME_INCLUDE_DIR=$KIT/ort-headers")
  [ -d "$KIT/trt-headers" ] && options+=("-DTENSORRT_INCLUDE_DIR=$KIT/trt-headers")
  cmake -S . -B "$BUILD" "${options[@]}" && cmake --build "$BUILD" -j "$JOBS" || return 1
  # A package folder of links: sources from here, libraries from the build tree.
  rm -rf "$BUILD/python" && mkdir -p "$BUILD/python/ortplugins/lib"
  for entry in "$root"/python/ortplugins/*; do
    case $(basename "$entry") in lib | _native*.so) ;; *) ln -s "$entry" "$BUILD/python/ortplugins/" ;; esac
  done
  ln -s "$BUILD"/_native*.so "$BUILD/python/ortplugins/"
  ln -s "$BUILD"/libortplugins_*.so "$BUILD/build_info.json" "$BUILD/python/ortplugins/lib/"
}

kernel_tests=(tests/test_softmax.py tests/test_gemm.py tests/test_attention.py tests/test_layer_norm.py)
stages=("$@")
[ ${#stages[@]} -gt 0 ] || stages=(build kernels test ort sanitize)
for s in "${stages[@]}"; do
  case $s in
    build) stage build configure_and_build || exit 1 ;;
    kernels) stage kernels "$PYTHON" scripts/check_kernels.py --faulty "$BUILD/libortplugins_onnxruntime.so" ;;
    test) stage test "$PYTHON" -m pytest -q --maxfail=60 -n "$TEST_JOBS" -m gpu -p no:cacheprovider "${kernel_tests[@]}" ;;
    ort) stage ort "$PYTHON" -m pytest -q --maxfail=40 -n "$TEST_JOBS" -m gpu -p no:cacheprovider tests "${kernel_tests[@]/#/--ignore=}" ;;
    sanitize) sanitize ;;
    ladder) stage ladder "$PYTHON" -m ortplugins.cli bench --ladder --json "$OUT/ladder.json" ;;
    bench:*) stage "bench-${s#bench:}" "$PYTHON" -m ortplugins.cli bench ${s#bench:} --provider cuda --json "$OUT/${s#bench:}.json" ;;
    run:*) stage "run" bash -c "${s#run:}" ;;
    *) echo "unknown stage $s" >&2; exit 2 ;;
  esac
done
exit $status
