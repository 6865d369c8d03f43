# Sourced by poc/run.sh and tests/run.sh: makes the project's virtual environment once, and puts it first on PATH.
# PYTHON names the interpreter to build it with (3.10 to 3.12).
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ ! -e .venv/ready ] || [ requirements.lock -nt .venv/ready ]; then
    python=${PYTHON:-python3}
    "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' || {
        echo "feddp needs Python 3.10 to 3.12; $python is $("$python" --version 2>&1). Set PYTHON=/path/to/python3.11" >&2
        exit 2
    }
    echo "Making the environment in .venv (a few minutes, once) ..." >&2
    "$python" -m venv .venv
    pip=".venv/bin/python -m pip install --quiet --disable-pip-version-check"
    # every file is held against its hash; what comes as source (pyhocon, feddp) is built by the locked setuptools, which is
    # therefore the first, and not by one that pip would fetch for it
    sed -n '/^setuptools==/,/[^\\]$/p' requirements.lock > .venv/setuptools.lock
    $pip --require-hashes -r .venv/setuptools.lock
    # pip downloads and unpacks one file after another: torch and its CUDA libraries, most of all bytes, beside the others.
    # The lock names all that is needed, so neither looks for more
    large='/^[^ ]/ { large = /^(nvidia-|torch==|triton==)/ }'
    awk "$large large" requirements.lock > .venv/large.lock
    awk "$large !large" requirements.lock > .venv/others.lock
    $pip --no-compile --require-hashes --no-deps -r .venv/large.lock &
    beside=$!
    trap 'kill "$beside" 2> /dev/null; exit 130' INT TERM # a shell's background command does not hear Ctrl-C
    $pip --no-compile --require-hashes --no-deps --no-build-isolation --use-pep517 -r .venv/others.lock || {
        failed=$?
        kill "$beside" 2> /dev/null || :
        exit "$failed"
    }
    wait "$beside" || exit
    trap - INT TERM
    $pip --no-deps --no-build-isolation -e .
    touch .venv/ready
fi
# Python compiles what it imports, once (the tests: 124 of 270 MB); without this line each process would do it anew
unset PYTHONDONTWRITEBYTECODE
export PATH="$PWD/.venv/bin:$PATH"
