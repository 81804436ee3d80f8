#!/bin/sh
# What only a GPU can show: that the CUDA side computes the right thing there, and how fast. No network.
#
#     tools/gpu_check.sh [folder for the figures, default: benchmarks]
#
# PYTHON names the interpreter (default: python3); it needs torch, triton, transformers, numpy, pytest, hypothesis.
# A part that fails does not stop the others; the exit status says whether any did.
set -u
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
OUT=${1:-benchmarks}
export PYTHONPATH=. PYTHONUNBUFFERED=1
mkdir -p "$OUT"
failed=

part() {
    echo "== $1"
    shift
    timeout 240 "$@" || failed="$failed [$*: exit $?]"
}

part "kernels: every function against the reference" "$PYTHON" -m pytest -q tests/test_triton_kernels.py
part "kernels: attention at a small size" "$PYTHON" tools/gpu_check_kernels.py --small
if command -v compute-sanitizer >/dev/null; then
    # Without torch's allocator each tensor is an allocation of its own: a read past its end is seen.
    part "kernels: the same, every memory access checked" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
        compute-sanitizer --tool memcheck --error-exitcode 9 "$PYTHON" tools/gpu_check_kernels.py --small
else
    echo "== compute-sanitizer is not here: memory accesses are not checked"
fi
part "kernels: at real sizes, and figures" "$PYTHON" tools/gpu_check_kernels.py --json "$OUT/gpu_kernels.json"

if [ -n "$failed" ]; then
    echo "failed:$failed"
    exit 1
fi
echo "all parts passed"
