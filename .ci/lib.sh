# Shared by the scripts of this folder, which run in the repository's root: locks, messages, system packages, uv.

NEWEST_TENSORFLOW=2.21
OLDER_TENSORFLOWS="2.18 2.19 2.20"

LOG=.tools/setup.log
DAEMON_POLICY=/usr/sbin/policy-rc.d # Debian's packages ask it before they start a daemon

# lock_of VERSION: the lock of an older TensorFlow.
lock_of() { echo ".ci/locks/tensorflow-$1.lock"; }

# last_python_of LOCK: the last Python, of those that pyproject.toml allows, that its TensorFlow has wheels for.
last_python_of() {
    case "$1" in
    "$(lock_of 2.18)" | "$(lock_of 2.19)") echo 3.12 ;;
    *) echo 3.13 ;;
    esac
}

say() { printf 'set-up: %s\n' "$*" >&2; }

die() {
    say "$*"
    exit 1
}

# step WHAT COMMAND...: one line for the user, the command's output into the log; when it fails, the log's end, and what a
# compiler said, which is seldom near the end.
step() {
    local what=$1
    shift
    say "$what"
    printf '\n== %s: %s\n' "$what" "$*" >>"$LOG"
    "$@" >>"$LOG" 2>&1 && return
    tail -n 20 "$LOG" >&2
    grep -F ' error: ' "$LOG" | head -n 3 >&2 || true
    die "failed: $what (the whole log is in $LOG)"
}

has() { command -v "$1" >/dev/null; }

# As root with apt-get, install the packages; otherwise say what to install, and stop.
system_packages() {
    has apt-get || die "missing: install what this system calls $*, then run make again"
    [ "$(id -u)" = 0 ] || die "missing, and only root can install it: sudo apt-get install $*"
    export DEBIAN_FRONTEND=noninteractive
    step "reading the lists of system packages" apt-get update
    step "installing $*" without_daemons apt-get install -y --no-install-recommends "$@"
}

# without_daemons COMMAND...: the packages that it installs start no daemons. Where the system has a policy for that, a
# container for example, it stays as it is; otherwise there is one until the command has ended, or was interrupted.
without_daemons() (
    [ ! -e "$DAEMON_POLICY" ] || exec "$@"
    trap 'rm -f "$DAEMON_POLICY"' EXIT
    printf '#!/bin/sh\nexit 101 # not allowed\n' | install -m 755 /dev/stdin "$DAEMON_POLICY" || exit
    "$@"
)

uv_version() { "$1" --version 2>/dev/null | awk '{ print $2 }' || true; }

# find_uv PYTHON: sets UV to the uv on PATH, or where that is older than .ci/uv.txt says, to that one, put into .tools.
find_uv() {
    local found pinned
    found=$(uv_version uv)
    pinned=$(sed -n 's/^uv==\([0-9.]*\).*/\1/p' .ci/uv.txt)
    UV=uv
    [ -n "$found" ] && printf '%s\n' "$pinned" "$found" | sort -CV && return
    UV=$PWD/.tools/uv/bin/uv
    [ "$(uv_version "$UV")" = "$pinned" ] && return
    "$1" -c 'import ensurepip' 2>/dev/null || system_packages python3-venv
    step "installing uv $pinned in .tools" install_uv "$1"
}

install_uv() { "$1" -m venv --clear .tools/uv && .tools/uv/bin/python -m pip install --require-hashes -r .ci/uv.txt; }
