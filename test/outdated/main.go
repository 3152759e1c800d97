// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Command outdated compares the versions that this repository pins with the newest ones in the module proxy: the
// modules of go.mod, the programs of test/programs, and what the Makefile, the workflows and build.sh name themselves.
// It fails if one is more than one minor version behind, unless reasons.txt says why. A reason that is not needed any
// more fails, too.
//
// It compares versions of one path only: a new major version is another module. Versions without a tag are not
// compared. It is run from the folder of the repository.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

func main() {
	if err := run(os.Stdout); err != nil {
		fmt.Fprintf(os.Stderr, "outdated: %v\n", err)
		os.Exit(1)
	}
}

// pin is a version of a module, and the newest one. That is empty if the proxy does not tell.
type pin struct{ place, path, version, newest string }

func run(out io.Writer) error {
	text, err := os.ReadFile("test/outdated/reasons.txt")
	if err != nil {
		return err
	}
	reasons, err := parseReasons(string(text))
	if err != nil {
		return err
	}
	pins, err := allPins()
	if err != nil {
		return err
	}
	return report(out, pins, reasons)
}

// parseReasons parses lines of a module's path and a reason.
func parseReasons(text string) (map[string]string, error) {
	reasons := map[string]string{}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		path, reason, found := strings.Cut(line, " ")
		if !found {
			return nil, fmt.Errorf("reasons.txt: %q has no reason", line)
		}
		reasons[path] = reason
	}
	return reasons, nil
}

// report prints what is behind, and what is not known. It fails if that is most.
func report(out io.Writer, pins []pin, reasons map[string]string) error {
	unused, unknown, errs := maps.Clone(reasons), 0, []error(nil)
	for _, p := range pins {
		if p.newest == "" {
			unknown++
			fmt.Fprintf(out, "%s: %s %s: the module proxy does not tell the newest version\n", p.place, p.path, p.version)
		}
		if !behind(p.version, p.newest) {
			continue
		}
		reason := reasons[p.path]
		delete(unused, p.path)
		if reason == "" {
			reason = "NO REASON"
			errs = append(
				errs,
				fmt.Errorf("%s has %s %s, the newest is %s: update it, or give a reason in test/outdated/reasons.txt",
					p.place, p.path, p.version, p.newest),
			)
		}
		fmt.Fprintf(out, "%s: %s %s, newest %s: %s\n", p.place, p.path, p.version, p.newest, reason)
	}
	for _, path := range slices.Sorted(maps.Keys(unused)) {
		errs = append(errs, fmt.Errorf("reasons.txt has %s, which is not behind: delete the line", path))
	}
	if 2*unknown > len(pins) {
		errs = append(errs, errors.New("the module proxy does not tell the newest versions of most modules"))
	}
	fmt.Fprintf(out, "%d versions compared\n", len(pins)-unknown)
	return errors.Join(errs...)
}

var semantic = regexp.MustCompile(`^v(\d+)\.(\d+)\.`)

// behind reports whether a version is more than one minor version behind, or a major one.
func behind(version, newest string) bool {
	have, latest := semantic.FindStringSubmatch(version), semantic.FindStringSubmatch(newest)
	if have == nil || latest == nil {
		return false
	}
	number := func(s string) int {
		n, err := strconv.Atoi(s)
		if err != nil {
			panic(err) // the expression matches digits
		}
		return n
	}
	return number(latest[1]) > number(have[1]) ||
		latest[1] == have[1] && number(latest[2]) > number(have[2])+1
}

// allPins asks the module proxy for the newest version of every pin.
func allPins() ([]pin, error) {
	files, err := filepath.Glob("test/programs/*/go.mod")
	if err != nil {
		return nil, err
	}
	var pins []pin
	for _, file := range append([]string{"go.mod"}, files...) {
		modules, err := required(file)
		if err != nil {
			return nil, err
		}
		found, err := newest(file, modules)
		if err != nil {
			return nil, err
		}
		pins = append(pins, found...)
	}
	named, err := namedVersions()
	if err != nil {
		return nil, err
	}
	for _, p := range named {
		latest, err := newest(p.place, []string{p.path + "@latest"})
		if err != nil {
			return nil, err
		}
		for _, l := range latest {
			pins = append(pins, pin{p.place, p.path, p.version, l.newest})
		}
	}
	return pins, nil
}

