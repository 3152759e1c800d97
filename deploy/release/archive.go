// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// files are contents by path, with slashes.
type files map[string][]byte

// readFolder reads all files of a folder, also those of its folders. Each name gets a prefix.
func readFolder(folder, prefix string) (files, error) {
	f := files{}
	err := filepath.WalkDir(folder, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		name, err := filepath.Rel(folder, path)
		if err != nil {
			return err
		}
		return f.read(prefix+filepath.ToSlash(name), path)
	})
	return f, err
}

func (f files) read(name, path string) (err error) {
	f[name], err = os.ReadFile(path)
	return err
}

func (f files) addAll(other files) { maps.Copy(f, other) }

func (f files) below(folder string) files {
	moved := files{}
	for name, content := range f {
		moved[folder+name] = content
	}
	return moved
}

// replace replaces a text in a file. It fails unless the text is there a number of times.
func (f files) replace(name, old, replacement string, times int) error {
	text := string(f[name])
	if found := strings.Count(text, old); found != times {
		return fmt.Errorf("%s has %q %d times, want %d", name, old, found, times)
	}
	f[name] = []byte(strings.ReplaceAll(text, old, replacement))
	return nil
}

func (f files) writeTar(path string) error {
	return write(path, func(w io.Writer) error { return f.tar(w) })
}

func (f files) writeTarGzip(path string) error {
	return write(path, func(w io.Writer) error {
		compressed, err := gzip.NewWriterLevel(w, gzip.BestCompression) // its header has no name and no time
		if err != nil {
			return err
		}
		return errors.Join(f.tar(compressed), compressed.Close())
	})
}

// tar writes the files sorted, owned by root, without times. Programs and scripts are executable.
func (f files) tar(w io.Writer) error {
	archive := tar.NewWriter(w)
	for _, name := range slices.Sorted(maps.Keys(f)) {
		mode := int64(0o644)
		if base := path.Base(name); slices.Contains(programs, base) || bytes.HasPrefix(f[name], []byte("#!")) {
			mode = 0o755
		}
		header := &tar.Header{Name: name, Mode: mode, Size: int64(len(f[name])), Typeflag: tar.TypeReg, Format: tar.FormatPAX}
		if err := archive.WriteHeader(header); err != nil {
			return err
		}
		if _, err := archive.Write(f[name]); err != nil {
			return err
		}
	}
	return archive.Close()
}

func write(path string, content func(io.Writer) error) error {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	return errors.Join(content(file), file.Close())
}

func sum(content []byte) string { return fmt.Sprintf("%x", sha256.Sum256(content)) }
