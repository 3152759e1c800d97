// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"bytes"
	"crypto/md5"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// debian returns a root filesystem for the program, with tools of this machine, with certificates, or with both.
func (o options) debian() (files, error) {
	f := files{}
	// As in Debian, programs and libraries are all below /usr.
	for _, dir := range []string{"bin", "sbin", "lib", "lib64"} {
		f.add(dir, fs.ModeSymlink|0o777, []byte("usr/"+dir))
	}
	f.add("etc/mtab", fs.ModeSymlink|0o777, []byte("/proc/self/mounts"))
	f.add("etc/passwd", 0o644, []byte("root:x:0:0:root:/:/usr/sbin/nologin\n"+
		"nonroot:x:65532:65532:nonroot:/:/usr/sbin/nologin\n"))
	f.add("etc/group", 0o644, []byte("root:x:0:\nnonroot:x:65532:\n"))
	if err := f.addTools(o.tools); err != nil {
		return nil, err
	}
	if o.certificates {
		return f, f.addCertificates(o.system)
	}
	return f, nil
}

// certificatesFile is where Go's TLS looks first for the authorities that it trusts.
const certificatesFile = "/etc/ssl/certs/ca-certificates.crt"

// addCertificates adds the authorities of Debian's package ca-certificates: the files that the package owns, as its
// checksums have them. The bundle of the building machine must not be used. It can hold private authorities, and the
// controller would trust everyone who has such an authority's key to be a rack.
//
// The checksums are MD5. They protect from a machine that was changed in good faith, not from one that deceives dpkg.
func (f files) addCertificates(system string) error {
	sums, err := os.ReadFile(filepath.Join(system, "/var/lib/dpkg/info/ca-certificates.md5sums"))
	if err != nil {
		return fmt.Errorf("%w: install the package ca-certificates, see make deps", err)
	}
	var bundle bytes.Buffer
	for line := range strings.Lines(string(sums)) {
		sum, name, _ := strings.Cut(strings.TrimSpace(line), "  ")
		if !strings.HasPrefix(name, "usr/share/ca-certificates/") {
			continue
		}
		text, err := os.ReadFile(filepath.Join(system, name))
		if err != nil {
			return fmt.Errorf("%w: reinstall the package ca-certificates", err)
		}
		if fmt.Sprintf("%x", md5.Sum(text)) != sum {
			return fmt.Errorf("/%s differs from the package's file: reinstall the package ca-certificates", name)
		}
		bundle.Write(append(text, '\n'))
	}
	if bundle.Len() == 0 {
		return errors.New("the package ca-certificates has no certificates")
	}
	f.add(certificatesFile, 0o644, bundle.Bytes())
	return f.addPackage(system, "ca-certificates")
}

func (f files) addTools(tools []string) error {
	var paths []string
	for _, tool := range tools {
		found, err := exec.LookPath(tool)
		if err != nil {
			return fmt.Errorf("%w: install its package, see make deps", err)
		}
		libraries, err := libraries(found)
		if err != nil {
			return err
		}
		paths = append(append(paths, found), libraries...)
		if strings.HasPrefix(tool, "mkfs.ext") {
			paths = append(paths, "/etc/mke2fs.conf") // mkfs's defaults
		}
		if tool == "cryptsetup" {
			paths = append(paths, threadLibrary(libraries)...)
		}
	}
	owners := ownersOf(paths)
	for _, path := range paths {
		if owners[merged(path)] == "" {
			return fmt.Errorf("no Debian package owns %s", path)
		}
		if err := f.copy(path, merged(path)); err != nil {
			return err
		}
	}
	for _, name := range slices.Compact(slices.Sorted(maps.Values(owners))) {
		if err := f.addPackage("/", name); err != nil {
			return err
		}
	}
	return nil
}

// unmerged matches a file that is named below the root folder although it is below /usr.
var unmerged = regexp.MustCompile(`^/(s?bin|lib(64)?)/`)

func merged(file string) string { return unmerged.ReplaceAllString(file, "/usr$0") }

// libraries returns the paths of the libraries that the dynamic linker loads for a program, and of the linker.
func libraries(program string) ([]string, error) {
	out, err := exec.Command("ldd", program).Output()
	if err != nil {
		return nil, fmt.Errorf("ldd %s: %w", program, err)
	}
	var paths []string
	for field := range strings.FieldsSeq(string(out)) {
		if strings.HasPrefix(field, "/") {
			paths = append(paths, field)
		}
	}
	return paths, nil
}

// threadLibrary returns the library that libc loads when a thread ends. ldd does not show it. Without it cryptsetup is
// aborted when it derives a key on two processors.
func threadLibrary(libraries []string) (paths []string) {
	for _, library := range libraries {
		if filepath.Base(library) == "libc.so.6" {
			paths = append(paths, filepath.Join(filepath.Dir(library), "libgcc_s.so.1"))
		}
	}
	return paths
}

// ownersOf returns the Debian package of each file. A package may list a file below / or below /usr, so dpkg-query is
// asked for both names, and fails for one of them.
func ownersOf(paths []string) map[string]string {
	args := []string{"--search"}
	for _, path := range paths {
		args = append(args, merged(path), strings.TrimPrefix(merged(path), "/usr"))
	}
	out, _ := exec.Command("dpkg-query", args...).Output()
	owners := map[string]string{}
	for line := range strings.Lines(string(out)) {
		owner, path, _ := strings.Cut(strings.TrimSpace(line), ": ")
		owners[merged(path)], _, _ = strings.Cut(owner, ":")
	}
	return owners
}

// addPackage records that the image has files of a Debian package, and adds the package's copyright.
func (f files) addPackage(system, name string) error {
	admin := filepath.Join(system, "/var/lib/dpkg")
	status, err := exec.Command("dpkg-query", "--admindir="+admin, "--status", name).Output()
	if err != nil {
		return fmt.Errorf("dpkg-query --status %s: %w", name, err)
	}
	f.add("var/lib/dpkg/status.d/"+name, 0o644, status)
	copyright := "/usr/share/doc/" + name + "/copyright"
	return f.copy(filepath.Join(system, copyright), copyright)
}
