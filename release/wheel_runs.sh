#!/usr/bin/env bash
# Build the sdist and the wheel of it, install the wheel alone into a new environment, and run it from an empty folder:
# doctor, the demo, and one method of each system. It leaves the two files in dist/, and no other version there.
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
rm -rf "$place/empty" && mkdir -p "$place/empty" # of an earlier call
"$python" -m venv "$place/v"
own=$place/v/bin/python
pip=("$own" -m pip --quiet --disable-pip-version-check)
"${pip[@]}" install -c "$root/constraints.txt" "hatchling>=1.25"
"$root/release/build.sh" "$own" "$root/dist"
"${pip[@]}" uninstall --yes fedfm # pip would keep an earlier wheel of the same version
# Python compiles what it imports; pip would compile all of PyTorch, which takes longer than the demo.
"${pip[@]}" install --no-compile -c "$root/constraints.txt" "$root"/dist/fedfm-*.whl
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
