#!/usr/bin/env bash
# FedDP in FLARE's POC mode on this machine: environment, synthetic sites, four hospitals with certificates, both stages, table.
#   poc/run.sh [--data ROOT | --sites N] [--rounds T] [--calibration-epochs E] [--out DIR]
set -euo pipefail
data="" sites="" rounds=15 epochs=5 out="runs/poc-$(date +%Y%m%d-%H%M%S)"
while [ $# -gt 0 ]; do
    [ $# -ge 2 ] || { sed -n '2,3s/^# *//p' "$0" >&2; exit 2; }
    case $1 in
        --data) data=$(realpath -m "$2") ;;
        --sites) sites=$2 ;;
        --rounds) rounds=$2 ;;
        --calibration-epochs) epochs=$2 ;;
        --out) out=$(realpath -m "$2") ;;
        *) sed -n '2,3s/^# *//p' "$0" >&2; exit 2 ;;
    esac
    shift 2
done
if [ -n "$data" ] && [ -n "$sites" ]; then
    echo "--sites N is the number of synthetic sites; with --data ROOT, leave it out" >&2
    exit 2
fi
sites=${sites:-4}
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
if [ -z "$data" ]; then
    data="data/synthetic-$sites"
    if [ ! -e "$data.whole" ]; then # an interrupted run may have left some sites
        rm -rf "$data"
        feddp data synthesize --out "$data" --sites "$sites"
        touch "$data.whole"
    fi
fi
feddp run --method feddp --env poc --data "$data" --out "$out" --rounds "$rounds" --calibration-epochs "$epochs"
echo "Results, tables and every site's own network: $out"
