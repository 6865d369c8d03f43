#!/usr/bin/env bash
# Everything that only a GPU can show, in under 10 minutes, on a machine with Python 3.12, torch 2.11 for CUDA 13 and no network:
#
#     benchmarks/gpu.sh WHEELS OUT
#
# WHEELS: a folder of wheels of what the machine's Python lacks beside torch, torchvision and what these need. They are installed
# into a folder of this run, in front of the machine's packages; wheels of torch and CUDA are refused, because they would hide
# the machine's own. This command, run elsewhere in a checkout, in bash and with Python 3.11 or later, makes the folder, of the
# versions in requirements.lock:
#
#     pip download --python-version 3.12 --only-binary=:all: --no-deps --dest WHEELS \
#         --constraint <(sed '/--hash/d; s/ \\$//' requirements.lock) \
#         cffi cryptography monai pycparser segmentation-models-pytorch \
#         contourpy cycler fonttools kiwisolver matplotlib pyparsing python-dateutil \
#         annotated-doc annotated-types anyio click h11 hf-xet httpcore2 httpx2 huggingface-hub idna markdown-it-py mdurl \
#         packaging psutil pydantic pydantic-core pygments pyyaml rich safetensors scipy shellingham threadpoolctl timm tqdm \
#         truststore typer typing-extensions typing-inspection
#
# The whole set has 71 MiB, 34 of them scipy. Leave out what the machine has: the first line of packages, 7 MiB, was enough on a
# lent machine, which had the others (the second line, 17 MiB, is for the report of a run). The machine's versions are then used,
# and recorded. A machine that is lent takes 64 MiB in all, which this checkout and the first line exceed: there, move docs/results
# out of the checkout for the call, which needs nothing of it, and carry the first line in .whl/, which git ignores.
#
# OUT: gets gpu.jsonl, a line of JSON for every figure as it is measured, and gpu.log. It must hold no earlier gpu.jsonl.
# The exit code is 1 if a step failed; the others run all the same. PYTHON names another interpreter.
set -uo pipefail
wheels=$(realpath "${1:?a folder of wheels}") out=$(realpath -m "${2:?a folder for the figures}")
root=$(dirname "$(dirname "$(realpath "${BASH_SOURCE[0]}")")")
all=540 python=${PYTHON:-python3} failed=0
left=90 # seconds of these for the last step, whatever the others take
if [ -e "$out/gpu.jsonl" ]; then
    echo "gpu.sh: $out holds the figures of an earlier run; name another folder" >&2
    exit 2
fi
mkdir -p "$out"
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
export HOME="$site/home" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
for wheel in "$wheels"/*.whl; do
    case ${wheel##*/} in
        torch*|nvidia*|triton*)
            echo "gpu.sh: ${wheel##*/} would hide the machine's own; remove the wheels of torch, torchvision, nvidia and triton from $wheels" >&2
            exit 2
            ;;
    esac
done
if compgen -G "$wheels/*.whl" > /dev/null; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --find-links "$wheels" --target "$site/packages" "$wheels"/*.whl || exit 1
fi
export PYTHONPATH="$site/packages:$root/custom:$root"

kept() { # shows lines, and keeps those of JSON in gpu.jsonl, the others (tables, what libraries say) in gpu.log
    local said
    while IFS= read -r said; do
        case $said in
            '{'*) printf '%s\n' "$said" | tee -a "$out/gpu.jsonl" ;;
            *) printf '%s\n' "$said" | tee -a "$out/gpu.log" ;;
        esac
    done
}

# some of the networks' and metrics' libraries are imported late
"$python" -c '
import benchmarks.gpu_agree, benchmarks.gpu_speed, benchmarks.gpu_sites, benchmarks.gpu_stages
import benchmarks.practice, benchmarks.gpu_protocol
import feddp.pages.charts, monai.metrics, segmentation_models_pytorch, timm, typer
from benchmarks.common import line, versions
line("gpu.sh", {"versions": versions()}, "cuda")' | kept || {
    echo "gpu.sh: cannot start; the error above says why. If a package is missing, put its wheel into $wheels" >&2
    exit 1
}

step() { # step SECONDS BENCHMARK OPTIONS: runs it, no longer than that, and not into the time that is left for the last step
    local seconds=$1 name=$2 code=0 possible=$((all - left - SECONDS))
    shift 2
    [ "$seconds" -le "$possible" ] || seconds=$possible
    echo "gpu.sh: $name, $SECONDS of $all s" >&2
    if [ "$seconds" -lt 15 ]; then
        code=124 # as timeout has it
    else
        timeout -s INT -k 10 "$seconds" "$python" -m feddp bench "$name" "$@" 2> >(tee -a "$out/gpu.log" >&2) | kept || code=$?
    fi
    if [ "$code" -ne 0 ]; then
        failed=1
        echo "{\"benchmark\": \"$name\", \"exit\": $code, \"after_seconds\": $SECONDS}" | kept
    fi
}

step 185 gpu_agree --processes 14
step 85 gpu_speed --seconds 1.5
step 55 practice --device cuda --size 384 --graphs # the target of the ratio is at least 4
step 50 gpu_sites --seconds 4
step 40 gpu_stages --processes 6
left=0
step $all gpu_protocol --threads 4 --graphs --seconds $((all - SECONDS - 20)) # which leaves time for its imports and its end
exit "$failed"
