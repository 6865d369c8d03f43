#!/usr/bin/env bash
# Everything that only a GPU can show, in under 10 minutes, on a machine with Python 3.12, torch 2.11 for CUDA 13 and no network:
#
#     benchmarks/gpu.sh WHEELS OUT
#
# WHEELS: a folder of wheels of what the machine's Python lacks; `pip download -r requirements.txt` elsewhere makes one. They are
# installed into a folder of this run. OUT: gets gpu.jsonl, a line of JSON for every figure as it is measured, and gpu.log.
# The exit code is 1 if a step failed; the others run all the same. PYTHON names another interpreter.
set -uo pipefail
wheels=$(realpath "${1:?a folder of wheels}") out=$(realpath -m "${2:?a folder for the figures}")
root=$(dirname "$(dirname "$(realpath "${BASH_SOURCE[0]}")")")
all=540 python=${PYTHON:-python3} failed=0
mkdir -p "$out"
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
export HOME="$site/home" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
if compgen -G "$wheels/*.whl" > /dev/null; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --find-links "$wheels" --target "$site/packages" "$wheels"/*.whl || exit 1
fi
export PYTHONPATH="$site/packages:$root/custom"
"$python" -c 'import torch, torchvision, timm, monai, segmentation_models_pytorch, safetensors, cryptography, scipy, rich, typer' || {
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

step 180 gpu_agree
step 100 gpu_speed
step 70 gpu_sites
left=$((all - SECONDS))
step $((left > 30 ? left : 30)) gpu_protocol --seconds $((left > 50 ? left - 20 : 30))
exit "$failed"
