// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package fault has the only table of what can go wrong: the gRPC code that an RPC answers, a permanent word, what is
// wrong, who acts, and the next step for each reader. The message of an RPC's error ends with its word in brackets.
// Events, logs and commands repeat the message, and oxide-csi explain finds the row by the word.
//
// To add an error, add a row to the table. Declare the error with [Row.New], or return rpc.Fault or [Row.Errorf] where
// it occurs. Then run: UPDATE=1 go test ./core/fault.
package fault

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
)

// Row is a row of [Table]. A row matches an error that was made by it: errors.Is(err, fault.DiskNotBlank).
type Row struct {
	// Word never changes: scripts and alerts use it, and docs/reference/errors.md has a heading for it.
	Word string
	// Code is the code of an RPC that fails with such an error, unless the RPC decides it. It is OK if no RPC answers it.
	Code codes.Code
	// err is the error of a package that must not import this one.
	err error
	// Link is the broken link of the chain from the claim to the workload.
	Link string
	// Verdict says what is wrong, and Actor who acts.
	Verdict, Actor string
	// Next is the next step in Kubernetes. OnNomad and OnHosts are those for an operator of Nomad, and for a person at the
	// command line of a plain host, where they differ.
	Next, OnNomad, OnHosts string
	// Why explains the fault. It also says why the error has this code, if an orchestrator decides that.
	Why string
}

// Those who act.
const (
	Operator     = "you, the operator of the cluster"
	RackOperator = "an operator of the rack"
	Nobody       = "nobody: this ends by itself"
	Owner        = "the owner of the workload"
)

// Error returns the word. It makes a row a target of [errors.Is].
func (r *Row) Error() string { return r.Word }

// failure is an error of a row.
type failure struct {
	row *Row
	err error
}

func (f *failure) Error() string   { return f.err.Error() }
func (f *failure) Unwrap() []error { return []error{f.err, f.row} }

// New returns an error that other errors wrap.
func (r *Row) New(text string) error { return &failure{r, errors.New(text)} }

// Errorf returns an error with a text as of [fmt.Errorf].
func (r *Row) Errorf(format string, args ...any) error {
	return &failure{r, fmt.Errorf(format, args...)}
}

// Of returns the row of an error. It is nil if the error has none.
func Of(err error) *Row {
	for _, row := range Table {
		if errors.Is(err, row) || row.err != nil && errors.Is(err, row.err) {
			return row
		}
	}
	return nil
}

// Message returns the text of an error, with the word of its row at the end.
func Message(err error) string {
	if row := Of(err); row != nil {
		return fmt.Sprintf("%s [%s]", err, row.Word)
	}
	return err.Error()
}

// word is a word in a message.
var word = regexp.MustCompile(`\[([A-Za-z]+)\]`)

// In returns the rows whose words a text has, in the order of the table.
func In(text string) []*Row {
	var words []string
	for _, found := range word.FindAllStringSubmatch(text, -1) {
		words = append(words, found[1])
	}
	var rows []*Row
	for _, row := range Table {
		if slices.Contains(words, row.Word) {
			rows = append(rows, row)
		}
	}
	return rows
}

// Cut splits the message of an RPC's error into its text and the row of the word at its end, or nil.
func Cut(message string) (text string, row *Row) {
	for _, row := range Table {
		if text, found := strings.CutSuffix(message, " ["+row.Word+"]"); found {
			return text, row
		}
	}
	return message, nil
}
