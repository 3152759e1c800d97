#!/usr/bin/env bash
# Builds, through the Go module proxy, the programs that tests and make lint run:
#
#   test/programs/build.sh kubernetes    kube-apiserver and etcd
#   test/programs/build.sh cluster       those, and the rest of a cluster: controller-manager, scheduler, kubelet, kubectl
#   test/programs/build.sh sidecars      the CSI sidecars that the manifests name, and the snapshot controller
#   test/programs/build.sh conformance   Kubernetes' own tests of storage, what runs them, and what their pods run
#   test/programs/build.sh helm          helm and kustomize
#   test/programs/build.sh lint          golangci-lint
#   test/programs/build.sh prometheus    prometheus, without its service discoveries, and promtool
#   test/programs/build.sh prose         vale
#   test/programs/build.sh nomad         nomad
#   test/programs/build.sh versitygw     the S3 gateway behind the COSI driver
#   test/programs/build.sh cosign        cosign, which signs releases
#   test/programs/build.sh docker        Debian's dockerd and docker, unpacked: installed, they would be started
#
# The programs are in OXIDE_CSI_PROGRAMS (~/.cache/oxide-csi-plugin/programs), and are built again only when their
# versions change. With an empty build cache each takes about five minutes on two cores, golangci-lint two.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
programs=${OXIDE_CSI_PROGRAMS:-${XDG_CACHE_HOME:-$HOME/.cache}/oxide-csi-plugin/programs}
limit=${OXIDE_CSI_BUILD_LIMIT:-30m}
# KUBERNETES=1.36 builds that release: kubernetes/go-1.36.mod lists its modules. OXIDE_CSI_PROGRAMS then has to be another
# folder than that of the newest release.
release=go${KUBERNETES:+-$KUBERNETES}
mkdir -p "$programs"

# fresh NAME KEY: succeeds if NAME was built from KEY already.
fresh() { [ "$(cat "$programs/$1.key" 2>/dev/null)" = "$2" ]; }

# built NAME KEY: records that NAME was built from KEY.
built() { printf '%s\n' "$2" >"$programs/$1.key"; }

# build DIR FLAGS PACKAGE...: builds packages of the module in a folder, with the exact versions of its go.sum.
build() {
    local dir=$1 flags=$2 mod=go.mod
    shift 2
    [ "$dir" != "$here/kubernetes" ] || mod=$release.mod
    (
        cd "$dir"
        export CGO_ENABLED=${cgo:-0} GOFLAGS="-mod=readonly -buildvcs=false -trimpath"
        timeout "$limit" go build -modfile="$mod" -ldflags "-s -w $flags" -o "$programs/" "$@"
    )
}

# key FILE...: prints a hash of the files.
key() { cat "$@" | sha256sum | cut -d' ' -f1; }

# kube TARGET COMMAND...: builds commands of Kubernetes.
kube() {
    local target=$1 dir=$here/kubernetes version key package=k8s.io/component-base/version client=k8s.io/client-go/pkg/version
    shift
    version=$(cd "$dir" && go list -modfile="$release.mod" -m -f '{{.Version}}' k8s.io/kubernetes)
    key=$(key "$dir/$release".{mod,sum})
    fresh "$target" "$key" && return
    echo "programs: building $* $version"
    # Without a version the components regard each other as too old or too new.
    local set="-X $package.gitVersion=$version -X $package.gitMajor=1 -X $package.gitMinor=$(cut -d. -f2 <<<"$version") -X $client.gitVersion=$version"
    build "$dir" "$set" "${@/#/k8s.io/kubernetes/cmd/}"
    built "$target" "$key"
}

etcd() {
    local dir=$here/kubernetes key
    key=$(key "$dir/$release".{mod,sum})
    fresh etcd "$key" && return
    echo "programs: building etcd"
    (cd "$dir" && CGO_ENABLED=0 timeout "$limit" go build -modfile="$release.mod" -mod=readonly -buildvcs=false -trimpath -ldflags "-s -w" -o "$programs/etcd" go.etcd.io/etcd/server/v3)
    built etcd "$key"
}

kubernetes() {
    etcd
    kube kubernetes kube-apiserver
}

