#!/usr/bin/env bash
# All tests; arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../poc/environment.sh"
# two at a time, a file at each: federations wait more than they compute
exec python -m pytest -n 2 --dist loadfile "$@"
