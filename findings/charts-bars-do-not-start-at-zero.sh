#!/usr/bin/env bash
# go-analyze/charts draws bars from an axis that begins near the smallest value, and labels several ticks alike.
#
# Version: github.com/go-analyze/charts v0.6.4
# Guess:   the axis of a bar chart begins at 0 unless a minimum is set, so that the lengths of bars compare the values;
#          and the labels of an axis differ from each other.
# Seen:    bars of 95, 97 and 100 stand on an axis from 95 to 101, and the smallest of 1e9 and 3e9 on one that begins
#          at 1G: a bar without height. For 0.95 and 1 the axis does begin at 0. Labels are cut to two decimals: all of
#          an axis for 0.001 and 0.002 are "0", all for 1000000 and 1000001 are "1M".
# Why:     a bar says its value by its length, so plotting programs begin at zero for bars and not for lines. Here both
#          have the same axis, and whether it begins at 0 depends on the values.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
cat >go.mod <<'END'
module finding

go 1.26

require github.com/go-analyze/charts v0.6.4
END
cat >main.go <<'END'
package main

import (
	"fmt"
	"regexp"

	"github.com/go-analyze/charts"
)

func main() {
	label := regexp.MustCompile(`<text[^>]*>([^<]*)</text>`)
	for _, values := range [][]float64{{95, 97, 100}, {1e9, 3e9}, {0.95, 1}, {0.001, 0.002}, {1000000, 1000001}} {
		names := []string{"a", "b", "c"}[:len(values)]
		chart, err := charts.BarRender([][]float64{values}, charts.XAxisLabelsOptionFunc(names), charts.SVGOutputOptionFunc())
		check(err)
		svg, err := chart.Bytes()
		check(err)
		for _, text := range label.FindAllSubmatch(svg, -1) {
			fmt.Printf("%s ", text[1])
		}
		fmt.Println()
	}
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
END
GOFLAGS=-mod=mod go run . >output 2>/dev/null
diff - output <<'END' || { echo "changed: see above" >&2; exit 1; }
101 100 99 98 97 96 95 a b c 
3.25G 3G 2.75G 2.5G 2.25G 2G 1.75G 1.5G 1.25G 1G a b 
2 1.6 1.2 0.8 0.4 0 a b 
0 0 0 0 0 0 0 0 a b 
1M 1M 1M 1M a b 
END
echo "still so: bars do not start at zero, and labels repeat"
