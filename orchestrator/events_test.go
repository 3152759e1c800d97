// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package orchestrator_test

import (
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

var update = flag.Bool("update", false, "rewrite the table of docs/reference/events.md")

// allEvents are those that the package declares, which TestEveryEventIsOfTheTable compares.
var allEvents = []orchestrator.Event{
	orchestrator.EventRestartPlanned,
	orchestrator.EventRestartRefused,
	orchestrator.EventRestartHangs,
	orchestrator.EventRestartStuck,
	orchestrator.EventRestartNotStarted,
	orchestrator.EventRestartWaitsForDisk,
	orchestrator.EventRestartNotBack,
	orchestrator.EventRestartNotUndrained,
	orchestrator.EventWaitsForRestart,
	orchestrator.EventTokenExpires,
}

// The table of the page is made from the events.
func TestEventsPage(t *testing.T) {
	const page, begin, end = "../docs/reference/events.md",
		"<!-- Made from orchestrator/events.go by: go test ./orchestrator -run TestEventsPage -update -->\n",
		"<!-- End of the generated table. -->\n"
	var table strings.Builder
	table.WriteString("| reason | type | object | when it comes | what to do |\n|---|---|---|---|---|\n")
	for _, event := range allEvents {
		kind := "Normal"
		if event.Problem {
			kind = "Warning"
		}
		fmt.Fprintf(&table, "| `%s` | %s | %s | %s | %s |\n", event.Reason, kind, event.Object, event.When, event.Next)
	}
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, found := strings.Cut(string(text), begin)
	_, after, ended := strings.Cut(rest, end)
	if !found || !ended {
		t.Fatalf("%s lacks the lines around the table", page)
	}
	want := before + begin + table.String() + end + after
	if *update {
		if err := os.WriteFile(page, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(want, string(text)); diff != "" {
		t.Errorf("%s is not up to date, run this test with -update (-generated +page):\n%s", page, diff)
	}
}

// The words are permanent: scripts and alerts use them. A new event adds one here.
func TestEventReasonsArePermanent(t *testing.T) {
	reasons := []string{
		"RestartHangs", "RestartNotBack", "RestartNotStarted", "RestartNotUndrained", "RestartPlanned", "RestartRefused",
		"RestartStuck", "RestartWaitsForDisk", "TokenExpires", "WaitsForRestart",
	}
	var got []string
	word := regexp.MustCompile(`^([A-Z][a-z]+)+$`)
	for _, event := range allEvents {
		got = append(got, event.Reason)
		if !word.MatchString(event.Reason) || event.When == "" || event.Next == "" ||
			!slices.Contains(
				[]string{orchestrator.ObjectNode, orchestrator.ObjectClaim, orchestrator.ObjectController},
				event.Object,
			) {
			t.Errorf("%+v", event)
		}
	}
	slices.Sort(got)
	if diff := cmp.Diff(reasons, got); diff != "" {
		t.Errorf("reasons (-want +got):\n%s", diff)
	}
}

// Code that ships takes each event from the table: it neither makes an Event, nor sends one past [orchestrator.Report].
// Each event of the table is sent somewhere.
func TestEveryEventIsOfTheTable(t *testing.T) {
	declared, used := map[string]bool{}, map[string]bool{}
	events := walk(t, func(path string, node ast.Node) {
		switch node := node.(type) {
		case *ast.ValueSpec: // of events.go
			for _, name := range node.Names {
				if path == "../orchestrator/events.go" && strings.HasPrefix(name.Name, "Event") {
					declared[name.Name] = true
				}
			}
		case *ast.SelectorExpr:
			if of, is := node.X.(*ast.Ident); is && of.Name == "orchestrator" {
				used[node.Sel.Name] = true
			}
		case *ast.CompositeLit:
			made := node.Type
			if selector, is := made.(*ast.SelectorExpr); is {
				made = selector.Sel
			}
			if name, is := made.(*ast.Ident); is && name.Name == "Event" && path != "../orchestrator/events.go" {
				t.Errorf("%s makes an Event: add it to orchestrator/events.go", path)
			}
		case *ast.BasicLit:
			if node.Value == `"Event"` && path != "../orchestrator/kubernetes/events.go" {
				t.Errorf("%s makes an event of Kubernetes: only orchestrator/kubernetes/events.go may", path)
			}
		}
	})
	if events < 100 || len(declared) != len(allEvents) {
		t.Errorf("%d files were read; they declare %v, want the %d events", events, declared, len(allEvents))
	}
	for name := range declared {
		if !used[name] {
			t.Errorf("no code sends orchestrator.%s", name)
		}
	}
}

// walk visits the code of core, metadata, orchestrator and cmd without tests and their fakes, and returns the number of
// files.
func walk(t *testing.T, visit func(path string, node ast.Node)) (files int) {
	t.Helper()
	for _, folder := range []string{"core", "metadata", "orchestrator", "cmd"} {
		err := filepath.WalkDir(filepath.Join("..", folder), func(path string, entry fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return err
			case entry.IsDir() && strings.HasSuffix(entry.Name(), "test"):
				return filepath.SkipDir
			}
			if entry.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return nil
			}
			file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			files++
			ast.Inspect(file, func(node ast.Node) bool {
				visit(path, node)
				return true
			})
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return files
}
