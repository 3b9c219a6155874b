#!/usr/bin/env bash
# Build the sdist, and the wheel of it, into a folder that then has no other version of fedfm.
#   release/build.sh PYTHON FOLDER      PYTHON has hatchling
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=$1
mkdir -p "$2"
out=$(cd "$2" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
(cd "$root" && "$python" -m hatchling build -t sdist -d "$work" >/dev/null)
# The wheel is built from the sdist, so what the sdist lacks is missing here, too.
tar xzf "$work"/fedfm-*.tar.gz -C "$work"
(cd "$work"/fedfm-*/ && "$python" -m hatchling build -t wheel -d "$work" >/dev/null)
rm -f "$out"/fedfm-* # of an earlier version; pip refuses two wheels of one package
mv "$work"/fedfm-*.tar.gz "$work"/fedfm-*.whl "$out"
