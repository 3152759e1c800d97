#!/usr/bin/env bash
# Runs a test with the files of a release in the place of the repository's own: go test -exec=test/release/inplace.sh.
# OXIDE_RELEASE is the folder of the release. In the folder OXIDE_RELEASE_FILES are the programs and images, which the
# tests use instead of building them, and all files of the release. OXIDE_RELEASE_VERSION is its version.
set -euo pipefail
if [ "${1:-}" != --inside ]; then
    exec unshare --mount --propagation=private "$0" --inside "$@"
fi
shift
root=$(realpath "$(dirname "$0")/../..")
version=$(cat "$root/VERSION")
release=$(realpath "$OXIDE_RELEASE")
export OXIDE_RELEASE_VERSION=$version
export OXIDE_RELEASE_FILES=/mnt # a file system in memory, which ends with this mount namespace
mount -t tmpfs -o size=1g tmpfs "$OXIDE_RELEASE_FILES"
cd "$OXIDE_RELEASE_FILES"
ln -s "$release"/* .
mkdir programs images
tar -xzf "$release/oxide-csi-$version-linux-amd64.tar.gz" -C programs --strip-components=1
tar -xzf "$release/oxide-csi-$version-manifests.tar.gz"
tar -xzf "$release/oxide-csi-$version-nomad.tar.gz"
tar -xzf "$release/oxide-csi-$version.tgz"
for image in oxide-csi-plugin oxide-csi-controller oxide-cosi; do
    for kind in oci docker; do cp "$release/$image-$version.$kind.tar" "images/$image.$kind.tar"; done
done
mount --bind "oxide-csi-$version-manifests" "$root/deploy/k8s"
mount --bind "oxide-csi-$version-nomad" "$root/deploy/nomad"
mount --bind programs/systemd "$root/deploy/systemd"
mount --bind oxide-csi "$root/deploy/helm/oxide-csi"
cd "$OLDPWD"
exec "$@"
