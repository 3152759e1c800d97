#!/bin/sh
# Installs the plugin and its systemd units on this host. A second run upgrades the plugin and keeps the settings:
#
#   deploy/systemd/install.sh bin/oxide-csi controller|node...
#
# It starts no service. Edit /etc/oxide-csi first, then run systemctl enable --now for the installed services.
set -eu
[ $# -ge 2 ] || { echo "usage: install.sh PROGRAM controller|node..." >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
program=$1
shift

# A release says which program these units belong to.
if [ -e "$here/oxide-csi.sha256" ] && [ "$(sha256sum "$program" | cut -d' ' -f1)" != "$(cat "$here/oxide-csi.sha256")" ]; then
    echo "install.sh: $program is not the program of this release: take oxide-csi from the same archive" >&2
    exit 1
fi

for service; do
    [ -e "$here/oxide-csi-$service.service" ] || { echo "install.sh: $service is neither controller nor node" >&2; exit 2; }
done

# Replaces the file, because a running program cannot be overwritten.
install -m 0755 "$program" /usr/local/bin/.oxide-csi.new
mv -f /usr/local/bin/.oxide-csi.new /usr/local/bin/oxide-csi
install -D -m 0644 "$here/oxide-csi.sysusers.conf" /usr/lib/sysusers.d/oxide-csi.conf
install -D -m 0644 "$here/oxide-csi.tmpfiles.conf" /usr/lib/tmpfiles.d/oxide-csi.conf
systemd-sysusers oxide-csi.conf
systemd-tmpfiles --create oxide-csi.conf
for service; do
    install -m 0644 "$here/oxide-csi-$service.service" "/etc/systemd/system/oxide-csi-$service.service"
    [ -e "/etc/oxide-csi/$service.env" ] || install -m 0640 -g oxide-csi "$here/$service.env" "/etc/oxide-csi/$service.env"
done
install -m 0644 "$here/oxide-volume@.service" /etc/systemd/system/oxide-volume@.service
systemctl daemon-reload
