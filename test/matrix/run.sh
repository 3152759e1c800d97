#!/usr/bin/env bash
# Runs the tests of the node with the tools of another release of Debian, in a root folder made from its packages.
#
#     test/matrix/run.sh trixie                                  the tests of all packages
#     test/matrix/run.sh trixie -test.run=TestFeatures           some of them
#
# The kernel is this machine's: see VM_KERNEL in test/vm/guest.sh for another one. Needs root, and a Debian machine with
# the keys of its archive.
set -euo pipefail
release=$1
shift
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
tested=(core/filesystem core/luks core/device core/mount core/node)
packages=(
    base-files libc-bin bash dash coreutils findutils grep sed procps mount util-linux
    e2fsprogs xfsprogs btrfs-progs cryptsetup-bin dmsetup
)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{root,lists/partial,archives/partial,bin}
: >"$work/status"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian $release main" >"$work/sources.list"
cat >"$work/apt.conf" <<EOF
APT::Sandbox::User "root";
Dir::Etc::SourceList "$work/sources.list";
Dir::Etc::SourceParts "/dev/null";
Dir::State::Lists "$work/lists";
Dir::State::status "$work/status";
Dir::Cache "$work";
EOF
(
    export APT_CONFIG=$work/apt.conf
    apt-get update -qq
    apt-get install -qq --yes --no-install-recommends --download-only "${packages[@]}"
) >&2
for folder in bin sbin lib lib64; do # as in Debian, all of them are below /usr
    mkdir -p "$work/root/usr/$folder"
    ln -s "usr/$folder" "$work/root/$folder"
done
for package in "$work"/archives/*.deb; do
    dpkg-deb --fsys-tarfile "$package" | tar -C "$work/root" -xf - --keep-directory-symlink
done
mkdir -p "$work"/root/{dev,proc,sys,tmp,run,repo,tests}
ln -sf /proc/self/mounts "$work/root/etc/mtab"

failed=
for package in "${tested[@]}"; do
    go test -c -o "$work/bin/" "./$package"
    echo "== $package with the tools of $release"
    # shellcheck disable=SC2016 # the inner shell expands it
    unshare --mount --propagation=private bash -euc '
        root=$1 package=$2
        shift 2
        mount --bind "$root/root" "$root/root"
        for folder in dev sys; do mount --rbind "/$folder" "$root/root/$folder"; done
        mount -t proc proc "$root/root/proc"
        mount -t tmpfs tmpfs "$root/root/tmp"
        mount --bind "$PWD" "$root/root/repo"
        mount --bind "$root/bin" "$root/root/tests"
        exec env -i PATH=/usr/sbin:/usr/bin HOME=/tmp chroot "$root/root" bash -c "cd /repo/$package && exec /tests/${package##*/}.test \"\$@\"" bash "$@"
    ' bash "$work" "$package" -test.timeout=30m "$@" || failed="$failed $package"
done
[ -z "$failed" ] || { echo "failed with the tools of $release:$failed" >&2; exit 1; }
