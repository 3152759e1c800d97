#!/usr/bin/env bash
# Fetches packages of a release of Debian, other than this machine's, into a new folder:
#
#     test/matrix/debian.sh root trixie FOLDER      a root folder made from the packages with the node's tools
#     test/matrix/debian.sh kernel trixie FOLDER    the packages of the cloud kernel
#
# Needs root, and a Debian machine with the keys of its archive.
set -euo pipefail
what=$1 release=$2 folder=$3
packages=(
    base-files libc-bin bash dash coreutils findutils grep sed procps mount util-linux
    e2fsprogs xfsprogs btrfs-progs cryptsetup-bin dmsetup
)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$folder" "$work"/{lists/partial,archives/partial}
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
export APT_CONFIG=$work/apt.conf
apt-get update -qq >&2
case $what in
kernel)
    release=$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/^ *Depends: linux-image-//p')
    # Until Debian 13 it is one package.
    mapfile -t packages < <(apt-cache pkgnames | grep -xE "linux-(image|base|binary|modules)-${release//+/\\+}")
    cd "$folder"
    apt-get download -qq "${packages[@]}" >&2
    ;;
root)
    apt-get install -qq --yes --no-install-recommends --download-only "${packages[@]}" >&2
    for name in bin sbin lib lib64; do # as in Debian, all of them are below /usr
        mkdir -p "$folder/usr/$name"
        ln -s "usr/$name" "$folder/$name"
    done
    for package in "$work"/archives/*.deb; do
        dpkg-deb --fsys-tarfile "$package" | tar -C "$folder" -xf - --keep-directory-symlink
        basename "$package" >>"$folder/packages"
    done
    mkdir -p "$folder"/{dev,proc,sys,tmp,run,repo,tests}
    ln -sf /proc/self/mounts "$folder/etc/mtab"
    ;;
*)
    echo "debian.sh: $what is neither root nor kernel" >&2
    exit 1
    ;;
esac
