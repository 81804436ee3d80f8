#!/bin/bash
# What only a GPU can show: that the CUDA side computes the right thing there, and how fast. No network.
#
#     tools/gpu_check.sh [folder for the figures, default: benchmarks]      seven minutes, never more than eight
#     tools/gpu_check.sh --dry-run [folder]      anywhere, tiny, on the CPU: only tries the scripts out
#
# PYTHON names the interpreter (default: python3); it needs what `pip install .` installs, pytest and hypothesis.
# First what is right, all at once, because most of that is compiling; then what is fast, one after the other. A part that
# fails does not stop the others; the exit status says whether any did. The folder gets the output, too: gpu_check.log.
set -u -o pipefail
cd "$(dirname "$0")/.."
LIMIT=470  # seconds for all of it
PYTHON=${PYTHON:-python3}
DRY=
if [ "${1:-}" = --dry-run ]; then
    DRY=--dry-run
    export TRITON_INTERPRET=1
    shift
fi
OUT=${1:-benchmarks}
export PYTHONPATH=. PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
LOGS=$(mktemp -d)
trap 'rm -rf "$LOGS"' EXIT
trap 'trap - INT TERM; kill 0' INT TERM  # what runs in the background, too

# limited SECONDS COMMAND: stops it after so many seconds, or when the time for all is over
limited() {
    local most=$1 left=$((LIMIT - SECONDS))
    shift
    if [ "$left" -lt 1 ]; then
        echo "no time is left for it"
        return 1
    fi
    timeout --foreground -k 10 "$((left < most ? left : most))" "$@"
}

# Every memory access checked. Without torch's allocator each tensor is an allocation of its own: a read past its end is
# seen. (Errors of the API are asked for by libraries that look for what a driver can do.)
sanitizer() {
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 limited 200 compute-sanitizer --tool memcheck --report-api-errors no \
        --error-exitcode 9 "$PYTHON" tools/gpu_check_kernels.py --small >"$LOGS/memcheck" 2>&1
    local status=$?
    cat "$LOGS/memcheck"
    if grep -q "Device not supported" "$LOGS/memcheck"; then
        echo "compute-sanitizer does not know this machine: memory accesses are not checked"
        return 0
    fi
    if [ "$status" = 124 ] && ! grep -q "^========= .*\(Invalid\|Misaligned\|Program hit\)" "$LOGS/memcheck"; then
        echo "compute-sanitizer has found no fault as far as it came in its time"
        return 0
    fi
    return $status
}

names=()
beside() {  # beside NAME COMMAND: in the background
    local name=$1
    shift
    names+=("$name")
    { "$@" >"$LOGS/$name" 2>&1; echo $? >"$LOGS/$name.status"; } &
}

main() {
    local failed=
    if [ -z "$DRY" ]; then
        beside "kernels against the reference" limited 240 "$PYTHON" -m pytest -q tests/test_triton_kernels.py
        if command -v compute-sanitizer >/dev/null; then
            beside "memory accesses of attention" sanitizer
        else
            echo "== compute-sanitizer is not here: memory accesses are not checked"
        fi
    fi
    beside "attention at a small size" limited 240 "$PYTHON" tools/gpu_check_kernels.py --small $DRY
    beside "the engine's ids" limited 240 "$PYTHON" tools/gpu_check_engine.py --part right $DRY
    wait
    for name in "${names[@]}"; do
        echo "== $name"
        cat "$LOGS/$name"
        [ "$(cat "$LOGS/$name.status")" = 0 ] || failed="$failed [$name]"
    done
    echo "== kernels at real sizes, and figures ($SECONDS s)"
    limited 180 "$PYTHON" tools/gpu_check_kernels.py --json "$OUT/gpu_kernels.json" $DRY || failed="$failed [kernel figures]"
    echo "== the engine's figures ($SECONDS s)"
    limited 400 "$PYTHON" tools/gpu_check_engine.py --part fast --json "$OUT/gpu_engine.json" $DRY ||
        failed="$failed [engine figures]"
    echo "== transformers on the same work ($SECONDS s)"
    limited 150 "$PYTHON" tools/gpu_check_engine.py --part peers --json "$OUT/gpu_peers.json" $DRY ||
        echo "it has not ended well, which is no failure of ours"
    if [ -n "$failed" ]; then
        echo "failed after $SECONDS s:$failed"
        return 1
    fi
    echo "all parts passed in $SECONDS s"
}

mkdir -p "$OUT"
main 2>&1 | tee "$OUT/gpu_check.log"
