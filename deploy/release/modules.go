// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"archive/tar"
	"bytes"
	"debug/buildinfo"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
)

// component is a Go module, or a Debian package in an image.
type component struct {
	name, version string
	// url is the package URL, see github.com/package-url/purl-spec.
	url string
	// licence is an SPDX expression, or empty: the copyright files in the image describe Debian packages.
	licence string
	// texts are the licence texts and notices.
	texts []string
}

// contents are what a program, an archive or an image is made of.
type contents struct {
	name, version string
	components    []component
}

// modules returns the Go modules that the programs link, the standard library among them. It fails if a module has no
// licence that is known to be compatible with that of this project.
func (r release) modules(paths ...string) (contents, error) {
	goroot, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		return contents{}, fmt.Errorf("go env GOROOT: %w", err)
	}
	library, err := licensed("std", []string{strings.TrimSpace(string(goroot))})
	if err != nil {
		return contents{}, err
	}
	library.version = strings.TrimPrefix(runtime.Version(), "go")
	library.url = "pkg:golang/std@" + library.version
	c := contents{name: pluginProgram, version: r.version, components: []component{library}}
	for _, path := range paths {
		info, err := buildinfo.ReadFile(path)
		if err != nil {
			return contents{}, err
		}
		for _, module := range info.Deps {
			if slices.ContainsFunc(c.components, func(c component) bool { return c.name == module.Path }) {
				continue
			}
			found, err := licensed(module.Path, r.folders[module.Path])
			if err != nil {
				return contents{}, err
			}
			found.version, found.url = module.Version, "pkg:golang/"+module.Path+"@"+module.Version
			c.components = append(c.components, found)
		}
	}
	return c, nil
}

// moduleFolders returns the folders of each module in which licences of the linked packages are: those of its packages,
// and all above them in the module. The module's own folder is the first. Some packages are linked on one platform.
func moduleFolders(platforms []string) (map[string][]string, error) {
	folders := map[string][]string{}
	for _, platform := range platforms {
		packages, err := linkedPackages(platform)
		if err != nil {
			return nil, err
		}
		for _, p := range packages {
			for folder := p.folder; strings.HasPrefix(folder, p.root); folder = filepath.Dir(folder) {
				if !slices.Contains(folders[p.module], folder) {
					folders[p.module] = append(folders[p.module], folder)
				}
			}
		}
	}
	for _, list := range folders {
		slices.Sort(list)
	}
	return folders, nil
}

// linkedPackage is a package of a module. root is the folder of the module.
type linkedPackage struct{ module, root, folder string }

// linkedPackages returns the packages that the programs for a platform link, without those of the standard library.
func linkedPackages(platform string) (packages []linkedPackage, err error) {
	system, architecture, _ := strings.Cut(platform, "/")
	names, _ := programsFor(platform)
	args := []string{"list", "-deps", "-f", "{{with .Module}}{{.Path}}\t{{.Dir}}{{end}}\t{{.Dir}}"}
	for _, name := range names {
		args = append(args, "./cmd/"+name)
	}
	cmd := exec.Command("go", args...)
	cmd.Env = append(os.Environ(), "GOFLAGS=", "CGO_ENABLED=0", "GOOS="+system, "GOARCH="+architecture)
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list for %s: %w", platform, err)
	}
	for line := range strings.Lines(string(out)) {
		if fields := strings.Split(strings.TrimSpace(line), "\t"); len(fields) == 3 {
			packages = append(packages, linkedPackage{fields[0], fields[1], fields[2]})
		}
	}
	return packages, nil
}

// licences are the licences that may be linked into a program under MPL-2.0, with sentences that are all in its text,
// or in the text of a module that refers to it.
var licences = []struct {
	id        string
	sentences []string
}{
	{"Apache-2.0", []string{"Apache License Version 2.0, January 2004"}},
	{"Apache-2.0", []string{"Licensed under the Apache License, Version 2.0"}},
	{"MPL-2.0", []string{"Mozilla Public License, version 2.0"}},
	{"MPL-2.0", []string{"Mozilla Public License Version 2.0"}},
	{"BSD-3-Clause", []string{"Redistribution and use in source and binary forms", "endorse or promote products"}},
	{"BSD-2-Clause", []string{"Redistribution and use in source and binary forms"}},
	{"MIT", []string{"Permission is hereby granted, free of charge", "shall be included in all copies"}},
	{"ISC", []string{"Permission to use, copy, modify, and/or distribute this software for any purpose"}},
	{"ISC", []string{"Permission to use, copy, modify, and distribute this software for any purpose"}},
}

