#!/usr/bin/env bash
# Chooses the versions that the scripts install, and writes them with the hashes of their files to scripts/locked/:
# base.txt is what the package needs, dev.txt what tests and lint need besides. All that it finds is as new as
# pyproject.toml allows, for each Python and for Linux.
#
# Usage: ./scripts/lock.sh [FLAGS of uv pip compile...]
#
#   --help  this text
#
# Needs uv (pip install uv). torch is left out, and what its builds for GPUs bring: which build is right depends on the
# machine, so setup.sh installs it by its version.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

[[ ${1:-} != --help && ${1:-} != -h ]] || { help_from_header && exit; }
command -v uv >/dev/null || die "uv is not on PATH; pip install uv."
cd "$ROOT"

lock() { # EXTRA [FLAGS...]
    local extra=$1 file=scripts/locked/$1.txt chosen flags=()
    shift
    [[ $extra == base ]] || flags=(--extra "$extra")
    say "Choosing versions for $file"
    chosen=$(uv pip compile pyproject.toml "${flags[@]}" --universal --python-version 3.12 --generate-hashes --quiet \
        --no-annotate --no-header --no-emit-package torch --constraints <(echo "$TORCH_WITHOUT_GPU") --upgrade "$@")
    { # a package is a line and its hashes, which are indented
        echo "# Written by scripts/lock.sh."
        awk '!/^ / { wanted = !/^(cuda|nvidia)-|^triton/ && !/sys_platform == .(win32|darwin)/ } wanted' <<<"$chosen"
    } >"$file.new"
    mv "$file.new" "$file"
}

mkdir -p scripts/locked
lock dev "$@"
versions=$(mktemp) && trap 'rm -f "$versions"' EXIT
sed -n 's/ *\\$//; /^[a-z]/p' scripts/locked/dev.txt >"$versions"
lock base --constraints "$versions" "$@" # the same versions
