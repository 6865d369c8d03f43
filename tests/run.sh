#!/usr/bin/env bash
# Linters, types and all tests, or with --quick the unit tests alone; other arguments go to pytest.
set -euo pipefail
# a test looks at a page in a browser, and CI runs as root on a bare machine
browser() {
    command -v chromium > /dev/null || ! command -v apt-get > /dev/null || [ "$(id -u)" != 0 ] ||
        { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends chromium; } ||
        echo "chromium was not installed; tests/integration/test_report_browser.py will fail"
}
if [ "${1:-}" != --quick ]; then
    browser >&2 &
    browser=$!
    trap wait EXIT # also where a linter ends this
fi
source "$(dirname "${BASH_SOURCE[0]}")/../poc/environment.sh"
ruff check .
ruff format --check .
linted() {
    lint-imports && mypy
}
if [ "${1:-}" = --quick ]; then
    shift
    linted
    exec python -m pytest -n 2 --dist loadfile tests/unit "$@"
fi
# one core would wait for the other while imports and types are checked
said=$(mktemp)
trap 'wait; rm "$said"' EXIT
trap 'exit 130' INT # pytest ends orderly then, which would be taken for its end
linted > "$said" 2>&1 &
beside=$!
# one process compiles the tests and what they import at once, for the five below, which say what is wrong with them
python -m pytest --collect-only -qq "$@" > /dev/null 2>&1 || :
wait "$browser"
# networks this small gain nothing from threads, which wait for one another where several files run on two cores
export OMP_NUM_THREADS=1
# five files at a time on two cores, in the order of tests/support/order.py: some compute while federations wait
failed=0
python -m pytest -n 5 --dist loadfile --no-loadscope-reorder "$@" || failed=$?
wait "$beside" || {
    cat "$said"
    [ "$failed" != 0 ] || failed=1
}
exit "$failed"
