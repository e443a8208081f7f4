#!/usr/bin/env bash
# Everything that needs a GPU, in one command and within nine minutes:
#
#   benchmarks/gpu/run.sh                        all parts on the GPU
#   benchmarks/gpu/run.sh attention loss         some of them
#   benchmarks/gpu/run.sh --device cpu           rehearsal with tiny sizes on a machine without one
#
# PYTHON   the interpreter (python3); only torch >= 2.11 has to be installed in it
# WHEELS   a folder of wheels with what else the package needs, installed for this run only
# OUT      where the result files go (benchmarks/results/gpu; a rehearsal's: build/gpu_rehearsal)
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
PYTHON="${PYTHON:-python3}"
export PYTHONUNBUFFERED=1

usage() {
  sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
}

device=cuda
parts=()
while [[ $# -gt 0 ]]; do
  case "$1" in
    --device) device="${2:?--device needs cuda or cpu}"; shift 2 ;;
    --device=*) device="${1#*=}"; shift ;;
    -h | --help) usage; exit 0 ;;
    attention | documents | recipe | loss | throughput | memory) parts+=("$1"); shift ;;
    *) echo "error: $1 is neither a part (attention documents recipe loss throughput memory) nor --device" >&2; exit 2 ;;
  esac
done
[[ "$device" == cuda || "$device" == cpu ]] || { echo "error: --device is cuda or cpu" >&2; exit 2; }
[[ ${#parts[@]} -gt 0 ]] || parts=(attention documents recipe loss throughput memory)

# Seconds for each part: 540 in all. A rehearsal may share its machine with anything: thrice that.
limit() {
  local seconds=120
  case "$1" in
    recipe) seconds=150 ;;
    throughput) seconds=80 ;;
    memory) seconds=100 ;;
    loss | documents) seconds=45 ;;
  esac
  [[ "$device" == cuda ]] || seconds=$((3 * seconds))
  echo "$seconds"
}

if [[ "$device" == cuda ]]; then
  OUT="${OUT:-$ROOT/benchmarks/results/gpu}"
else
  OUT="${OUT:-$ROOT/build/gpu_rehearsal}"
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # tiny tensors: threads would only wait for each other
fi
mkdir -p "$OUT"
OUT="$(cd "$OUT" && pwd)" # a relative one is meant from the caller's folder
export OUT
SITE="$(mktemp -d)"
trap 'rm -rf "$SITE"' EXIT
if [[ -n "${WHEELS:-}" ]]; then
  "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \
    --target "$SITE" "$WHEELS"/*.whl
fi
export PYTHONPATH="$ROOT:$SITE${PYTHONPATH:+:$PYTHONPATH}"
cd "$ROOT"

if [[ "$device" == cuda ]]; then
  "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
    echo "error: $PYTHON has no torch that sees a CUDA device; --device cpu rehearses" >&2
    exit 2
  }
fi

prefix=""
[[ "$device" == cuda ]] || prefix="rehearsal_"
failed=()
for part in "${parts[@]}"; do
  echo "== $part (device $device, at most $(limit "$part") s)"
  # A part that dies before it could write must not leave an earlier run's result in its place.
  rm -f "$OUT/$prefix$part.json"
  code=0
  timeout --kill-after=5 "$(limit "$part")" \
    "$PYTHON" -m benchmarks.gpu.checks "$part" --device "$device" || code=$?
  # At its limit a part may have finished and only be slow to exit: its file then says so.
  if [[ $code -eq 124 || $code -eq 137 ]] && grep -qs '^ "status": "' "$OUT/$prefix$part.json" &&
    ! grep -qs '^ "status": "failed"' "$OUT/$prefix$part.json"; then
    code=0
  fi
  if [[ $code -ne 0 ]]; then
    failed+=("$part (exit code $code$([[ $code -eq 124 ]] && echo ": time limit"))")
    [[ -e "$OUT/$prefix$part.json" ]] || printf \
      '{"part": "%s", "rehearsal": %s, "status": "failed", "error": "exit code %d before the first result"}\n' \
      "$part" "$([[ "$device" == cuda ]] && echo false || echo true)" "$code" >"$OUT/$prefix$part.json"
  fi
done

[[ "$device" == cuda ]] || echo "REHEARSAL on the CPU: no figure in $OUT/rehearsal_*.json is a GPU's."
if [[ ${#failed[@]} -gt 0 ]]; then
  printf 'FAILED: %s\n' "${failed[@]}"
  exit 1
fi
echo "no part failed; results in $OUT"
