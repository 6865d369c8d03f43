#!/usr/bin/env bash
# All tests; arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../poc/environment.sh"
# three files at a time, in their order: federations wait more than they compute
exec python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
