#!/usr/bin/env bash
# All tests; arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../poc/environment.sh"
exec python -m pytest "$@"
