#!/usr/bin/env bash
# Everything that only a GPU can show, in under 10 minutes, on a machine with Python 3.12, torch 2.11 for CUDA 13 and no network:
#
#     benchmarks/gpu.sh WHEELS OUT
#
# WHEELS: a folder of wheels of what the machine's Python lacks beside torch, torchvision and what these need. They are installed
# into a folder of this run, in front of the machine's packages; wheels of torch and CUDA are refused, because they would hide
# the machine's own. This command, run elsewhere, makes the folder (versions come from requirements.txt; none of torch):
#
#     pip download --python-version 3.12 --only-binary=:all: --no-deps --dest WHEELS --constraint requirements.txt \
#         annotated-doc annotated-types anyio cffi click cryptography h11 hf-xet httpcore2 httpx2 huggingface-hub idna \
#         markdown-it-py mdurl monai packaging psutil pycparser pydantic pydantic-core pygments pyyaml rich safetensors scipy \
#         segmentation-models-pytorch shellingham threadpoolctl timm tqdm truststore typer typing-inspection
#
# OUT: gets gpu.jsonl, a line of JSON for every figure as it is measured, and gpu.log.
# The exit code is 1 if a step failed; the others run all the same. PYTHON names another interpreter.
set -uo pipefail
wheels=$(realpath "${1:?a folder of wheels}") out=$(realpath -m "${2:?a folder for the figures}")
root=$(dirname "$(dirname "$(realpath "${BASH_SOURCE[0]}")")")
all=540 python=${PYTHON:-python3} failed=0
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
# the networks' and metrics' libraries are imported late
"$python" -c 'import benchmarks.gpu_agree, benchmarks.gpu_speed, benchmarks.gpu_sites, benchmarks.practice, benchmarks.gpu_protocol' &&
    "$python" -c 'import monai.metrics, segmentation_models_pytorch, timm, typer' || {
    echo "gpu.sh: a package is missing (above); put its wheel into $wheels" >&2
    exit 1
}

step() { # step SECONDS BENCHMARK OPTIONS: runs it, no longer than that
    local seconds=$1 name=$2 code=0
    shift 2
    echo "gpu.sh: $name, $SECONDS of $all s" >&2
    timeout -s INT -k 10 "$seconds" "$python" -m feddp bench "$name" "$@" 2> >(tee -a "$out/gpu.log" >&2) |
        tee -a "$out/gpu.jsonl" || code=$?
    if [ "$code" -ne 0 ]; then
        failed=1
        echo "{\"benchmark\": \"$name\", \"exit\": $code, \"after_seconds\": $SECONDS}" | tee -a "$out/gpu.jsonl"
    fi
}

step 180 gpu_agree --processes 8
step 100 gpu_speed
step 70 gpu_sites
step 60 practice --device cuda --size 384 # the target of the ratio is at least 4
left=$((all - SECONDS))
step $((left > 30 ? left : 30)) gpu_protocol --seconds $((left > 50 ? left - 20 : 30))
exit "$failed"
