// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Command size prints how much there is to read: the lines of this repository that are linked into the plugin, by
// feature and by package; long functions and files; exported names without a comment; and the words of each page.
// It is run from the folder of the repository.
package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// Limits above which a function or a file is listed.
const (
	maxFunctionLines    = 60
	maxFunctionBranches = 15
	maxFileLines        = 500
)

// module is the prefix of this repository's packages.
const module = "github.com/oxidecomputer/oxide-csi-plugin/"

func main() {
	if err := run(os.Stdout); err != nil {
		fmt.Fprintf(os.Stderr, "size: %v\n", err)
		os.Exit(1)
	}
}

func run(out io.Writer) error {
	packages, err := linked("./cmd/oxide-csi")
	if err != nil {
		return err
	}
	code, err := measure(packages)
	if err != nil {
		return err
	}
	pages, err := words()
	if err != nil {
		return err
	}
	features := map[string]int{}
	for name, lines := range code.packages {
		features[feature(name)] += lines
	}
	table(out, "lines linked into oxide-csi, by feature", features)
	table(out, "by package", code.packages)
	table(out, fmt.Sprintf("functions of more than %d lines", maxFunctionLines), code.long)
	table(out, fmt.Sprintf("functions of more than %d branches", maxFunctionBranches), code.branched)
	table(out, fmt.Sprintf("files of more than %d lines", maxFileLines), code.files)
	table(out, "exported names without a comment", code.bare)
	table(out, "words by page", pages)
	return nil
}

// feature is the folder that names a feature: two levels below core and cmd, one elsewhere.
func feature(name string) string {
	parts := strings.Split(name, "/")
	if parts[0] == "core" || parts[0] == "cmd" {
		return strings.Join(parts[:min(2, len(parts))], "/")
	}
	return parts[0]
}

// linked returns the Go files of this repository that a program is built from, by package.
func linked(program string) (map[string][]string, error) {
	list := exec.Command("go", "list", "-deps", "-json=ImportPath,Dir,GoFiles", program)
	list.Env, list.Stderr = append(os.Environ(), "CGO_ENABLED=0"), os.Stderr
	text, err := list.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	packages := map[string][]string{}
	for decoder := json.NewDecoder(bytes.NewReader(text)); ; {
		var p struct {
			ImportPath, Dir string
			GoFiles         []string
		}
		if err := decoder.Decode(&p); errors.Is(err, io.EOF) {
			return packages, nil
		} else if err != nil {
			return nil, err
		}
		name, ours := strings.CutPrefix(p.ImportPath, module)
		if !ours {
			continue
		}
		for _, file := range p.GoFiles {
			packages[name] = append(packages[name], filepath.Join(p.Dir, file))
		}
	}
}

// code is what was measured, by the name of the package, the function, the file or the exported name.
type code struct{ packages, long, branched, files, bare map[string]int }

func measure(packages map[string][]string) (code, error) {
	c := code{map[string]int{}, map[string]int{}, map[string]int{}, map[string]int{}, map[string]int{}}
	for name, files := range packages {
		for _, path := range files {
			fset := token.NewFileSet()
			file, err := parser.ParseFile(fset, path, nil, parser.ParseComments|parser.SkipObjectResolution)
			if err != nil {
				return code{}, err
			}
			lines := fset.File(file.Pos()).LineCount()
			c.packages[name] += lines
			if lines > maxFileLines {
				c.files[name+"/"+filepath.Base(path)] = lines
			}
			for _, declaration := range file.Decls {
				c.add(fset, name, declaration)
			}
		}
	}
	return c, nil
}

func (c code) add(fset *token.FileSet, pkg string, declaration ast.Decl) {
	switch d := declaration.(type) {
	case *ast.FuncDecl:
		name := pkg + "." + d.Name.Name
		lines := fset.Position(d.End()).Line - fset.Position(d.Pos()).Line + 1
		if lines > maxFunctionLines {
			c.long[name] = lines
		}
		if n := branches(d); n > maxFunctionBranches {
			c.branched[name] = n
		}
		if d.Name.IsExported() && d.Doc == nil && d.Recv == nil {
			c.bare[name] = 1
		}
	case *ast.GenDecl:
		for _, spec := range d.Specs {
			switch s := spec.(type) {
			case *ast.TypeSpec:
				if s.Name.IsExported() && s.Doc == nil && d.Doc == nil {
					c.bare[pkg+"."+s.Name.Name] = 1
				}
			case *ast.ValueSpec:
				if s.Names[0].IsExported() && s.Doc == nil && d.Doc == nil && s.Comment == nil {
					c.bare[pkg+"."+s.Names[0].Name] = 1
				}
			}
		}
	}
}

// branches counts the places where a function goes one of several ways.
func branches(function *ast.FuncDecl) (n int) {
	ast.Inspect(function, func(node ast.Node) bool {
		switch node := node.(type) {
		case *ast.IfStmt, *ast.ForStmt, *ast.RangeStmt:
			n++
		case *ast.CaseClause:
			if node.List != nil {
				n++
			}
		case *ast.CommClause:
			if node.Comm != nil {
				n++
			}
		case *ast.BinaryExpr:
			if node.Op == token.LAND || node.Op == token.LOR {
				n++
			}
		}
		return true
	})
	return n
}

// words counts the words of each page that is under version control.
func words() (map[string]int, error) {
	text, err := exec.Command("git", "ls-files", "*.md").Output()
	if err != nil {
		return nil, fmt.Errorf("git ls-files: %w", err)
	}
	pages := map[string]int{}
	for _, path := range strings.Fields(string(text)) {
		page, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		pages[path] = len(bytes.Fields(page))
	}
	return pages, nil
}

// table prints the sum and the rows, the largest first.
func table(out io.Writer, title string, rows map[string]int) {
	sum := 0
	for _, n := range rows {
		sum += n
	}
	fmt.Fprintf(out, "%s: %d rows, %d in all\n", title, len(rows), sum)
	for _, name := range slices.SortedFunc(maps.Keys(rows), func(a, b string) int {
		return cmp.Or(cmp.Compare(rows[b], rows[a]), cmp.Compare(a, b))
	}) {
		fmt.Fprintf(out, "  %7d  %s\n", rows[name], name)
	}
}
