#!/bin/sh
# Loads image archives into docker, podman or buildah, whichever is installed and works.
#
#   deploy/image/load.sh FILE...
set -eu
for engine in docker podman buildah; do
    "$engine" info >/dev/null 2>&1 || continue
    for file; do
        case $engine in
        buildah) buildah pull "docker-archive:$file" ;;
        *) "$engine" load --input "$file" ;;
        esac
    done
    exit 0
done
echo "load: none of docker, podman and buildah is installed and works; copy the archives: skopeo copy docker-archive:$1 docker://..." >&2
exit 1
