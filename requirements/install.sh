#!/bin/sh
# Make a virtual environment and install a pinned list into it, or say in one sentence what is missing.
# usage: install.sh PYTHON VENV LIST
set -eu
python=$1 venv=$2 list=$3

if ! command -v "$python" >/dev/null 2>&1; then
    echo "There is no $python here. On Debian: apt-get install python3 python3-venv" >&2
    exit 1
fi
if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'; then
    echo "$python is $("$python" -V 2>&1); Espalier needs Python 3.11 to 3.13: make PYTHON=/path/to/python3.11" >&2
    exit 1
fi
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    echo "$python has no venv module. On Debian: apt-get install python$version-venv" >&2
    exit 1
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
echo "Installing $(grep -c == "$list") packages into $venv (a minute or two, 2.8 GB) ..." >&2
sh "$(dirname "$0")/packages.sh" "$venv" "$list"
if ! "$venv/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is not None)' 2>/dev/null; then
    echo "This index has no CPU build of torch: run again with PIP_INDEX_URL set to PyTorch's CPU index for torch and" \
        "torchvision, and PIP_EXTRA_INDEX_URL to your package index for the rest." >&2
    exit 1
fi
