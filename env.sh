#!/usr/bin/env bash
# Makes the environment of this checkout, or brings it up to date. The Makefile calls it; it can be run by hand too.
#
#   ./env.sh            what `hal` needs to run
#   ./env.sh test       that and what the tests need
#   ./env.sh test lint  that and what the linters need
#
# PYTHON     the interpreter to build from, 3.11 to 3.13    (python3)
# HAL_VENV   where the environment lies                     (.venv)
# HAL_TORCH  the PyTorch to install, as pip spells it       (torch==2.13.0 where none is importable)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

venv=${HAL_VENV:-.venv}
default_torch=torch==2.13.0
packages=(backends/cpu backends/cuda backends/rocm backends/ascend)

say() { printf 'env.sh: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

check_version() { # NAME VERSION REMEDY
    case $2 in
        3.11 | 3.12 | 3.13) ;;
        *) die "$1 is Python $2, right is 3.11, 3.12 or 3.13: $3" ;;
    esac
}

make_venv() {
    local python=${PYTHON:-python3} version
    command -v "$python" >/dev/null || die "PYTHON: no interpreter '$python' found, right is Python 3.11, 3.12 or 3.13"
    version=$(version_of "$python") || die "PYTHON: '$python' does not run, right is Python 3.11, 3.12 or 3.13"
    check_version "PYTHON: '$python'" "$version" "set PYTHON, for example PYTHON=python3.12"
    say "making $venv with $python ($version)"
    # A half-made environment would be taken for a whole one by the next call.
    "$python" -m venv "$venv" || { rm -rf "$venv"; die "'$python -m venv $venv' failed, see above"; }
}

check_venv() {
    local version wanted
    version=$(version_of "$venv/bin/python") || die "$venv: its Python does not run; remove $venv and call again"
    check_version "$venv" "$version" "remove $venv and set PYTHON"
    [ -n "${PYTHON:-}" ] || return 0
    wanted=$(version_of "$PYTHON") || die "PYTHON: '$PYTHON' does not run"
    [ "$wanted" = "$version" ] || die "$venv is Python $version, but PYTHON=$PYTHON is $wanted: remove $venv, set HAL_VENV to another folder, or unset PYTHON"
}

install_torch() {
    # Before all else and alone: an open range would fetch whatever build of PyTorch is newest, with its chip libraries.
    if [ -z "${HAL_TORCH:-}" ] && "$venv/bin/python" -c 'import torch' 2>/dev/null; then
        return 0
    fi
    say "installing ${HAL_TORCH:-$default_torch}"
    "$venv/bin/python" -m pip install --disable-pip-version-check "${HAL_TORCH:-$default_torch}"
}

install_packages() { # EXTRA…
    local extras package build=$venv/build-requirements.txt sources=()
    extras=$(IFS=,; printf '%s' "$*")
    for package in "${packages[@]}"; do sources+=(-e "$package"); done
    # Once into the environment itself: else pip makes an environment to build in for each package.
    "$venv/bin/python" -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' >"$build"
    "$venv/bin/python" -m pip install --disable-pip-version-check --quiet -r "$build"
    # All packages in one command, so that pip finds in the tree those that name each other.
    say "installing hal-v4${extras:+[$extras]} and ${packages[*]}"
    "$venv/bin/python" -m pip install --disable-pip-version-check --quiet --no-build-isolation \
        -e ".${extras:+[$extras]}" "${sources[@]}"
}

digest() { # of what decides the installed set
    {
        printf '%s\n' "$(pwd -P)" "${HAL_TORCH:-}" "$*"
        cat env.sh pyproject.toml "${packages[@]/%//pyproject.toml}"
    } | "$venv/bin/python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

main() {
    local name stamp now
    for name in "$@"; do
        case $name in test | lint) ;; *) die "unknown extra '$name', right is test or lint" ;; esac
    done
    if [ -x "$venv/bin/python" ]; then check_venv; else make_venv; fi
    stamp=$venv/.installed-$(IFS=-; printf '%s' "run${*:+-$*}")
    now=$(digest "$@")
    [ "$(cat "$stamp" 2>/dev/null || true)" != "$now" ] || return 0
    install_torch
    install_packages "$@"
    printf '%s\n' "$now" >"$stamp"
}

main "$@"
