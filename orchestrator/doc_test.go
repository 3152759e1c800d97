// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package orchestrator_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"testing"
)

// The package comment has a link to each contract.
func TestPackageCommentNamesEachInterface(t *testing.T) {
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	comment, interfaces := "", []string{}
	for _, name := range files {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		comment += file.Doc.Text()
		ast.Inspect(file, func(n ast.Node) bool {
			if spec, ok := n.(*ast.TypeSpec); ok && spec.Name.IsExported() {
				if _, is := spec.Type.(*ast.InterfaceType); is {
					interfaces = append(interfaces, spec.Name.Name)
				}
			}
			return true
		})
	}
	if len(interfaces) < 10 {
		t.Fatalf("found only %v", interfaces)
	}
	for _, name := range interfaces {
		if !strings.Contains(comment, "["+name+"]") {
			t.Errorf("the package comment does not name %s", name)
		}
	}
}
