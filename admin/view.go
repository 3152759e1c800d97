// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package admin

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/oxidecomputer/oxide-csi-plugin/admin/client"
)

// view shows a result. Only lists have wide and names.
type view[T any] struct {
	// table is for people. The table of a list has at most listColumns columns; wide has all that is known.
	table, wide func(io.Writer, T)
	// names returns what commands take as an argument.
	names func(T) []string
}

// Values of --output.
const (
	outputWide = "wide"
	outputJSON = "json"
	outputYAML = "yaml"
	outputName = "name"
)

// outputs are the values of --output that the view has.
func (v view[T]) outputs() []string {
	if v.names == nil {
		return []string{outputJSON, outputYAML}
	}
	return []string{outputWide, outputJSON, outputYAML, outputName}
}

// print prints a result in an output, which is "" for the table.
func (v view[T]) print(w io.Writer, output string, result T) error {
	switch output {
	case outputJSON:
		return printJSON(w, result)
	case outputYAML:
		return printYAML(w, result)
	case outputWide:
		return printTable(w, func(w io.Writer) { v.wide(w, result) })
	case outputName:
		return printTable(w, func(w io.Writer) {
			for _, name := range v.names(result) {
				line(w, name)
			}
		})
	}
	return printTable(w, func(w io.Writer) { v.table(w, result) })
}

// printYAML prints what printJSON prints, as YAML with the same order of fields.
func printYAML(w io.Writer, value any) error {
	var text bytes.Buffer
	if err := printJSON(&text, value); err != nil {
		return err
	}
	var document yaml.Node
	if err := yaml.Unmarshal(text.Bytes(), &document); err != nil { // each JSON text is YAML, too
		return err
	}
	var plain func(*yaml.Node)
	plain = func(node *yaml.Node) {
		node.Style = 0
		for _, part := range node.Content {
			plain(part)
		}
	}
	plain(&document)
	encoder := yaml.NewEncoder(w)
	encoder.SetIndent(2)
	if err := encoder.Encode(&document); err != nil {
		return err
	}
	return encoder.Close()
}

const (
	// listColumns is the width of the table of a list.
	listColumns = 100
	// narrowest is the width to which the other columns are cut before the first one is, which holds a name to copy.
	narrowest = 12
)

// fitted writes the rows of a table of at most listColumns columns. It shortens the cells of the widest columns in the
// middle. It needs two columns at least.
func fitted(w io.Writer, rows [][]string) {
	var widths []int
	for _, row := range rows {
		for i, text := range row {
			row[i] = cell(text)
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], utf8.RuneCountInString(row[i]))
		}
	}
	total := 2 * (len(widths) - 1)
	for _, width := range widths {
		total += width
	}
	for ; total > listColumns; total-- {
		others := widths[1:]
		if widest := slices.Max(others); widest > narrowest {
			others[slices.Index(others, widest)]--
		} else {
			widths[0]--
		}
	}
	for _, row := range rows {
		for i, text := range row {
			row[i] = shortened(text, widths[i])
		}
		line(w, row...)
	}
}

// shortened returns a text of at most width characters, with … for its middle.
func shortened(text string, width int) string {
	runes := []rune(text)
	if len(runes) <= width {
		return text
	}
	end := (width - 1) / 2
	return string(runes[:width-1-end]) + "…" + string(runes[len(runes)-end:])
}

// order is --sort-by of a list: functions that compare, by the name of the order.
type order[T any] map[string]func(a, b T) int

// add adds the flag to a command. The returned function sorts a list, by name without the flag. Each order has a name.
func (o order[T]) add(cmd *cobra.Command) (sort func([]T)) {
	known := slices.Sorted(maps.Keys(o))
	by := choiceFlag{known: known}
	cmd.Flags().Var(&by, "sort-by", "order of the list: "+strings.Join(known, ", ")+" (default name)")
	completeFlag(cmd, "sort-by", cobra.FixedCompletions(known, cobra.ShellCompDirectiveNoFileComp))
	return func(list []T) {
		slices.SortStableFunc(list, o[cmp.Or(by.value, "name")])
	}
}

// choiceFlag is a flag with one of the known values.
type choiceFlag struct {
	known []string
	value string
}

// String, Type and Set implement pflag.Value.
func (f *choiceFlag) String() string { return f.value }
func (f *choiceFlag) Type() string   { return "string" }
func (f *choiceFlag) Set(text string) error {
	if !slices.Contains(f.known, text) {
		return fmt.Errorf("%q is not one of %s", text, strings.Join(f.known, ", "))
	}
	f.value = text
	return nil
}

// withWatch adds the flag --watch to a list.
func (b *storageCommands) withWatch(cmd *cobra.Command) {
	cmd.Flags().
		BoolVarP(&b.watch, "watch", "w", false, "print the list again when it changes, until Ctrl-C, or for the time of --timeout")
}

// watchInterval is the time between two looks of --watch.
const watchInterval = 2 * time.Second

// watch prints a list again when it has changed: on a terminal in place of the list before, elsewhere below it. It ends
// with a failure, or when --timeout is over if the command line has it.
func watch[T any](
	b *storageCommands, cmd *cobra.Command, call func(context.Context, *client.Client) (T, error), v view[T],
) error {
	ctx, stop := untilInterrupted(cmd.Context())
	defer stop()
	if cmd.Flags().Changed("timeout") && b.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, b.timeout)
		defer cancel()
	}
	cmd.SetContext(ctx)
	screen := client.NewProgress(unfiltered(b.stdout)).Terminal
	var before string
	for first := true; ; first = false {
		result, _, err := callPlugin(b, cmd, call)
		switch {
		case err != nil && ctx.Err() != nil && !first:
			return nil
		case err != nil:
			return err
		}
		var text, compared bytes.Buffer
		if err := cmp.Or(v.print(&text, b.output, result), printJSON(&compared, result)); err != nil {
			return err
		}
		if screen != nil {
			compared = text // ages grow on the screen
		}
		if now := compared.String(); first || now != before {
			before = now
			b.showAgain(screen, first, text.Bytes())
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(watchInterval):
		}
	}
}

// showAgain writes a list of --watch. As for any output, nothing can report that it was not written.
func (b *storageCommands) showAgain(screen io.Writer, first bool, text []byte) {
	const home = "\x1b[H\x1b[2J"
	switch {
	case screen != nil:
		_, _ = io.WriteString(screen, home)
	case !first && b.output == outputYAML:
		_, _ = io.WriteString(b.stdout, "---\n")
	case !first && b.output != outputJSON:
		_, _ = io.WriteString(b.stdout, "\n")
	}
	_, _ = b.stdout.Write(text)
}
