#!/usr/bin/env bash
# go-containerregistry makes OCI images with parts of Docker's media types, and says nothing.
#
# Version: github.com/google/go-containerregistry v0.22.1
# Guess:   mutate.MediaType(image, OCI manifest) makes an OCI image, so its configuration has OCI's media type, too. A
#          layer of Docker's type is converted when it is appended, or is an error.
# Seen:    the manifest says OCI, its configuration and its layer keep Docker's types. mutate.ConfigMediaType has to be
#          called as well, and each layer has to be made with OCI's type.
# Why:     the name and the comment speak of the image. A registry accepts the mixture, and readers differ: the image
#          specification lets a reader stop at a type that it does not know.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
cat >go.mod <<'END'
module finding

go 1.26

require github.com/google/go-containerregistry v0.22.1
END
cat >main.go <<'END'
package main

import (
	"fmt"

	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

func main() {
	layer, err := random.Layer(10, types.DockerLayer)
	check(err)
	image, err := mutate.AppendLayers(mutate.MediaType(empty.Image, types.OCIManifestSchema1), layer)
	check(err)
	manifest, err := image.Manifest()
	check(err)
	fmt.Println(manifest.MediaType)
	fmt.Println(manifest.Config.MediaType)
	fmt.Println(manifest.Layers[0].MediaType)
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
END
GOFLAGS=-mod=mod go run . >output 2>log || { cat log >&2; exit 1; }
diff - output <<'END' || { echo "changed: see above" >&2; exit 1; }
application/vnd.oci.image.manifest.v1+json
application/vnd.docker.container.image.v1+json
application/vnd.docker.image.rootfs.diff.tar.gzip
END
echo "still so: an OCI manifest with Docker's configuration and layer"
