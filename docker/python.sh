#!/bin/sh
# Install Python packages: python.sh helper|train
set -eu
export PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
command -v python3 >/dev/null || { echo 'manycpu: the base image has no python3: take one with Python 3.11 or later' >&2; exit 1; }
python3 /context/check.py python
[ -z "${INDEX:-}" ] || export PIP_INDEX_URL="$INDEX"
if [ -n "${WHEELS:-}" ]; then
    export PIP_NO_INDEX=1 PIP_FIND_LINKS="/context/$WHEELS"
fi

if python3 -m pip --version >/dev/null 2>&1; then
    pip='python3 -m pip'
elif ls "/context/${WHEELS:-none}"/pip-*.whl >/dev/null 2>&1; then
    pip="python3 $(ls "/context/$WHEELS"/pip-*.whl)/pip"  # a wheel of pip runs without being installed
else
    sh /context/system.sh python3-pip
    pip='python3 -m pip'
fi

if [ "$1" = helper ]; then
    $pip install --quiet --no-deps --require-hashes -r /context/helper.txt
    # shellcheck disable=SC2086
    [ -z "$HELPER_REQUIREMENTS" ] || $pip install --quiet $HELPER_REQUIREMENTS
else
    # torch first, from its own index: what comes after is content with it. Without a version, the base's stays.
    [ -z "$TORCH" ] || $pip install --quiet ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==$TORCH"
    $pip install --quiet --no-deps --require-hashes -r /context/train.txt
    # shellcheck disable=SC2086
    [ -z "$TRANSFORMERS$REQUIREMENTS" ] || $pip install --quiet ${TRANSFORMERS:+"transformers==$TRANSFORMERS"} $REQUIREMENTS
fi
