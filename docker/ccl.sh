#!/bin/sh
# Build the backend ccl ahead, if CCL is set; its sources are in the context only then.
set -eu
[ -n "${CCL:-}" ] || exit 0
export PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
[ -z "${INDEX:-}" ] || export PIP_INDEX_URL="$INDEX"
[ -z "${WHEELS:-}" ] || export PIP_NO_INDEX=1 PIP_FIND_LINKS="/context/$WHEELS"
sh /context/system.sh 'g++'
# Its headers and its static library are all that is used, not the SYCL runtimes it asks for.
python3 -m pip install --quiet --no-deps --require-hashes -r /context/ccl.txt
PYTHONPATH=/context/lib PYTHONDONTWRITEBYTECODE=1 python3 -m manycpu.pipeline.node.ccl
chmod -R a+rX "$MANYCPU_CACHE"