// licensed finds the licence of a module in its folders, and what has to be passed on with the module.
func licensed(name string, folders []string) (component, error) {
	c := component{name: name}
	var ids []string
	for _, folder := range folders {
		for _, pattern := range []string{"[Ll][Ii][Cc][Ee][Nn][CcSs][Ee]*", "COPYING*", "NOTICE*", "PATENTS*"} {
			paths, err := filepath.Glob(filepath.Join(folder, pattern))
			if err != nil {
				return component{}, err
			}
			for _, path := range paths {
				info, err := os.Stat(path)
				if err != nil {
					return component{}, err
				}
				if info.IsDir() || strings.HasSuffix(path, ".go") {
					continue
				}
				text, err := os.ReadFile(path)
				if err != nil {
					return component{}, err
				}
				found := recognise(string(text))
				if len(found) == 0 && strings.Contains(strings.ToLower(filepath.Base(path)), "licen") {
					return component{}, fmt.Errorf("%s: not known: add the licence if it is compatible with MPL-2.0", path)
				}
				ids = append(ids, found...)
				c.texts = append(c.texts, strings.TrimSpace(string(text)))
			}
		}
	}
	if len(ids) == 0 {
		return component{}, fmt.Errorf("module %s has no licence in %q", name, folders)
	}
	slices.Sort(ids)
	c.licence = strings.Join(slices.Compact(ids), " AND ")
	return c, nil
}

// recognise returns the licences in a text.
func recognise(text string) (ids []string) {
	text = strings.ToLower(strings.Join(strings.Fields(text), " "))
	for _, licence := range licences {
		missing := func(s string) bool { return !strings.Contains(text, strings.ToLower(s)) }
		if slices.Contains(ids, licence.id) || slices.ContainsFunc(licence.sentences, missing) {
			continue
		}
		if licence.id != "BSD-2-Clause" || !slices.Contains(ids, "BSD-3-Clause") { // its sentences are in both
			ids = append(ids, licence.id)
		}
	}
	return ids
}

// notices returns the texts that must be passed on with the programs.
func (c contents) notices() ([]byte, error) {
	var text bytes.Buffer
	fmt.Fprintf(
		&text,
		"oxide-csi %s is licensed under the Mozilla Public License 2.0. It contains the following modules.\n",
		c.version,
	)
	for _, component := range c.components {
		if len(component.texts) == 0 {
			return nil, fmt.Errorf("%s has no licence text", component.name)
		}
		fmt.Fprintf(
			&text,
			"\n%s\n%s %s: %s\n\n",
			strings.Repeat("=", 80),
			component.name,
			component.version,
			component.licence,
		)
		fmt.Fprintln(&text, strings.Join(component.texts, "\n\n"))
	}
	return text.Bytes(), nil
}

// debianPackages returns the packages that an image records in /var/lib/dpkg/status.d.
func debianPackages(image v1.Image) ([]component, error) {
	stream := mutate.Extract(image)
	defer stream.Close()
	var packages []component
	for archive := tar.NewReader(stream); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			slices.SortFunc(packages, func(a, b component) int { return strings.Compare(a.name, b.name) })
			return packages, nil
		}
		if err != nil {
			return nil, err
		}
		if !strings.HasPrefix(header.Name, "var/lib/dpkg/status.d/") || header.Typeflag != tar.TypeReg {
			continue
		}
		status, err := io.ReadAll(archive)
		if err != nil {
			return nil, err
		}
		fields := map[string]string{}
		for line := range strings.Lines(string(status)) {
			if key, value, found := strings.Cut(strings.TrimSpace(line), ": "); found && !strings.HasPrefix(line, " ") {
				fields[key] = value
			}
		}
		name, version := fields["Package"], fields["Version"]
		packages = append(packages, component{name: name, version: version, url: fmt.Sprintf("pkg:deb/debian/%s@%s?arch=%s",
			name, strings.NewReplacer(":", "%3A", "+", "%2B", "~", "~").Replace(version), fields["Architecture"])})
	}
}
