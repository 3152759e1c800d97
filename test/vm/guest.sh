#!/usr/bin/env bash
# Builds the guest of these tests: Debian's cloud kernel, and an initramfs that is the whole system, with the tools
# that the node plugin calls. It prints the folder with both:
#
#     vmlinuz          the kernel; NVMe and ext4 are built into it
#     root.cpio        the initramfs, without the programs that the tests add: the agent and the plugin
#
# The folder is in the user's cache, and its name is a hash of its inputs, so a second run only prints the name. The
# kernel is downloaded as a package and unpacked. The tools are those of this machine; VM_TOOLS names another root folder
# to take them from, as root (test/matrix/debian.sh). Else it needs no root. `make test-vm` installs what it needs.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/oxide-csi-plugin/vm

# From e2fsprogs, xfsprogs, btrfs-progs, cryptsetup-bin, dmsetup, util-linux and mount; dd and stat from coreutils, because busybox's dd
# has no direct reads and its stat no birth times (busybox's shell uses its own if no path is given).
tools=(
    mke2fs mkfs.ext3 mkfs.ext4 e2fsck fsck.ext3 fsck.ext4 resize2fs dumpe2fs tune2fs
    mkfs.xfs xfs_repair xfs_growfs xfs_io
    mkfs.btrfs btrfs
    cryptsetup dmsetup
    blkid wipefs mount umount fsck
    dd stat
)
# Modules that are not built into the cloud kernel. cryptsetup encrypts key slots through algif_skcipher. nvmet-tcp and
# nvme-tcp make a disk that is not on the PCI bus.
modules=(virtio_pci virtio_net xfs btrfs dm-crypt xts algif_skcipher nvmet-tcp nvme-tcp)

die() {
    echo "guest.sh: $*" >&2
    exit 1
}

# kernel_package prints the name of the package with the current cloud kernel.
kernel_package() { apt-cache depends linux-image-cloud-amd64 2>/dev/null | awk '$1 == "Depends:" && /linux-image/ { print $2; exit }'; }

# tool prints the path of a tool, below the folder of VM_TOOLS if there is one.
tool() {
    if [ -z "${VM_TOOLS:-}" ]; then
        type -P "$1"
    else
        (cd "$VM_TOOLS" && find usr/sbin usr/bin -name "$1" -printf '/%p\n' -quit)
    fi
}

export PATH=$PATH:/usr/sbin:/sbin
for program in "${tools[@]}"; do
    [ -n "$(tool "$program")" ] || die "there is no $program: run make test-vm as root on a Debian machine, which installs it"
done
for program in qemu-system-x86_64 apt-cache dpkg-deb cpio depmod modprobe busybox; do
    [ -n "$(type -P "$program")" ] || die "there is no $program: run make test-vm as root on a Debian machine, which installs it"
done
# VM_KERNEL names a folder with the packages of another kernel, such as that of another release of Debian.
package=$(if [ -n "${VM_KERNEL:-}" ]; then basename "$VM_KERNEL"/linux-image-*; else kernel_package; fi)
package=${package%%_*}
if [ -z "$package" ]; then
    apt-get update -qq >&2 || die "apt-get update failed: the package lists are needed to find the kernel's package"
    package=$(kernel_package)
