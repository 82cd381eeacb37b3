#!/bin/sh
# Build the backend ccl ahead, if CCL is set: its sources are in the context only then.
set -eu
[ -n "${CCL:-}" ] || exit 0
. /context/pip.sh
packages=g++
python3 -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
    packages='g++ python3-dev'
sh /context/system.sh "$packages"
# Its headers and its static library are all that is used, not the SYCL runtimes it asks for.
$pip install --quiet --no-deps --require-hashes -r /context/ccl.txt
PYTHONPATH=/context/lib PYTHONDONTWRITEBYTECODE=1 python3 -m manycpu.pipeline.node.ccl
chmod -R a+rX "$MANYCPU_CACHE"
