#!/bin/sh
# Install Python packages: python.sh helper|train
set -eu
command -v python3 >/dev/null || { echo 'manycpu: the base image has no python3: take one with Python 3.11 or later' >&2; exit 1; }
python3 /context/check.py python
. /context/pip.sh

if [ "$1" = helper ]; then
    $pip install --quiet --no-deps --require-hashes -r /context/helper.txt
    # shellcheck disable=SC2086
    [ -z "$HELPER_REQUIREMENTS" ] || $pip install --quiet $HELPER_REQUIREMENTS
else
    # torch first, from its own index: what comes after is content with it. Without a version, the base's stays.
    [ -z "$TORCH" ] || $pip install --quiet ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==$TORCH" torchvision
    $pip install --quiet --no-deps --require-hashes -r /context/train.txt
    # shellcheck disable=SC2086
    [ -z "$TRANSFORMERS$REQUIREMENTS" ] || $pip install --quiet ${TRANSFORMERS:+"transformers==$TRANSFORMERS"} $REQUIREMENTS
fi