fi
[ -n "$package" ] || die "no package linux-image-cloud-amd64 is known: check /etc/apt/sources.list"
release=${package#linux-image-}

key=$({
    if [ -n "${VM_KERNEL:-}" ]; then sha256sum "$VM_KERNEL"/*; else apt-cache show --no-all-versions "$package" | grep '^Version:'; fi
    dpkg-query -W busybox-static e2fsprogs xfsprogs btrfs-progs cryptsetup-bin util-linux mount coreutils libc6
    if [ -n "${VM_TOOLS:-}" ]; then cat "$VM_TOOLS/packages"; fi
    cat "${BASH_SOURCE[0]}" "$here/init" "$here/inittab" "$here/down"
} | sha256sum | cut -c 1-16)
guest=$cache/$release-$key
if [ -e "$guest/root.cpio" ]; then
    touch "$guest"
    echo "$guest"
    exit
fi

mkdir -p "$cache"
work=$(mktemp -d "$cache/build.XXXXXX")
trap 'rm -rf "$work"' EXIT
root=$work/root
kernel=$work/kernel

if [ -z "${VM_KERNEL:-}" ]; then
    echo "guest.sh: downloading the kernel, $package" >&2
    (cd "$work" && apt-get download -qq "$package" >apt.log 2>&1) || die "apt-get download $package: $(cat "$work/apt.log")"
fi
for part in "${VM_KERNEL:-$work}"/*.deb; do
    dpkg-deb -x "$part" "$kernel"
done
# From Debian 13 on, modules are below /usr and compressed, and later the kernel is beside them.
[ -e "$kernel/lib" ] || ln -s usr/lib "$kernel/lib"
find "$kernel/lib/modules/" -name '*.ko.xz' -exec xz --decompress {} +
depmod -b "$kernel" "$release"

echo "guest.sh: building the initramfs" >&2
mkdir -p "$root"/{dev,etc,mnt,proc,run,sys,tmp,var/lib} "$root"/usr/{bin,sbin,lib,lib64}
for folder in bin sbin lib lib64; do
    ln -s "usr/$folder" "$root/$folder"
done
for tool in "${tools[@]}"; do
    program=$(tool "$tool")
    cp -L "${VM_TOOLS:-}$program" "$root/usr/sbin/$tool"
    # Each library keeps its path.
    ${VM_TOOLS:+chroot "$VM_TOOLS"} ldd "$program" | grep -o "/lib[^ ]*" | while read -r library; do
        [ -e "$root$library" ] || install -D "${VM_TOOLS:-}$library" "$root$library"
    done
done
# libc loads it when a thread of cryptsetup ends. ldd does not show it.
threads=/lib/x86_64-linux-gnu/libgcc_s.so.1
[ -e "$root$threads" ] || install -D "${VM_TOOLS:-}$threads" "$root$threads"
cp "${VM_TOOLS:-}/etc/mke2fs.conf" "$root/etc/"
cp "$(type -P busybox)" "$root/usr/bin/busybox"
for applet in $(busybox --list); do
    [ -e "$root/usr/sbin/$applet" ] || [ "$applet" = busybox ] || ln -s busybox "$root/usr/bin/$applet"
done
ln -s ../bin/modprobe "$root/usr/sbin/modprobe" # the kernel's path for it
for module in "${modules[@]}"; do
    modprobe -d "$kernel" -S "$release" --show-depends "$module" | awk '$1 == "insmod" { print $2 }'
done | sort -u | while read -r path; do
    install -D -m 644 "$path" "$root/lib/modules/$release/${path##*"/$release/"}"
done
cp "$kernel/lib/modules/$release"/modules.{builtin,builtin.modinfo,order} "$root/lib/modules/$release/"
depmod -b "$root" "$release"
install -m 755 "$here/init" "$root/init"
install -m 755 "$here/down" "$root/etc/down"
install -m 644 "$here/inittab" "$root/etc/inittab"

mkdir "$work/guest"
find "$kernel"/{boot,lib/modules/"$release"} -name 'vmlinuz*' -exec cp {} "$work/guest/vmlinuz" \; 2>/dev/null || true
[ -e "$work/guest/vmlinuz" ] || die "no vmlinuz is in the packages of $package"
(cd "$root" && find . | LC_ALL=C sort | cpio -o -H newc --quiet --owner 0:0) >"$work/guest/root.cpio"
# Another process may have built the same guest first.
mv -T "$work/guest" "$guest" 2>/dev/null || [ -e "$guest/root.cpio" ] || die "cannot put the guest into $guest"
# Deletes guests that were not used for a month.
find "$cache" -mindepth 1 -maxdepth 1 -mtime +30 -exec rm -rf {} +
echo "$guest"
