#!/usr/bin/env bash
# Linters, types and all tests, or with --quick the unit tests alone; other arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../poc/environment.sh"
ruff check .
ruff format --check .
lint-imports
mypy
if [ "${1:-}" = --quick ]; then
    shift
    exec python -m pytest -n 2 --dist loadfile tests/unit "$@"
fi
# three files at a time, in their order: federations come first, and wait more than they compute
exec python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
