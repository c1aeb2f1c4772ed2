#!/usr/bin/env bash
# Build a virtual environment from pinned versions: scripts/venv.sh DIRECTORY CONSTRAINTS REQUIREMENT...
# Needs Python 3.11 or newer with venv. Read from the environment:
#   PYTHON       interpreter to use (default: the first of python3.13, 3.12, 3.11, python3 that is new enough)
#   TORCH_INDEX  extra package index for torch, asked only if it answers (e.g. https://download.pytorch.org/whl/cpu)
set -euo pipefail
dir=$1 constraints=$2; shift 2
torch=$(grep -E '^torch==' "$constraints")
fail() { printf '\nsetup: %s\n' "$1" >&2; exit 1; }

good() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }
python=
for p in ${PYTHON:-python3.13 python3.12 python3.11 python3 python}; do
  if good "$p"; then python=$p; break; fi
done
if [ -z "$python" ]; then
  [ -z "${PYTHON:-}" ] || fail "PYTHON=$PYTHON is not a working Python 3.11 or newer."
  fail "no Python 3.11 or newer found (python3 is: $(python3 -V 2>&1 || true)).
Install one (Debian, Ubuntu: sudo apt install python3 python3-venv; macOS: brew install python@3.13), or name it: make PYTHON=/path/to/python3.12 ..."
fi
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
  fail "Python $version has no venv or pip. Debian, Ubuntu: sudo apt install python$version-venv; elsewhere: install a full Python, or make PYTHON=..."

gpu=no; if nvidia-smi -L >/dev/null 2>&1; then gpu=yes; fi
mkdir -p "$dir"
free=$(df -Pm "$dir" | awk 'NR==2 {print $4}')
[ "$free" -ge 3000 ] || fail "$free MB free in $dir; the environment needs about 2000 MB (CPU) to 8000 MB (NVIDIA GPU).
Free some space, or put it elsewhere: make VENV=/other/disk/venv ..."

index=()
if [ "$gpu" = yes ]; then
  echo "setup: NVIDIA GPU found: $torch as the package index has it"
elif [ -z "${TORCH_INDEX:-}" ]; then
  echo "setup: no NVIDIA GPU. If a CUDA build of torch (3 GB) starts to download, interrupt and repeat with TORCH_INDEX=https://download.pytorch.org/whl/cpu"
elif "$python" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=10)' "$TORCH_INDEX" 2>/dev/null; then
  index=(--extra-index-url "$TORCH_INDEX")
  echo "setup: no NVIDIA GPU: CPU build of $torch from $TORCH_INDEX"
else
  echo "setup: TORCH_INDEX=$TORCH_INDEX does not answer; using the default package index alone"
fi

if ! [ -x "$dir/bin/python" ] || ! good "$dir/bin/python"; then
  echo "setup: $dir with Python $version ($(command -v "$python"))"
  "$python" -m venv --clear "$dir" || fail "could not make $dir (see above). Debian, Ubuntu: sudo apt install python$version-venv"
fi
echo "setup: installing pinned versions from $constraints (the first time about 2 minutes)"
# torch comes first in the one command, so that a CPU build that is at hand is kept for everything else
"$dir/bin/python" -m pip install --no-input --disable-pip-version-check --progress-bar off "${index[@]+"${index[@]}"}" \
  -c "$constraints" "$torch" "$@" | sed -u -E '/^(Requirement already|Looking in|  (Using cached|Preparing|Getting|Installing|Checking|Created|Building|Stored))/d' ||
  fail "pip could not install everything: its error stands above.
No network or a proxy: set PIP_INDEX_URL, HTTPS_PROXY, or PIP_CERT. Out of space: free some, or make VENV=/other/disk/venv ...
Then run the same command again; what was downloaded is kept."