// required returns the modules that a go.mod requires. Of a module with tools these are only what it asks for: the
// other versions are those that the tools were released with.
func required(file string) ([]string, error) {
	text, err := exec.Command("go", "mod", "edit", "-json", file).Output()
	if err != nil {
		return nil, fmt.Errorf("go mod edit -json %s: %w", file, err)
	}
	var content struct {
		Require []struct {
			Path     string
			Indirect bool
		}
		Tool []struct{ Path string }
	}
	if err := json.Unmarshal(text, &content); err != nil {
		return nil, err
	}
	var paths []string
	for _, module := range content.Require {
		tool := false
		for _, t := range content.Tool {
			tool = tool || strings.HasPrefix(t.Path+"/", module.Path+"/")
		}
		if tool || !module.Indirect || len(content.Tool) == 0 {
			paths = append(paths, module.Path)
		}
	}
	return paths, nil
}

// newest returns the versions of modules and the newest ones.
func newest(place string, modules []string) ([]pin, error) {
	args := []string{"list", "-m", "-u", "-e", "-mod=readonly", "-json=Path,Version,Update,Error"}
	cmd := exec.Command("go", append(args, modules...)...)
	cmd.Stderr = os.Stderr
	if filepath.Base(place) == "go.mod" {
		cmd.Dir = filepath.Dir(place)
	}
	text, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", strings.Join(cmd.Args, " "), err)
	}
	var pins []pin
	for decoder := json.NewDecoder(bytes.NewReader(text)); decoder.More(); {
		var module struct {
			Path, Version string
			Update        *struct{ Version string }
			Error         *struct{ Err string }
		}
		if err := decoder.Decode(&module); err != nil {
			return nil, err
		}
		p := pin{place, module.Path, module.Version, module.Version}
		switch {
		case module.Error != nil:
			p.newest = ""
		case module.Update != nil:
			p.newest = module.Update.Version
		}
		pins = append(pins, p)
	}
	return pins, nil
}

var (
	goRun = regexp.MustCompile(`go run ([^@\s]+)/cmd/\S+@(v\S+)`)
	// A line of build.sh such as NOMAD=v1.2.3, or NOMAD_API=...
	assigned = regexp.MustCompile(`(?m)^([A-Z]+)=(v[0-9]\S*)$`)
)

// assignedModules are the modules of the variables in build.sh.
var assignedModules = map[string]string{
	"NOMAD":  "github.com/hashicorp/nomad",
	"COSIGN": "github.com/sigstore/cosign/v3",
}

// namedVersions returns the versions that are in no go.mod.
func namedVersions() ([]pin, error) {
	workflows, err := filepath.Glob(".github/workflows/*")
	if err != nil {
		return nil, err
	}
	var pins []pin
	for _, file := range append([]string{"Makefile"}, workflows...) {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		for _, match := range goRun.FindAllStringSubmatch(string(text), -1) {
			pins = append(pins, pin{place: file, path: match[1], version: match[2]})
		}
	}
	const script = "test/programs/build.sh"
	text, err := os.ReadFile(script)
	if err != nil {
		return nil, err
	}
	for _, match := range assigned.FindAllStringSubmatch(string(text), -1) {
		path := assignedModules[match[1]]
		if path == "" {
			return nil, fmt.Errorf("%s: the module of %s is not known here", script, match[1])
		}
		pins = append(pins, pin{place: script, path: path, version: match[2]})
	}
	if len(pins) < 4 {
		return nil, fmt.Errorf("only %d versions found in Makefile, .github/workflows and %s", len(pins), script)
	}
	return pins, nil
}
