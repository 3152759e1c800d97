// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package fault_test

import (
	"cmp"
	"errors"
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

	gocmp "github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
)

// An error that wraps several has the row that comes first, and a message has its word. A text leads back to the rows.
func TestWords(t *testing.T) {
	notBlank := fault.DiskNotBlank.New("refusing to format")
	missing := fault.ProgramMissing.Errorf("%s is not installed", "mkfs")
	for _, test := range []struct {
		err  error
		row  *fault.Row
		want string
	}{
		{fmt.Errorf("%w x: it holds y", notBlank), fault.DiskNotBlank, "refusing to format x: it holds y [DiskNotBlank]"},
		{errors.Join(notBlank, missing), fault.ProgramMissing, "refusing to format\nmkfs is not installed [ProgramMissing]"},
		{errors.New("x [DiskNotBlank] y"), nil, "x [DiskNotBlank] y"},
	} {
		got := fault.Message(test.err)
		if row := fault.Of(test.err); row != test.row || got != test.want {
			t.Errorf("%q has the row %v, want %v, %q", got, row, test.row, test.want)
		}
		if text, row := fault.Cut(got); row != test.row || test.row != nil && text != test.err.Error() {
			t.Errorf("%q is cut to %q, %v", got, text, row)
		}
	}
	const several = "rpc error: x [WrongPassphrase] y [else] [TokenRejected]: z"
	if diff := gocmp.Diff([]string{"TokenRejected", "WrongPassphrase"}, words(fault.In(several))); diff != "" {
		t.Errorf("the rows of %q (-want +got):\n%s", several, diff)
	}
}

func words(rows []*fault.Row) []string {
	var all []string
	for _, row := range rows {
		all = append(all, row.Word)
	}
	return all
}

