#!/usr/bin/env bash
# Build the sdist and the wheel of it, install the wheel alone into a new environment, and run it from an empty folder:
# doctor, the demo, and one method of each system. It leaves the two files in dist/.
#   release/wheel_runs.sh [FOLDER for the environment; a temporary one by default]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
place=${1:-}
if [ -z "$place" ]; then
  place=$(mktemp -d)
  trap 'rm -rf "$place"' EXIT # more than a gigabyte
fi
python=${PYTHON:-python3}
unset PYTHONPATH
mkdir -p "$place/empty" "$place/dist"
"$python" -m venv "$place/v"
own=$place/v/bin/python
"$own" -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" "hatchling>=1.25"
# The wheel is built from the sdist, so what the sdist lacks is missing here, too.
(cd "$root" && "$own" -m hatchling build -t sdist -d "$place/dist" >/dev/null)
(cd "$place" && tar xzf dist/fedfm-*.tar.gz && cd fedfm-*/ && "$own" -m hatchling build -t wheel -d "$place/dist" >/dev/null)
# Python compiles what it imports; pip would compile all of PyTorch, which takes longer than the demo.
"$own" -m pip install --quiet --disable-pip-version-check --no-compile -c "$root/constraints.txt" "$place"/dist/fedfm-*.whl
mkdir -p "$root/dist" && cp "$place"/dist/fedfm-* "$root/dist/"
cd "$place/empty"
export HF_HUB_OFFLINE=1
"$own" -c 'import fedfm, sys; sys.exit(not fedfm.__file__.startswith(sys.prefix))' # the wheel, not the clone
"$place/v/bin/fedfm" doctor
"$place/v/bin/fedfm" demo --out demo
"$own" - "$root/examples/gallery" <<'PROGRAM'
import sys
sys.path.insert(0, sys.argv[1])
import double_blind, experts_and_gate, one_round, personal_models, secret_model

one_round.main(limit=150)
secret_model.main(limit=100, rounds=1)
personal_models.main(rounds=2)
experts_and_gate.main(n=30)
double_blind.main(limit=60, rounds=1)
PROGRAM
echo "the wheel runs: $(ls "$root"/dist/fedfm-*)"
