// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package core_test

import (
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
)

// withoutRow are the sentinel errors without a row in codeTable, and the reasons.
var withoutRow = map[string]string{
	"device.ErrOccupied":    "a check goes on without a marker, and a growth is an ErrGrow",
	"mount.ErrGrow":         "the stage succeeds with the old size, and reports it in the volume's health",
	"rack.ErrAlreadyExists": "CreateVolume looks up the disk and decides the code",
	"rack.ErrNotStopped":    "is an ErrRefused",
	"rack.ErrFull":          "is an ErrRefused",
	"rack.ErrProxy":         "comes with an ErrUnavailable",
	"restart.ErrElsewhere":  "ControllerPublishVolume answers with the name of the instance",
	"restart.ErrFull":       "ControllerPublishVolume answers with the limit",
}

// Every sentinel error of the packages below has a row, with a reason for its code.
func TestCodeTableIsComplete(t *testing.T) {
	rows := map[string]string{}
	ast.Inspect(parse(t, "codes.go"), func(node ast.Node) bool {
		spec, is := node.(*ast.ValueSpec)
		if !is || spec.Names[0].Name != "codeTable" {
			return true
		}
		for _, element := range spec.Values[0].(*ast.CompositeLit).Elts {
			row := element.(*ast.CompositeLit).Elts
			sentinel := row[0].(*ast.SelectorExpr)
			rows[sentinel.X.(*ast.Ident).Name+"."+sentinel.Sel.Name] = row[2].(*ast.BasicLit).Value
		}
		return false
	})
	sentinels := map[string]bool{}
	for _, dir := range []string{"rack", "device", "filesystem", "mount", "luks", "hostexec", "statefile", "volumelock", "volumerecord", "restart", "expand", "../metadata"} {
		files, err := filepath.Glob(filepath.Join(dir, "*.go"))
		coretest.Must(t, err)
		before := len(sentinels)
		for _, file := range files {
			if !strings.HasSuffix(file, "_test.go") {
				for _, name := range sentinelsOf(parse(t, file)) {
					sentinels[filepath.Base(dir)+"."+name] = true
				}
			}
		}
		if len(sentinels) == before {
			t.Errorf("this test finds no sentinel errors in package %s", dir)
		}
	}
	for name := range sentinels {
		reason, has := rows[name]
		if why := withoutRow[name]; has == (why != "") {
			t.Errorf("%s: has a row: %t; why it has none: %q", name, has, why)
		}
		if has && len(reason) < 10 {
			t.Errorf("%s: reason %s", name, reason)
		}
	}
	for name := range rows {
		if !sentinels[name] {
			t.Errorf("%s has a row and is not declared", name)
		}
	}
	for name := range withoutRow {
		if !sentinels[name] {
			t.Errorf("%s is not declared", name)
		}
	}
	for _, err := range []error{rack.ErrNotStopped, rack.ErrFull} {
		if !errors.Is(err, rack.ErrRefused) {
			t.Errorf("%v does not wrap %v, so it has no code", err, rack.ErrRefused)
		}
	}
}

var sentinelName = regexp.MustCompile(`^Err[A-Z]`)

// sentinelsOf returns the exported errors that a file declares.
func sentinelsOf(file *ast.File) []string {
	var names []string
	for _, declaration := range file.Decls {
		general, is := declaration.(*ast.GenDecl)
		if !is || general.Tok != token.VAR {
			continue
		}
		for _, spec := range general.Specs {
			for _, name := range spec.(*ast.ValueSpec).Names {
				if sentinelName.MatchString(name.Name) {
					names = append(names, name.Name)
				}
			}
		}
	}
	return names
}

func parse(t *testing.T, path string) *ast.File {
	t.Helper()
	source, err := os.ReadFile(path)
	coretest.Must(t, err)
	file, err := parser.ParseFile(token.NewFileSet(), path, source, 0)
	coretest.Must(t, err)
	return file
}