// Words are permanent: with UPDATE=1 this test writes new words, and removes none.
func TestWordsArePermanent(t *testing.T) {
	const golden = "testdata/words.txt"
	text, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	kept, now := strings.Fields(string(text)), words(fault.Table)
	slices.Sort(now)
	if os.Getenv("UPDATE") != "" {
		kept = slices.Compact(slices.Sorted(slices.Values(slices.Concat(kept, now))))
		if err := os.WriteFile(golden, []byte(strings.Join(kept, "\n")+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if diff := gocmp.Diff(kept, now); diff != "" {
		t.Errorf("a word never changes and never goes; for a new one run this test with UPDATE=1 (-kept +table):\n%s", diff)
	}
}

// Each row tells each reader what to do. Only readers in Kubernetes get its commands. The next step on a plain host has
// no placeholders, because a command prints it as it is.
func TestRows(t *testing.T) {
	kubernetes := regexp.MustCompile("kubectl|Secret")
	onlyKubernetes := []*fault.Row{
		fault.OtherDriver, fault.SnapshotNotReady, fault.ClaimMissing, fault.UsedByAnotherPod, fault.VolumeReleased,
		fault.WaitsForOther,
	}
	onlyOrchestrators := append(
		onlyKubernetes, fault.PluginNotRegistered, fault.NodeNotReady, fault.NotStartedYet, fault.RunsWithoutDisk,
		fault.RunsWithoutMount, fault.RunsWithoutClaim,
	)
	for _, row := range fault.Table {
		if !regexp.MustCompile(`^[A-Z][A-Za-z]+$`).MatchString(row.Word) || row.Verdict == "" || row.Actor == "" ||
			row.Next == "" || row.Why == "" {
			t.Errorf("incomplete: %+v", row)
		}
		if row.Code != codes.OK && strings.Contains(row.OnHosts, "{") {
			t.Errorf("%s: a command prints %q as it is", row.Word, row.OnHosts)
		}
		for _, next := range []string{row.Next, row.OnNomad, row.OnHosts} {
			if advisesDeletion.MatchString(next) && !slices.Contains(deletionIsTheOnlyWay, row) {
				t.Errorf("%s advises to delete data: %q", row.Word, next)
			}
		}
		nomad, host := cmp.Or(row.OnNomad, row.Next), cmp.Or(row.OnHosts, row.Next)
		if kubernetes.MatchString(nomad) && !slices.Contains(onlyKubernetes, row) ||
			kubernetes.MatchString(host) && !slices.Contains(onlyOrchestrators, row) {
			t.Errorf("%s: outside of Kubernetes: %q, %q", row.Word, nomad, host)
		}
	}
}

// deletionIsTheOnlyWay are the faults whose next step may end with a deletion: of a claim that has no volume, of a
// volume that its owner does not need, and of a foreign disk, with its owner's word.
var (
	deletionIsTheOnlyWay = []*fault.Row{
		fault.OtherDriver, fault.AccessModeUnsupported, fault.DiskNotBlank, fault.NameTaken,
	}
	advisesDeletion = regexp.MustCompile(`(^|[^t] )delete (it|(the|that) (volume|disk|claim|snapshot))\b`)
)

// withoutRow are the exported errors without a row, and the reasons.
var withoutRow = map[string]string{
	"core/device.ErrNoProof":     "the open files of the node decide instead",
	"core/device.ErrOccupied":    "a check goes on without a marker, and a growth is an ErrGrow",
	"core/rack.ErrAlreadyExists": "CreateVolume looks up the disk and decides the code",
	"core/rack.ErrNotStopped":    "is an ErrRefused",
	"core/rack.ErrFull":          "is an ErrRefused",
	"core/detach.ErrRestarting":  "the caller tries again later",
	"core/detach.ErrNotDeferred": "the caller looks at the disk again",
}

// Every exported error of core and metadata is made by a row.
func TestEveryErrorHasARow(t *testing.T) {
	found := map[string]bool{}
	used := map[string]bool{}
	for _, dir := range []string{"..", "../../metadata"} {
		err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
			if err != nil || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") {
				return err
			}
			file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
			if err != nil {
				return err
			}
			folder := filepath.ToSlash(filepath.Dir(filepath.Join("core/fault", path)))
			for name, value := range errorsOf(file) {
				why, row := withoutRow[folder+"."+name], rowOf(value)
				if found[folder+"."+name] = true; (row == "") == (why == "") && folder != "metadata" {
					t.Errorf("%s.%s: made by the row %q; why it has none: %q", folder, name, row, why)
				}
			}
			ast.Inspect(file, func(node ast.Node) bool {
				if selector, is := node.(*ast.SelectorExpr); is {
					if of, is := selector.X.(*ast.Ident); is && (of.Name == "fault" || of.Name == "metadata") {
						used[of.Name+"."+selector.Sel.Name] = true
					}
				}
				return true
			})
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for name := range withoutRow {
		if !found[name] {
			t.Errorf("%s is not declared", name)
		}
	}
	for name := range found {
		if sentinel, of := strings.CutPrefix(name, "metadata."); of && !used["metadata."+sentinel] {
			t.Errorf("%s has no row", name)
		}
	}
	if len(found) < 50 {
		t.Errorf("this test finds only %d errors", len(found))
	}
	for _, row := range fault.Table {
		if row.Code != codes.OK && !used["fault."+row.Word] && !strings.HasPrefix(row.Word, "Identity") {
			t.Errorf("no error has the row %s", row.Word)
		}
	}
}

var sentinel = regexp.MustCompile(`^Err[A-Z]`)

// errorsOf returns the exported errors that a file declares, with their values.
func errorsOf(file *ast.File) map[string]ast.Expr {
	all := map[string]ast.Expr{}
	for _, declaration := range file.Decls {
		general, is := declaration.(*ast.GenDecl)
		if !is || general.Tok != token.VAR {
			continue
		}
		for _, spec := range general.Specs {
			spec := spec.(*ast.ValueSpec)
			if name := spec.Names[0].Name; sentinel.MatchString(name) && len(spec.Values) > 0 {
				all[name] = spec.Values[0]
			}
		}
	}
	return all
}

// rowOf returns the name of the row that makes an error, or "".
func rowOf(value ast.Expr) string {
	call, is := value.(*ast.CallExpr)
	if !is {
		return ""
	}
	method, is := call.Fun.(*ast.SelectorExpr)
	if !is {
		return ""
	}
	row, is := method.X.(*ast.SelectorExpr)
	if !is {
		return ""
	}
	if of, is := row.X.(*ast.Ident); !is || of.Name != "fault" {
		return ""
	}
	return row.Sel.Name
}

// docs/reference/errors.md is made from the table.
func TestErrorsPage(t *testing.T) {
	const page = "../../docs/reference/errors.md"
	want := errorsPage()
	if os.Getenv("UPDATE") != "" {
		if err := os.WriteFile(page, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	if diff := gocmp.Diff(want, string(got)); diff != "" {
		t.Errorf("the page differs from the table; run this test with UPDATE=1 (-table +page):\n%s", diff)
	}
}

const pageBegin = `# What can go wrong

Each error of the plugin ends with a permanent word in brackets:
` + "`refusing to format /dev/nvme1n1: it holds an ext4 [DiskNotBlank]`" + `. Search this page for the word. Events, logs and
commands repeat it, and ` + "`oxide-csi explain`" + ` begins with it ([troubleshooting](../how-to/troubleshooting.md)). An error
without a word names what is wrong with the request.

In parentheses is who acts (you, who operate the cluster; the *owner* of the workload; an operator of the *rack*;
*wait*: the orchestrator repeats the call until it succeeds), and the gRPC code, if an RPC returns the word. Then come
the next steps for Kubernetes; Nomad and plain hosts follow where they differ. There "wait" means: repeat the command.

<!-- Made from core/fault/table.go by: UPDATE=1 go test ./core/fault -->
`

func errorsPage() string {
	placeholders := strings.NewReplacer("{pod}", "pod -n NAMESPACE POD", "{volume}", "VOLUME", "{disk}", "DISK",
		"{instance}", "INSTANCE", "{holder}", "INSTANCE", "{node}", "NODE", "{claim}", "CLAIM", "{namespace}", "NAMESPACE",
		"{allocation}", "ALLOCATION", "{blocker}", "VOLUME")
	var page strings.Builder
	page.WriteString(pageBegin)
	rows := slices.Clone(fault.Table)
	slices.SortFunc(rows, func(a, b *fault.Row) int { return strings.Compare(a.Word, b.Word) })
	for _, row := range rows {
		actor := map[string]string{
			fault.Operator: "you", fault.RackOperator: "rack", fault.Nobody: "wait", fault.Owner: "owner",
		}[row.Actor]
		verdict := placeholders.Replace(row.Verdict)
		fmt.Fprintf(&page, "\n## %s\n\n%s%s. %s *(%s%s)*\n\n",
			row.Word, strings.ToUpper(verdict[:1]), verdict[1:], row.Why, actor, code(row))
		for _, line := range []struct{ label, text string }{
			{"", row.Next}, {"**Nomad:** ", row.OnNomad}, {"**Hosts:** ", row.OnHosts},
		} {
			// Its beginning says what waiting means.
			text := regexp.MustCompile(`^(wait: the orchestrator (repeats the call|tries again)|repeat the command)(\. |; )?`).
				ReplaceAllString(line.text, "")
			if repeats := line.label != "" && line.text == row.Next; text != "" && !repeats {
				fmt.Fprintf(&page, "- %s%s\n", line.label, placeholders.Replace(text))
			}
		}
	}
	return page.String()
}

// code is the code of a row as in the specification of gRPC.
func code(row *fault.Row) string {
	if row.Code == codes.OK {
		return ""
	}
	name := regexp.MustCompile(`([a-z])([A-Z])`).ReplaceAllString(row.Code.String(), "${1}_${2}")
	return "; " + strings.ToUpper(name)
}
