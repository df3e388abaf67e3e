#!/usr/bin/env bash
# Install `pma` for TPUs into ~/pma, on a host whose own Python may be too old. Run it in a clone.
#   bash docs/cloud/install.sh [EXTRAS]
set -euo pipefail
cd "$(dirname "$0")/../.."
python3 -m pip install --quiet --user uv
# constraints.txt pins what the tests run with, on this version of Python. uv downloads it if the host has another.
python3 -m uv venv --quiet --allow-existing --python 3.11 ~/pma
python3 -m uv pip install --quiet --python ~/pma --constraint constraints.txt ".[${1:-tpu,gcs,hub}]"
~/pma/bin/pma --help > /dev/null
