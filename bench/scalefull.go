// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-analyze/charts"
)

// fullScales are the sizes of make scale. The first one is only for the memory.
var fullScales = []scaleSize{
	{instances: 143, volumes: 1000, rolled: 50, rolledAtOnce: 10, created: 1000, listEvery: time.Minute},
	{
		instances: 1000, volumes: 7000, rolled: 50, rolledAtOnce: 10, created: 1000, listEvery: time.Minute,
		outage: time.Minute, backlog: 300,
	},
	{
		instances: 10_000, volumes: 70_000, rolled: 50, rolledAtOnce: 10, created: 1000, listEvery: time.Minute,
		outage: time.Minute, backlog: 300,
	},
}

const (
	// fullScalePrefix begins the names of the rows of make scale, and the number of volumes follows. Only make scale
	// writes these rows.
	fullScalePrefix = "scale/full/"
	scalePlot       = "docs/explanation/scale.svg"
)

// fullScale measures all sizes, writes the plot of the page, and prints the table.
func fullScale(ctx context.Context, b *bench) (rows []row, err error) {
	var lines []plotLine
	for _, size := range fullScales {
		began := time.Now()
		s, err := b.scale(ctx, size)
		if err != nil {
			return nil, fmt.Errorf("%d volumes: %w", size.volumes, err)
		}
		fmt.Fprintf(os.Stderr, "%d volumes: measured in %s\n", size.volumes, time.Since(began).Round(time.Second))
		rows = append(rows, s.rows(fullScalePrefix+strconv.Itoa(size.volumes)+"/")...)
		lines = append(lines, s.outageLines()...)
	}
	svg, err := plot(lines)
	if err != nil {
		return nil, err
	}
	fmt.Print(scaleTable(rows))
	return rows, os.WriteFile(scalePlot, svg, 0o644)
}

// plotLine is one line of the plot: the rack's calls in each second.
type plotLine struct {
	name  string
	calls []float64
}

// The plot begins plotBefore an outage and has plotSeconds points.
const (
	plotBefore  = 10 * time.Second
	plotSeconds = 131
)

// outageLines are the calls around each outage.
func (s *scaleRun) outageLines() (lines []plotLine) {
	for _, p := range s.phases {
		if p.back.IsZero() {
			continue
		}
		from := p.began.Add(-plotBefore)
		name := fmt.Sprintf("%s instances, %s", thousands(s.size.instances), strings.TrimPrefix(p.name, "outage, "))
		lines = append(lines, plotLine{name, s.callsBetween(from, from.Add((plotSeconds-1)*time.Second))})
	}
	return lines
}

// plot draws the lines as SVG. The x-axis has the seconds since the begin of the outage.
func plot(lines []plotLine) ([]byte, error) {
	const width, height, labelEvery = 900, 380, 10
	values, names := make([][]float64, len(lines)), make([]string, len(lines))
	for i, line := range lines {
		values[i], names[i] = line.calls, line.name
	}
	var seconds []string
	for i := range plotSeconds {
		seconds = append(seconds, strconv.Itoa(i-int(plotBefore.Seconds())))
	}
	options := charts.NewLineChartOptionWithData(values)
	options.Title.Text = "API calls per second; the rack is away from second 0 to 60"
	options.Title.FontStyle.FontSize = 12
	options.Legend.SeriesNames = names
	options.Legend.FontStyle.FontSize = 9
	options.Legend.Offset = charts.OffsetStr{Top: "24"}
	options.XAxis.Labels = seconds
	options.XAxis.LabelCount = plotSeconds/labelEvery + 1
	options.Symbol.Shape = charts.SymbolNone
	options.LineStrokeWidth = 1.5
	painter := charts.NewPainter(charts.PainterOptions{
		OutputFormat: charts.ChartOutputSVG, Width: width, Height: height,
	})
	if err := painter.LineChart(options); err != nil {
		return nil, fmt.Errorf("plot: %w", err)
	}
	return painter.Bytes()
}

// thousands writes a number with a comma after its thousands.
func thousands(n int) string {
	if n < 1000 {
		return strconv.Itoa(n)
	}
	return fmt.Sprintf("%s,%03d", thousands(n/1000), n%1000)
}

// scaleTable is the table of the page: the rows of one size per column.
func scaleTable(rows []row) string {
	var names []string
	cells := map[string]string{}
	for _, r := range rows {
		size, name, _ := strings.Cut(strings.TrimPrefix(r.Name, fullScalePrefix), "/")
		name += " | " + r.Unit
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
		cells[name+size] = tableNumber(r.Value)
	}
	var b strings.Builder
	head, rule := "| | |", "|---|---|"
	for _, size := range fullScales {
		head += fmt.Sprintf(" %s volumes |", thousands(size.volumes))
		rule += "--:|"
	}
	fmt.Fprintf(&b, "%s\n%s\n", head, rule)
	for _, name := range names {
		fmt.Fprintf(&b, "| %s |", name)
		for _, size := range fullScales {
			fmt.Fprintf(&b, " %s |", cells[name+strconv.Itoa(size.volumes)])
		}
		b.WriteString("\n")
	}
	return b.String()
}

// tableNumber writes a value with as many digits as a reader needs.
func tableNumber(value float64) string {
	if value >= 100 {
		return thousands(int(value + 0.5))
	}
	return strconv.FormatFloat(value, 'g', 3, 64)
}
