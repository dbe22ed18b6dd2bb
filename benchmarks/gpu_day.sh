#!/usr/bin/env bash
# The first minutes on a GPU, on a machine without a network: one command, nine minutes at most after installing.
#
#   python benchmarks/gpu_pack.py                       # where there is a network: makes .gpu/, which travels along
#   bash benchmarks/gpu_day.sh                          # on the machine with the GPU: all phases
#   bash benchmarks/gpu_day.sh rows=300 experts         # these alone, one of them with another limit in seconds
#   CARD=24 bash benchmarks/gpu_day.sh                  # for a card of 24 GB
#   DEVICE=cpu TINY=1 bash benchmarks/gpu_day.sh        # a rehearsal on small models, which measures nothing
#
# Phases come in the order of their worth. Each has a limit in seconds and leaves what it learns in $OUT as soon as it
# is known, so that a run that is cut off leaves everything up to there. Seconds that a phase does not use are the next
# one's; the sum of the limits is the limit of everything. It ends with 0 if every phase did, else with 1.
#
#   OUT     a folder for the results: gpu-out; eight files, all of them text
#   WHEELS  the folder that gpu_pack.py made: .gpu/wheels
#   SITE    where they are installed; `none`: LEMA and what it needs are there already
#   DEVICE  LEMA's name for the device: cuda
#   CARD    the card's memory in GB, of which the caps follow: 80, or 24
#   HOST_MEMORY  GB of host memory that there may be; the machine is asked otherwise
#   TESTS   options and files for gpu_tests.py, if others than those marked `cuda` are to run
#   PYTHON  python3
set -u -o pipefail

here=$(cd "$(dirname "$0")" && pwd)
top=$(dirname "$here")
OUT=${OUT:-gpu-out}
WHEELS=${WHEELS:-$top/.gpu/wheels}
SITE=${SITE:-/tmp/lema-site}
DEVICE=${DEVICE:-cuda}
CARD=${CARD:-80}
PYTHON=${PYTHON:-python3}
tiny=${TINY:+--tiny}
spare=8 # seconds before its limit, at which a phase that keeps the time itself ends

all=(machine=30 align=35 tests=75 prove=45 rows=185 oss=95 experts=75)
most=540

case $CARD in
    80) row_caps=(8B/lema@4 8B/lema@8) cap=24 ;;
    24) row_caps=(8B/lema@4 8B/lema@8) cap=20 ;;
    *) echo "CARD=$CARD: there are plans for cards of 80 and of 24 GB" >&2; exit 2 ;;
esac

phases=()
sum=0
for wanted in "${@:-${all[@]}}"; do
    known=no
    for phase in "${all[@]}"; do
        [ "${wanted%%=*}" = "${phase%%=*}" ] || continue
        known=yes
        [[ $wanted == *=* ]] || wanted=$phase
    done
    if [ $known = no ]; then
        echo "there is no phase ${wanted%%=*}: there are ${all[*]}" >&2
        exit 2
    fi
    phases+=("$wanted")
    sum=$((sum + ${wanted#*=}))
done
if [ $sum -gt $most ]; then
    echo "the limits add up to $sum seconds, more than $most: name fewer phases, or give them less" >&2
    exit 2
fi

mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
begin=$SECONDS
failed=0

# The text of everything, for a reader, and what became of each phase, for a program.
say() { echo "[$((SECONDS - begin)) s] $*" | tee -a "$OUT/day.log"; }
note() { echo "$1" >>"$OUT/phases.jsonl"; }

if [ "$SITE" != none ]; then
    if ! ls "$WHEELS"/lema-*.whl >/dev/null 2>&1; then
        echo "there are no wheels in $WHEELS: run 'python benchmarks/gpu_pack.py' where there is a network," >&2
        echo "and bring the folder .gpu along; or say SITE=none, if LEMA is installed here" >&2
        exit 2
    fi
    rm -rf "$SITE"
    $PYTHON -m pip install --quiet --no-index --no-deps --no-compile --target "$SITE" "$WHEELS"/*.whl || exit 2
    # The checkout's own code runs; its wheel, which may be older, says which backends and commands there are.
    export PYTHONPATH=$top:$top/backends:$top/tools:$SITE${PYTHONPATH:+:$PYTHONPATH}
    say "installed $(find "$WHEELS" -name '*.whl' | wc -l) wheels"
fi
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false

# Runs a command within the limit of a phase, in a process group of its own that ends with it.
phase() {
    local name=$1 limit=$2 seconds code
    shift 2
    seconds=$SECONDS
    say "$name: $limit s at most"
    note "{\"phase\": \"$name\", \"begun\": $((seconds - begin)), \"limit\": $limit}"
    timeout -k 5 "$limit" "$@" 2>&1 | tee -a "$OUT/day.log"
    code=${PIPESTATUS[0]}
    [ "$code" = 0 ] || failed=1
    note "{\"phase\": \"$name\", \"ended\": $((SECONDS - begin)), \"exit\": $code, \"cut\": $([ "$code" = 124 ] || [ "$code" = 137 ] && echo true || echo false)}"
    say "$name: exit $code after $((SECONDS - seconds)) s"
}

run() {
    local name=$1 limit=$2 inside
    inside=$((limit > 2 * spare ? limit - spare : (limit + 1) / 2))
    case $name in
        machine)
            phase machine "$limit" "$PYTHON" "$here/gpu_card.py" --device "$DEVICE" $tiny --out "$OUT/card.jsonl"
            ;;
        align)
            phase align "$limit" "$PYTHON" "$here/gpu_align.py" --device "$DEVICE" $tiny --out "$OUT/card.jsonl"
            ;;
        tests)
            phase tests "$limit" "$PYTHON" "$here/gpu_tests.py" --out "$OUT/tests.jsonl" ${TESTS:-}
            ;;
        prove)
            phase prove "$limit" "$PYTHON" -m lema prove --device "$DEVICE" --output "$OUT/prove" \
                ${TINY:+--steps 1 --micro-batches 1 --tokens 16}
            ;;
        rows)
            phase rows "$limit" "$PYTHON" "$here/gpu.py" --device "$DEVICE" $tiny --rows-only --models 8B \
                --only "${row_caps[@]}" --micro-batches 16 4 --seconds "$inside" --resume \
                ${HOST_MEMORY:+--host-memory "$HOST_MEMORY"} --out "$OUT/gpu.json"
            ;;
        oss)
            phase oss "$limit" "$PYTHON" "$here/gpu_experts.py" gpt-oss-120b:16 gpt-oss-120b:4 --device "$DEVICE" $tiny \
                --cap $cap --seconds "$inside" --out "$OUT/experts.jsonl"
            ;;
        experts)
            phase experts "$limit" "$PYTHON" "$here/gpu_experts.py" Qwen3-30B-A3B:8 Qwen3-30B-A3B:1 --device "$DEVICE" \
                $tiny --cap $cap --seconds "$inside" --out "$OUT/experts.jsonl"
            ;;
    esac
}

until=$SECONDS
for wanted in "${phases[@]}"; do
    until=$((until + ${wanted#*=}))
    left=$((until - SECONDS))
    [ $left -gt 0 ] && run "${wanted%%=*}" "$left"
done
say "all: exit $failed; $OUT has $(cd "$OUT" && echo *)"
exit $failed
