// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/md5"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// authority returns the certificate of a new authority in PEM. Its key is thrown away.
func authority(t *testing.T, name string) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	must(t, err)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// holds reports whether any file of an image has the certificate, in PEM or in DER.
func holds(t *testing.T, image v1.Image, certificate []byte) bool {
	t.Helper()
	wanted, _ := pem.Decode(certificate)
	for _, content := range contents(t, image) {
		if bytes.Contains(content, wanted.Bytes) {
			return true
		}
		for block, rest := pem.Decode(content); block != nil; block, rest = pem.Decode(rest) {
			if bytes.Equal(block.Bytes, wanted.Bytes) {
				return true
			}
		}
	}
	return false
}

// system is the root folder of a Debian with the package ca-certificates, and what its bundle should have.
type system struct {
	root string
	// owned are the certificates of the package, and paths their files.
	owned [][]byte
	paths []string
}

const (
	mozilla   = "/usr/share/ca-certificates/mozilla/"
	checksums = "/var/lib/dpkg/info/ca-certificates.md5sums"
)

func newSystem(t *testing.T) *system {
	t.Helper()
	s := &system{root: t.TempDir()}
	sums := "0123456789abcdef0123456789abcdef  usr/sbin/update-ca-certificates\n"
	for _, name := range []string{"First", "Second"} {
		file := mozilla + name + ".crt"
		s.owned, s.paths = append(s.owned, authority(t, name)), append(s.paths, file)
		text := s.owned[len(s.owned)-1]
		s.write(t, file, text)
		sums += fmt.Sprintf("%x  %s\n", md5.Sum(text), file[1:])
	}
	s.write(t, "/etc/ssl/certs/ca-certificates.crt", bytes.Join(s.owned, nil))
	s.write(t, "/usr/share/doc/ca-certificates/copyright", []byte("the licence"))
	s.write(t, checksums, []byte(sums))
	s.write(t, "/var/lib/dpkg/status", []byte("Package: ca-certificates\nStatus: install ok installed\n"+
		"Maintainer: Test <test@example.com>\nArchitecture: all\nVersion: 1\nDescription: test\n"))
	return s
}

func (s *system) write(t *testing.T, name string, content []byte) {
	t.Helper()
	file := filepath.Join(s.root, name)
	must(t, os.MkdirAll(filepath.Dir(file), 0o755))
	must(t, os.WriteFile(file, content, 0o644))
}

// An authority that was added to the building machine is not in the image.
func TestPlantedAuthority(t *testing.T) {
	for _, file := range []string{
		"/etc/ssl/certs/ca-certificates.crt",
		"/etc/ssl/certs/planted.pem",
		"/usr/local/share/ca-certificates/planted.crt",
		mozilla + "Planted.crt",
		"/usr/share/ca-certificates/planted/Planted.crt",
	} {
		t.Run(file, func(t *testing.T) {
			s, planted := newSystem(t), authority(t, "planted")
			s.write(t, file, bytes.Join(append(s.owned, planted), nil))
			image := build(t, options{certificates: true, system: s.root})
			for i, owned := range s.owned {
				if !holds(t, image, owned) {
					t.Errorf("the image does not have %s", s.paths[i])
				}
			}
			if holds(t, image, planted) {
				t.Error("the image has the planted authority")
			}
			// An image with the machine's file itself is found, so the check above can fail.
			careless, o := files{}, complete(t, options{})
			must(t, careless.copy(filepath.Join(s.root, file), certificatesFile))
			must(t, o.write([]files{careless}))
			if !holds(t, load(t, o.output), planted) {
				t.Error("the test does not find the planted authority where it is")
			}
		})
	}
}

// The tool makes no image when the package's own files are not as Debian made them.
func TestChangedPackage(t *testing.T) {
	planted := authority(t, "planted")
	for name, change := range map[string]func(t *testing.T, s *system){
		"file replaced": func(t *testing.T, s *system) { s.write(t, s.paths[0], planted) },
		"file extended": func(t *testing.T, s *system) {
			s.write(t, s.paths[1], slices.Concat(s.owned[1], planted))
		},
		"file missing":  func(t *testing.T, s *system) { must(t, os.Remove(s.root+s.paths[0])) },
		"no files":      func(t *testing.T, s *system) { s.write(t, checksums, nil) },
		"not installed": func(t *testing.T, s *system) { must(t, os.RemoveAll(s.root+"/var/lib/dpkg/info")) },
	} {
		t.Run(name, func(t *testing.T) {
			s := newSystem(t)
			change(t, s)
			o := complete(t, options{certificates: true, system: s.root})
			err := o.run()
			if err == nil || !strings.Contains(err.Error(), "ca-certificates") {
				t.Errorf("got %v, want an error that names the package", err)
			}
			if _, err := os.Stat(o.output); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("there is an archive: %v", err)
			}
		})
	}
}

// The same with this machine's own files and programs. The mount namespace leaves no trace, even if the test is killed.
func TestPlantedAuthorityOnThisMachine(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: mount namespace")
	}
	o, planted := complete(t, options{}), authority(t, "oxide-csi planted")
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "planted.crt"), planted, 0o644))
	if out, err := exec.Command("go", "build", "-o", dir, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	const script = `set -eu
cd "$1"; program=$2; output=$3
for folder in /usr/local/share/ca-certificates /usr/share/ca-certificates /etc/ssl/certs; do
    mkdir -p ".$folder"
    cp -a "$folder/." ".$folder"
    mount --bind ".$folder" "$folder"
done
cp planted.crt /usr/local/share/ca-certificates/oxide-csi-planted.crt
cp planted.crt /usr/share/ca-certificates/mozilla/oxide-csi-planted.crt
update-ca-certificates
./image -o "$output" -tag example.com/oxide-csi:v1 -program "$program" -certificates
./image -o careless.tar -tag example.com/careless:v1 -program /etc/ssl/certs/ca-certificates.crt`
	cmd := exec.Command("unshare", "--mount", "sh", "-c", script, "sh", dir, o.program, o.output)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if holds(t, load(t, o.output), planted) {
		t.Error("the image has the planted authority")
	}
	if !holds(t, load(t, filepath.Join(dir, "careless.tar")), planted) {
		t.Error("the machine's bundle does not have the planted authority, so this test proves nothing")
	}
	if _, err := os.Stat("/usr/local/share/ca-certificates/oxide-csi-planted.crt"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the planted authority is still there: %v", err)
	}
}
