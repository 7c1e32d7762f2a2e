#!/bin/sh
# Install a pinned list into a virtual environment: by its lock file, with hashes, where that holds this interpreter's
# files, and else by the list itself.
# usage: packages.sh VENV LIST.txt
set -eu
venv=$1 list=$2
platform=$("$venv/bin/python" -c 'import platform, sys; print("%s-%d.%d" % (sys.implementation.name, *sys.version_info[:2]), sys.platform, platform.machine())')
if [ "$platform" = "cpython-3.11 linux x86_64" ]; then
    set -- --require-hashes -r "${list%.txt}.lock"
else
    echo "There is no lock file for $platform: $list is installed without hashes." >&2
    set -- -r "$list"
fi
"$venv/bin/python" -m pip install --quiet --no-deps --no-compile --disable-pip-version-check "$@"
# Without .pyc files the engine's import takes 18 s, not 7. On all cores: pip itself would compile on one, file by file.
# Some packages have files for other versions of Python, which cannot be compiled.
"$venv/bin/python" -m compileall -qq -j 0 "$venv/lib" || true
