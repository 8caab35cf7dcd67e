#!/bin/sh
# Install dockyard-sandbox as a service: run this as root in the root of the repository. It may be run again.
#   PYTHON=/usr/bin/python3.12 sh deploy/systemd/install.sh
# The interpreter must be 3.11 or later and lie outside of /home, /root and /tmp, which the service does not see.
set -eu
prefix=/opt/dockyard-sandbox
token=/etc/dockyard-sandbox/token

install -D -m 0644 deploy/systemd/dockyard-sandbox.sysusers.conf /etc/sysusers.d/dockyard-sandbox.conf
systemd-sysusers /etc/sysusers.d/dockyard-sandbox.conf

"${PYTHON:-python3}" -m venv "$prefix"
# --compile: the service may not write here, and every run would compile pytest again (`uv pip` needs --compile-bytecode)
"$prefix/bin/python" -m pip install --compile --constraint deploy/ubuntu-swe/constraints.txt \
    ./packages/dockyard-core ./packages/dockyard-sandbox

install -d -m 0700 /etc/dockyard-sandbox
[ -s "$token" ] || (umask 077 && head -c 32 /dev/urandom | base64 >"$token")

# only where AppArmor keeps user namespaces from plain users
if [ -e /proc/sys/kernel/apparmor_restrict_unprivileged_userns ]; then
    install -m 0644 deploy/apparmor/dockyard-sandbox /etc/apparmor.d/dockyard-sandbox
    apparmor_parser -r /etc/apparmor.d/dockyard-sandbox
fi

install -D -m 0644 docs/deployment/standalone-sandbox.md /usr/share/doc/dockyard-sandbox/standalone-sandbox.md
install -m 0644 deploy/systemd/dockyard-sandbox.service /etc/systemd/system/dockyard-sandbox.service
systemctl daemon-reload
systemctl enable dockyard-sandbox.service
systemctl restart dockyard-sandbox.service
