#!/bin/sh
# Install Debian packages that are missing, and see that user 1000 has a name: system.sh "PACKAGES"
set -eu
missing=
for package in $1; do
    name=${package%%=*}
    version=${package#"$name"}  # with its equals sign; empty: any
    dpkg-query -W -f '${Status}=${Version}\n' "$name" 2>/dev/null | grep -q "ok installed${version:-=.*}\$" ||
        missing="$missing $package"
done
if [ -n "$missing" ]; then
    command -v apt-get >/dev/null || {
        echo "manycpu: the base image has no apt-get to install$missing: take one with them, or one of Debian or Ubuntu" >&2
        exit 1
    }
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    # shellcheck disable=SC2086
    apt-get install -qq --no-install-recommends --allow-downgrades $missing >/dev/null
    rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_*  # a host key in an image would be everybody's
fi
# MPI over ssh needs a name for the user that pods run as.
if ! getent passwd 1000 >/dev/null; then
    echo 'manycpu:x:1000:1000::/home/manycpu:/bin/sh' >>/etc/passwd
    getent group 1000 >/dev/null || echo 'manycpu:x:1000:' >>/etc/group
    mkdir -p /home/manycpu
    chown 1000:1000 /home/manycpu
fi
