#!/usr/bin/env bash
# Sign the files of dist/ (wheel, sdist, bill of materials) as a Sigstore bundle, without a transparency log.
#   release/sign.sh PYTHON KEY [FOLDER]      PYTHON has release/signing.txt; KEY: private key on P-256, PEM
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=$1 key=$2 folder=${3:-$root/dist}
shopt -s nullglob
wheels=("$folder"/fedfm-*.whl)
if [ ${#wheels[@]} != 1 ]; then
  echo "$folder has ${#wheels[@]} wheels of fedfm, expected one: make wheel-runs sbom" >&2
  exit 2
fi
version=$(basename "${wheels[0]}" | cut -d- -f2)
bundle=$folder/fedfm-$version.sigstore.json
for file in "$folder"/*; do
  case $(basename "$file") in
  fedfm-"$version"-*.whl | fedfm-"$version".tar.gz | fedfm-"$version".cdx.json | fedfm-"$version".sigstore.json) ;;
  *)
    echo "$file is not a file of fedfm $version: move it away, since a signature covers the whole folder" >&2
    exit 2
    ;;
  esac
done
"$python" -m model_signing sign key "$folder" --private_key "$key" --signature "$bundle"
echo "signed: $bundle"
