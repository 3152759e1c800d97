// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package admin

import (
	"encoding/json"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// Printable is a terminal or a log that gets only printable text, see [rpc.Printable]. Each write must hold whole
// characters, as those of fmt, text/tabwriter and slog do.
type Printable struct{ io.Writer }

func (p Printable) Write(text []byte) (int, error) {
	if _, err := io.WriteString(p.Writer, rpc.Printable(string(text))); err != nil {
		return 0, err
	}
	return len(text), nil
}

// printJSON prints a value as indented JSON.
func printJSON(w io.Writer, value any) error {
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	encoder.SetEscapeHTML(false)
	return encoder.Encode(value)
}

// printTable prints lines in aligned columns.
func printTable(w io.Writer, write func(io.Writer)) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	write(table)
	return table.Flush()
}

// oneCell escapes what would begin another cell or line. Any user of a rack can put it into a description.
var oneCell = strings.NewReplacer("\t", `\t`, "\n", `\n`)

// cell returns the text of a cell: escaped, so that the columns stay aligned.
func cell(text string) string { return oneCell.Replace(rpc.Printable(text)) }

// line writes a line of a table. The table returns write errors when it is flushed.
func line(w io.Writer, columns ...string) {
	cells := make([]string, len(columns))
	for i, column := range columns {
		cells[i] = cell(column)
	}
	_, _ = io.WriteString(w, strings.Join(cells, "\t")+"\n")
}

// ageText returns how long ago something was created, such as 5m. The rack's clock may differ from this host's.
func ageText(created time.Time) string {
	if created.IsZero() {
		return "-"
	}
	return duration.ShortHumanDuration(max(0, time.Since(created)))
}

// sizeText returns a size such as 20GiB, or "" for 0.
func sizeText(bytes int64) string {
	if bytes == 0 {
		return ""
	}
	return config.Size(bytes).String()
}
