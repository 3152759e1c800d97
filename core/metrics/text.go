package metrics

import (
	"bytes"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
)

// kind is the type of a metric, in the words of the text format.
type kind string

const (
	counter   kind = "counter"
	gauge     kind = "gauge"
	histogram kind = "histogram"
)

// family is a metric with all its series, one for each combination of label values. It is not safe for concurrent use.
type family struct {
	name   string
	kind   kind
	labels []string
	help   string
	// buckets are the upper bounds of a histogram, rising.
	buckets []float64

	// series are known by the text of their labels.
	series map[string]*series
}

// series is one series of a family.
type series struct {
	// value is that of a counter or a gauge, and the sum of a histogram.
	value float64
	// counts are the observations of a histogram by bucket, each in the lowest that takes it; the last one is for those
	// above all bounds.
	counts []uint64
}

// of returns the series of these label values, which are as many as the family has labels.
func (f *family) of(values []string) *series {
	labels := f.labelText(values)
	if s, ok := f.series[labels]; ok {
		return s
	}
	s := &series{}
	if f.kind == histogram {
		s.counts = make([]uint64, len(f.buckets)+1)
	}
	if f.series == nil {
		f.series = map[string]*series{}
	}
	f.series[labels] = s
	return s
}

func (f *family) set(value float64, labels ...string) { f.of(labels).value = value }

func (f *family) add(difference float64, labels ...string) { f.of(labels).value += difference }

func (f *family) observe(took time.Duration, labels ...string) {
	s := f.of(labels)
	s.value += took.Seconds()
	bucket, _ := slices.BinarySearch(f.buckets, took.Seconds()) // a bound belongs to its own bucket
	s.counts[bucket]++
}

// forget removes all series.
func (f *family) forget() { clear(f.series) }

// escape makes a label's value what stands between the quotes.
var escape = strings.NewReplacer(`\`, `\\`, "\n", `\n`, `"`, `\"`)

// labelText is the labels as they stand between the braces.
func (f *family) labelText(values []string) string {
	var text strings.Builder
	for i, label := range f.labels {
		if i > 0 {
			text.WriteByte(',')
		}
		text.WriteString(label + `="` + escape.Replace(values[i]) + `"`)
	}
	return text.String()
}

// write appends the family in the text format, version 0.0.4:
// https://prometheus.io/docs/instrumenting/exposition_formats. A family without series is shown by its head alone.
func (f *family) write(page *bytes.Buffer) {
	page.WriteString("# HELP " + f.name + " " + f.help + "\n# TYPE " + f.name + " " + string(f.kind) + "\n")
	for _, labels := range slices.Sorted(maps.Keys(f.series)) {
		s := f.series[labels]
		if f.kind != histogram {
			sample(page, f.name, labels, s.value)
			continue
		}
		// Buckets are cumulative in the text.
		total := uint64(0)
		for i, count := range s.counts {
			total += count
			bound := "+Inf"
			if i < len(f.buckets) {
				bound = number(f.buckets[i])
			}
			sample(page, f.name+"_bucket", labels+`,le="`+bound+`"`, float64(total))
		}
		sample(page, f.name+"_sum", labels, s.value)
		sample(page, f.name+"_count", labels, float64(total))
	}
}

func sample(page *bytes.Buffer, name, labels string, value float64) {
	page.WriteString(name)
	if labels != "" {
		page.WriteString("{" + labels + "}")
	}
	page.WriteString(" " + number(value) + "\n")
}

func number(value float64) string { return strconv.FormatFloat(value, 'g', -1, 64) }
