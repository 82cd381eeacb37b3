# shellcheck shell=sh
# Sets $pip, which installs into the image's Python; to be sourced.
export PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
[ -z "${INDEX:-}" ] || export PIP_INDEX_URL="$INDEX"
[ -z "${WHEELS:-}" ] || export PIP_NO_INDEX=1 PIP_FIND_LINKS="/context/$WHEELS"
if python3 -m pip --version >/dev/null 2>&1; then
    pip='python3 -m pip'
elif ls "/context/${WHEELS:-none}"/pip-*.whl >/dev/null 2>&1; then
    pip="python3 $(ls "/context/$WHEELS"/pip-*.whl)/pip"  # a wheel of pip runs without being installed
else
    sh /context/system.sh python3-pip
    pip='python3 -m pip'
fi