cluster() {
    kubernetes
    kube cluster kube-controller-manager kube-scheduler kubelet kubectl
    local dir=$here/kubernetes key
    key=$(key "$dir/$release".{mod,sum} "$dir"/*/main.go)
    fresh helpers "$key" && return
    build "$dir" "" ./registrar ./pause
    built helpers "$key"
}

# tools TARGET TITLE FLAG...: builds the commands in the tool lines of a folder's go.mod.
tools() {
    local target=$1 title=$2 dir=$here/$1 key packages
    shift 2
    key=$(key "$dir"/go.{mod,sum})
    fresh "$target" "$key" && return
    echo "programs: building $title"
    mapfile -t packages < <(cd "$dir" && go list tool)
    build "$dir" "" "$@" "${packages[@]}"
    built "$target" "$key"
}

sidecars() { tools sidecars "the CSI sidecars"; }
helm() { tools helm "helm and kustomize"; }
lint() { tools lint golangci-lint; }
versitygw() { tools versitygw versitygw; }
prometheus() { tools prometheus "prometheus and promtool" -tags=remove_all_sd; }
prose() { cgo=1 tools prose vale; } # its parsers of source code are in C

conformance() {
    local dir=$here/kubernetes key
    key=$(key "$dir/$release".{mod,sum} "$dir"/e2e/*)
    fresh conformance "$key" && return
    echo "programs: building Kubernetes' own tests"
    build "$dir" "" k8s.io/kubernetes/test/images/agnhost github.com/onsi/ginkgo/v2/ginkgo
    (cd "$dir" && CGO_ENABLED=0 timeout "$limit" go test -c -vet=off -modfile="$release.mod" -mod=readonly -trimpath -ldflags "-s -w" -o "$programs/e2e.test" ./e2e)
    built conformance "$key"
}

# Nomad's module replaces github.com/hashicorp/nomad/api by a folder that the module proxy does not have. The checksum
# database lacks the version of nomad/api of this release. A later version compiles.
NOMAD=v1.11.1
NOMAD_API=v0.0.0-20260907080526-08ef8f3d26da

nomad() {
    local key="$NOMAD $NOMAD_API" src mod
    fresh nomad "$key" && return
    echo "programs: building nomad $NOMAD"
    src=$(cd / && go mod download -json "github.com/hashicorp/nomad@$NOMAD" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
    mod=$programs/nomad.mod
    sed -e '\#^replace github.com/hashicorp/nomad/api => ./api#d' \
        -e "s#\(github.com/hashicorp/nomad/api\) v0.0.0-[0-9a-f-]*#\1 $NOMAD_API#" "$src/go.mod" >"$mod"
    cat "$src/go.sum" >"$programs/nomad.sum"
    (
        cd "$src"
        # The exec driver needs cgo. The tags select the generated codecs in the module.
        export CGO_ENABLED=1 GOFLAGS="-mod=mod -buildvcs=false -trimpath"
        timeout "$limit" go build -modfile="$mod" -tags "hashicorpmetrics codegen_generated" -ldflags "-s -w" -o "$programs/nomad" .
    )
    built nomad "$key"
}

COSIGN=v3.1.3

cosign() {
    fresh cosign "$COSIGN" && return
    echo "programs: building cosign $COSIGN"
    GOBIN=$programs CGO_ENABLED=0 GOFLAGS="-mod=mod -trimpath" timeout "$limit" go install -ldflags "-s -w" "github.com/sigstore/cosign/v3/cmd/cosign@$COSIGN"
    built cosign "$COSIGN"
}

docker() {
    local key folder=$programs/docker.io
    key=$(. /etc/os-release && echo "$ID $VERSION_ID")
    fresh docker "$key" && return
    echo "programs: unpacking docker.io of $key"
    rm -rf "$folder"
    mkdir "$folder"
    (
        cd "$folder"
        apt-get download -qq docker.io 2>/dev/null || { apt-get update -qq && apt-get download -qq docker.io; }
        dpkg-deb -x docker.io_*.deb .
        mv usr/sbin/dockerd usr/bin/docker ..
    )
    rm -rf "$folder"
    built docker "$key"
}

for name; do
    case $name in
    kubernetes | cluster | sidecars | conformance | helm | lint | versitygw | prometheus | prose | nomad | cosign | docker) "$name" ;;
    *)
        echo "programs: \"$name\" is none of kubernetes, cluster, sidecars, conformance, helm, lint, versitygw, prometheus, prose, nomad, cosign, docker" >&2
        exit 2
        ;;
    esac
done
