#!/bin/sh
# What only a GPU can show: that the CUDA side computes the right thing there, and how fast. No network.
#
#     tools/gpu_check.sh [folder for the figures, default: benchmarks]      about seven minutes
#     tools/gpu_check.sh --dry-run [folder]      anywhere, tiny, on the CPU: only tries the scripts out
#
# PYTHON names the interpreter (default: python3); it needs what `pip install .` installs, pytest and hypothesis.
# A part that fails does not stop the others; the exit status says whether any did.
set -u
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
DRY=
if [ "${1:-}" = --dry-run ]; then
    DRY=--dry-run
    export TRITON_INTERPRET=1
    shift
fi
OUT=${1:-benchmarks}
export PYTHONPATH=. PYTHONUNBUFFERED=1
mkdir -p "$OUT"
failed=

part() {
    echo "== $1"
    shift
    timeout 240 "$@" || failed="$failed [$*: exit $?]"
}

if [ -z "$DRY" ]; then
    part "kernels: every function against the reference" "$PYTHON" -m pytest -q tests/test_triton_kernels.py
fi
part "kernels: attention at a small size" "$PYTHON" tools/gpu_check_kernels.py --small $DRY
if [ -n "$DRY" ]; then
    echo "== a dry run: memory accesses are not checked"
elif command -v compute-sanitizer >/dev/null; then
    # Without torch's allocator each tensor is an allocation of its own: a read past its end is seen.
    part "kernels: the same, every memory access checked" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
        compute-sanitizer --tool memcheck --error-exitcode 9 "$PYTHON" tools/gpu_check_kernels.py --small
else
    echo "== compute-sanitizer is not here: memory accesses are not checked"
fi
part "kernels: at real sizes, and figures" "$PYTHON" tools/gpu_check_kernels.py --json "$OUT/gpu_kernels.json" $DRY
part "engine: the same ids, and figures" "$PYTHON" tools/gpu_check_engine.py --json "$OUT/gpu_engine.json" $DRY

if [ -n "$failed" ]; then
    echo "failed:$failed"
    exit 1
fi
echo "all parts passed"
