// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Command image makes a container image of one static program and of the Debian tools that it calls. It needs no daemon
// and no registry:
//
//	image -tag NAME:TAG -program PROGRAM [-o FILE] [-oci FOLDER] [-user UID] [-label KEY=VALUE]... [-notices FILE]
//		[-certificates] [TOOL...]
//	image -root FOLDER -program PROGRAM [-certificates] [TOOL...]
//
// FILE is an archive for docker load, podman load, ctr images import and skopeo. With -oci the same image is written as
// an OCI layout, too. With -root only the image's files are written, for a Dockerfile. Each FOLDER must be new: a file
// that an earlier run left there would become part of the image.
//
// Tools are copied from this machine, which must be a Debian. With them come the libraries that they need, the
// copyright of their packages, and the record of these packages where scanners look for it. With -certificates the
// image has the authorities of Debian's package ca-certificates, and no authority that was added to this machine. The
// image holds nothing else: no shell and no package manager. Equal inputs make an equal image.
package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing/fstest"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

func main() {
	syscall.Umask(0o022) // the modes of files below -root do not depend on the builder's umask
	opts := options{labels: map[string]string{}, system: "/"}
	flag.StringVar(&opts.output, "o", "image.tar", "archive to write")
	flag.StringVar(&opts.layout, "oci", "", "new directory for the image as an OCI layout, beside the archive")
	flag.StringVar(&opts.root, "root", "", "new directory for the image's files, instead of an image")
	flag.StringVar(&opts.program, "program", "", "static program to run")
	flag.StringVar(&opts.tag, "tag", "", "name of the image, with its tag")
	flag.StringVar(&opts.user, "user", "", "user to run as; root if empty")
	flag.StringVar(&opts.notices, "notices", "", "licences of the modules in the program, to add to the image")
	flag.BoolVar(&opts.certificates, "certificates", false, "add the authorities of Debian's package ca-certificates")
	flag.Func("label", "label of the image, KEY=VALUE; may be repeated", func(text string) error {
		key, value, found := strings.Cut(text, "=")
		if !found {
			return errors.New("expected KEY=VALUE")
		}
		opts.labels[key] = value
		return nil
	})
	flag.Parse()
	opts.tools = flag.Args()
	if err := opts.run(); err != nil {
		fmt.Fprintf(os.Stderr, "image: %v\n", err)
		os.Exit(1)
	}
}

type options struct {
	output, layout, root, program, tag, user, notices string
	labels                                            map[string]string
	certificates                                      bool
	tools                                             []string
	// system is the root folder of the Debian that has the certificates: / outside of tests.
	system string
}

func (o options) run() error {
	if o.program == "" || o.tag == "" && o.root == "" {
		return errors.New("-program is required, and -tag or -root")
	}
	program := files{}
	if err := program.copy(o.program, o.entrypoint()); err != nil {
		return err
	}
	if o.notices != "" {
		if err := program.copy(o.notices, "/usr/share/doc/oxide-csi/copyright"); err != nil {
			return err
		}
	}
	layers := []files{program}
	if len(o.tools) > 0 || o.certificates {
		system, err := o.debian()
		if err != nil {
			return err
		}
		layers = []files{system, program} // the layer that changes least comes first
	}
	if o.root == "" {
		return o.write(layers)
	}
	if err := os.Mkdir(o.root, 0o755); err != nil {
		return err
	}
	for _, layer := range layers {
		if err := os.CopyFS(o.root, fstest.MapFS(layer)); err != nil {
			return err
		}
	}
	return nil
}

func (o options) entrypoint() string { return "/" + filepath.Base(o.program) }

// write writes the archive, and the layout if one is wanted.
func (o options) write(layers []files) error {
	tag, err := name.NewTag(o.tag)
	if err != nil {
		return err
	}
	image, err := o.image(layers)
	if err != nil {
		return err
	}
	if o.layout != "" {
		if err := os.Mkdir(o.layout, 0o755); err != nil {
			return err
		}
		index := mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: image, Descriptor: v1.Descriptor{
			Platform:    &v1.Platform{OS: "linux", Architecture: runtime.GOARCH},
			Annotations: map[string]string{"org.opencontainers.image.ref.name": tag.TagStr()},
		}})
		if _, err := layout.Write(o.layout, index); err != nil {
			return err
		}
	}
	return tarball.WriteToFile(o.output, tag, image)
}

// image has the media types of OCI, which a layout must have. An archive names none.
func (o options) image(layers []files) (v1.Image, error) {
	var added []mutate.Addendum
	for _, files := range layers {
		layer, err := files.layer()
		if err != nil {
			return nil, err
		}
		added = append(added, mutate.Addendum{Layer: layer, History: v1.History{Created: epoch, CreatedBy: "image"}})
	}
	base := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	image, err := mutate.ConfigFile(base, &v1.ConfigFile{
		Architecture: runtime.GOARCH,
		OS:           "linux",
		Created:      epoch,
		RootFS:       v1.RootFS{Type: "layers"},
		Config: v1.Config{
			User:       o.user,
			Env:        []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"},
			Entrypoint: []string{o.entrypoint()},
			Labels:     o.labels,
		},
	})
	if err != nil {
		return nil, err
	}
	return mutate.Append(image, added...)
}

// epoch is the creation time of every image, so that equal inputs make equal images.
var epoch = v1.Time{Time: time.Unix(0, 0).UTC()}

// files are the files, links and folders of a layer by their path, which does not begin with a slash. Root owns them,
// and they have no time.
type files fstest.MapFS

func (f files) add(name string, mode fs.FileMode, content []byte) {
	name = strings.TrimPrefix(name, "/")
	f[name] = &fstest.MapFile{Mode: mode, Data: content}
	for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
		f[dir] = &fstest.MapFile{Mode: fs.ModeDir | 0o755}
	}
}

// copy adds a file of this machine. It follows links.
func (f files) copy(from, name string) error {
	content, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	info, err := os.Stat(from)
	if err != nil {
		return err
	}
	mode := fs.FileMode(0o644)
	if info.Mode()&0o111 != 0 {
		mode = 0o755
	}
	f.add(name, mode, content)
	return nil
}

// layer packs the files, sorted by name.
func (f files) layer() (v1.Layer, error) {
	var text bytes.Buffer
	w := tar.NewWriter(&text)
	if err := errors.Join(w.AddFS(fstest.MapFS(f)), w.Close()); err != nil {
		return nil, err
	}
	open := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(text.Bytes())), nil }
	return tarball.LayerFromOpener(open, tarball.WithMediaType(types.OCILayer), tarball.WithCompressedCaching)
}
