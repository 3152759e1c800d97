#!/bin/sh
# Boots systemd as the first process of new namespaces: boot.sh FOLDER. The root is an overlay over this machine's
# root. The changes are in FOLDER/changes, a tmpfs, and the next boot with the same folder finds them. FOLDER has the same
# path inside. The control groups are below a group named like the folder. No service that would change this machine's
# kernel is started, and no service that this machine starts at boot: of those with WantedBy=multi-user.target, only the
# ones that were enabled inside.
set -eu
dir=$1
group=$(basename "$dir")

groups() { awk '$3 ~ /^cgroup2?$/ { print $2, $3, $4 }' /proc/self/mounts; }

if [ "${2:-}" = inside ]; then
    root=$dir/root
    mount --make-rprivate /
    mkdir -p "$root" "$dir/changes/upper" "$dir/changes/work"
    mount -t overlay -o "lowerdir=/,upperdir=$dir/changes/upper,workdir=$dir/changes/work" overlay "$root"
    mount -t proc proc "$root/proc"
    mount --bind "$root/proc/sys" "$root/proc/sys"
    mount -o remount,bind,ro "$root/proc/sys"
    cat /proc/sys/kernel/random/uuid >"$dir/boot_id"
    mount --bind "$dir/boot_id" "$root/proc/sys/kernel/random/boot_id"
    mount -t sysfs -o ro sysfs "$root/sys"
    list=$(groups)
    echo "$list" | grep -q '^/sys/fs/cgroup ' || mount -t tmpfs -o mode=755 tmpfs "$root/sys/fs/cgroup"
    echo "$list" | while read -r at type options; do
        name=$(basename "$at")
        mkdir -p "$root$at"
        case $type,$name in
        cgroup2,*) mount -t cgroup2 cgroup2 "$root$at" ;;
        cgroup,systemd) mount -t cgroup -o none,name=systemd cgroup "$root$at" ;;
        *) mount -t cgroup -o "$name" cgroup "$root$at" ;;
        esac
    done
    for folder in run tmp dev; do mount -t tmpfs -o mode=755 tmpfs "$root/$folder"; done
    for node in null zero full random urandom tty; do
        : >"$root/dev/$node"
        mount --bind "/dev/$node" "$root/dev/$node"
    done
    mkdir -p "$root/dev/shm" "$root/dev/pts" "$root$dir"
    mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
    ln -s pts/ptmx "$root/dev/ptmx"
    mount --bind "$dir" "$root$dir"
    for unit in systemd-sysctl systemd-modules-load systemd-remount-fs systemd-udevd systemd-udev-trigger systemd-update-utmp \
        systemd-binfmt systemd-random-seed systemd-hwdb-update systemd-pstore systemd-timesyncd; do
        ln -sf /dev/null "$root/etc/systemd/system/$unit.service"
    done
    for unit in dev-hugepages dev-mqueue sys-fs-fuse-connections sys-kernel-config sys-kernel-debug sys-kernel-tracing; do
        ln -sf /dev/null "$root/etc/systemd/system/$unit.mount"
    done
    ln -sf /dev/null "$root/etc/systemd/system/timers.target"
    : >"$root/etc/fstab"
    if [ ! -e "$dir/changes/booted" ]; then
        rm -rf "$root/etc/systemd/system/multi-user.target.wants" "$root/lib/systemd/system/multi-user.target.wants"
        : >"$dir/changes/booted"
    fi
    cd "$root"
    mkdir -p old
    pivot_root . old
    umount -l /old
    # Shared, as on a real machine. Otherwise a service with its own mount namespace would not be different from the
    # others.
    mount --make-rshared /
    exec env -i container=test PATH=/usr/sbin:/usr/bin:/sbin:/bin "$(command -v systemd || echo /lib/systemd/systemd)" \
        --system --unit=multi-user.target --show-status=0
fi

groups | while read -r at _; do
    mkdir -p "$at/$group"
    for value in cpuset.cpus cpuset.mems; do
        if [ -e "$at/$value" ] && [ -e "$at/$group/$value" ]; then cat "$at/$value" >"$at/$group/$value"; fi
    done
    echo $$ >"$at/$group/cgroup.procs"
done
exec unshare --mount --uts --ipc --pid --cgroup --fork --kill-child "$0" "$dir" inside
