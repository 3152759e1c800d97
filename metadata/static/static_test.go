// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package static_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/metadatatest"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/static"
)

const (
	idA    = "6f3a1c9e-2b7d-4e58-9a41-0d5c8e7f1a23"
	idB    = "b81d0f42-77c3-4c0a-8e6f-93a5d2b4c716"
	secret = "oxide-token-canary"
)

// world is the env file and the permissions of the user who reads it.
type world struct {
	t      *testing.T
	file   string
	fault  metadatatest.Fault
	denied atomic.Bool
	stop   func()
}

func TestConformance(t *testing.T) {
	metadatatest.Run(t, func(t *testing.T) metadatatest.Harness {
		w := &world{t: t, file: filepath.Join(t.TempDir(), "metadata.env")}
		w.set(metadatatest.Content{})
		return metadatatest.Harness{
			New: func() metadata.Provider {
				return metadatatest.Unprivileged(static.New(static.Options{File: w.file}), &w.denied)
			},
			Set: w.set, Break: w.breakIt, Repair: w.repair,
			Secrets: []string{secret},
		}
	})
}

// set replaces the file. The file holds the identity, and a secret that the plugin must not show.
func (w *world) set(world metadatatest.Content) {
	var text strings.Builder
	fmt.Fprintf(&text, "# identity\nOXIDE_TOKEN=%s\n", secret)
	if world.ID != nil {
		fmt.Fprintf(&text, "OXIDE_INSTANCE_ID='%s'\n", *world.ID)
	}
	if world.Rack != nil {
		fmt.Fprintf(&text, "OXIDE_RACK='%s'\n", *world.Rack)
	}
	replace(w.t, w.file, text.String())
}

func (w *world) breakIt(fault metadatatest.Fault) {
	w.fault = fault
	var err error
	switch fault {
	case metadatatest.Down:
		err = os.Rename(w.file, w.file+".away")
	case metadatatest.Denied:
		w.denied.Store(true)
		err = os.Chmod(w.file, 0)
	case metadatatest.Slow:
		w.stop = keepWriting(w.t, w.file)
	}
	if err != nil {
		w.t.Error(err)
	}
}

func (w *world) repair() {
	var err error
	switch w.fault {
	case metadatatest.Down:
		err = os.Rename(w.file+".away", w.file)
	case metadatatest.Denied:
		w.denied.Store(false)
		err = os.Chmod(w.file, 0o600)
	case metadatatest.Slow:
		w.stop()
	}
	if err != nil {
		w.t.Error(err)
	}
}

// keepWriting appends to a file until stop is called. It returns after the first write, so that the file is changing
// for all later calls. stop returns after the last write.
func keepWriting(t *testing.T, file string) (stop func()) {
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Error(err)
		return func() {}
	}
	write := func() {
		if _, err := f.WriteString("\n"); err != nil {
			t.Error(err)
		}
	}
	write()
	stopped, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		defer f.Close()
		for {
			select {
			case <-stopped:
				return
			case <-time.After(5 * time.Millisecond): // real time, as in a file that a program keeps writing
				write()
			}
		}
	}()
	return func() { close(stopped); <-done }
}

func TestFile(t *testing.T) {
	for name, tt := range map[string]struct {
		text string
		want metadata.Instance
		err  string // what the error must say
	}{
		"plain":             {"OXIDE_INSTANCE_ID=" + idA + "\nOXIDE_RACK=east\n", metadata.Instance{ID: idA, Rack: "east"}, ""},
		"no final newline":  {"OXIDE_RACK=east\nOXIDE_INSTANCE_ID=" + idA, metadata.Instance{ID: idA, Rack: "east"}, ""},
		"windows":           {"\ufeffOXIDE_INSTANCE_ID=" + idA + "\r\nOXIDE_RACK=\"east\"\r\n", metadata.Instance{ID: idA, Rack: "east"}, ""},
		"comments":          {"# first\n\n  # second\nOXIDE_INSTANCE_ID=" + idA + " # mine\nOXIDE_RACK='east'\t# lab\n", metadata.Instance{ID: idA, Rack: "east"}, ""},
		"export":            {"export OXIDE_INSTANCE_ID=" + idA + "\nexport\tOXIDE_RACK=east\n", metadata.Instance{ID: idA, Rack: "east"}, ""},
		"space":             {" OXIDE_INSTANCE_ID = " + idA + " \n\tOXIDE_RACK=east", metadata.Instance{ID: idA, Rack: "east"}, ""},
		"double quotes":     {`OXIDE_INSTANCE_ID="` + idA + `"`, metadata.Instance{ID: idA}, ""},
		"empty rack":        {"OXIDE_INSTANCE_ID=" + idA + "\nOXIDE_RACK=\n", metadata.Instance{ID: idA}, ""},
		"rack is a comment": {"OXIDE_INSTANCE_ID=" + idA + "\nOXIDE_RACK=# later\n", metadata.Instance{ID: idA}, ""},
		"same twice":        {"OXIDE_INSTANCE_ID=" + idA + "\nOXIDE_INSTANCE_ID={" + strings.ToUpper(idA) + "}\n", metadata.Instance{ID: idA}, ""},
		"other keys":        {"PATH=/bin\nOXIDE_INSTANCE_ID=" + idA + "\nNOTE='open\n", metadata.Instance{ID: idA}, ""},
		"ID differs twice":  {"OXIDE_INSTANCE_ID=" + idA + "\n\nOXIDE_INSTANCE_ID=" + idB + "\n", metadata.Instance{}, "line 3 sets OXIDE_INSTANCE_ID to another value than line 1"},
		"rack differs":      {"OXIDE_INSTANCE_ID=" + idA + "\nOXIDE_RACK=a\nOXIDE_RACK=b\n", metadata.Instance{}, "line 3 sets OXIDE_RACK to another value than line 2"},
		"second ID empty":   {"OXIDE_INSTANCE_ID=" + idA + "\nOXIDE_INSTANCE_ID=\n", metadata.Instance{}, "another value than line 1"},
		"no ID":             {"OXIDE_RACK=east\n", metadata.Instance{}, "has no line OXIDE_INSTANCE_ID; add"},
		"only comments":     {"# nothing yet\n", metadata.Instance{}, "has no line OXIDE_INSTANCE_ID; add"},
		"lower-case key":    {"oxide_instance_id=" + idA + "\n", metadata.Instance{}, "has no line OXIDE_INSTANCE_ID"},
		"no equals sign":    {"OXIDE_INSTANCE_ID=" + idA + "\nhunter2\n", metadata.Instance{}, "line 2 is not KEY=VALUE"},
		"no key":            {"=hunter2\n", metadata.Instance{}, "line 1 is not KEY=VALUE"},
		"yaml":              {"oxide-instance-id: " + idA + "\n", metadata.Instance{}, "line 1 is not KEY=VALUE"},
		"open quote":        {"OXIDE_INSTANCE_ID='" + idA + "\n", metadata.Instance{}, "line 1 has an unclosed quote"},
		"text after quote":  {"OXIDE_INSTANCE_ID='" + idA + "'hunter2\n", metadata.Instance{}, "line 1 has an unclosed quote, or text after the closing quote"},
		"template":          {"OXIDE_INSTANCE_ID=${meta.oxide.instance_id}\n", metadata.Instance{}, "a template that the orchestrator did not fill in"},
		"bad ID":            {"OXIDE_INSTANCE_ID=node-a\n", metadata.Instance{}, `line 1: the instance ID "node-a" is not a UUID; set it to`},
		"bad rack":          {"OXIDE_INSTANCE_ID=" + idA + "\nOXIDE_RACK=east 1\n", metadata.Instance{}, "line 2: the rack name"},
		"binary":            {"\x00\x01\x02", metadata.Instance{}, "line 1 is not KEY=VALUE"},
		"too large":         {strings.Repeat("#\n", 40000), metadata.Instance{}, "larger than"},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "metadata.env")
			replace(t, file, tt.text)
			got, err := static.New(static.Options{File: file}).Instance(context.Background())
			if tt.err == "" {
				if err != nil || got != tt.want {
					t.Fatalf("got %+v, %v; want %+v", got, err, tt.want)
				}
				return
			}
			if !errors.Is(err, metadata.ErrInvalid) || !strings.Contains(err.Error(), tt.err) ||
				!strings.Contains(err.Error(), file) {
				t.Fatalf("got %+v, %v; want an ErrInvalid that says %q and names the file", got, err, tt.err)
			}
			if strings.Contains(err.Error(), "hunter2") {
				t.Errorf("the error repeats the file: %v", err)
			}
		})
	}
}

func TestNotAnEnvFile(t *testing.T) {
	dir := t.TempDir()
	pipe, empty, loop := filepath.Join(dir, "pipe"), filepath.Join(dir, "empty"), filepath.Join(dir, "loop")
	if err := errors.Join(
		syscall.Mkfifo(pipe, 0o600),
		os.WriteFile(empty, nil, 0o600),
		os.Symlink(loop, loop),
	); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		file string
		kind error
	}{
		"pipe":         {pipe, metadata.ErrInvalid},
		"directory":    {dir, metadata.ErrInvalid},
		"below a file": {filepath.Join(empty, "x"), metadata.ErrInvalid},
		"symlink loop": {loop, metadata.ErrInvalid},
		"empty":        {empty, metadata.ErrNotReady},
		"missing":      {filepath.Join(dir, "later", "metadata.env"), metadata.ErrNotReady},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := static.New(static.Options{File: tt.file}).Instance(context.Background())
			if !errors.Is(err, tt.kind) || strings.Count(err.Error(), tt.file) != 1 {
				t.Errorf("got %+v, %v; want %q that names the file once", got, err, tt.kind)
			}
		})
	}
}

func TestExplicitValues(t *testing.T) {
	file := filepath.Join(t.TempDir(), "metadata.env")
	replace(t, file, "OXIDE_INSTANCE_ID="+idA+"\nOXIDE_RACK=east\n")
	missing := file + ".missing"
	for name, tt := range map[string]struct {
		options static.Options
		want    metadata.Instance
		kind    error
		warns   int
	}{
		"ID only":                   {static.Options{InstanceID: "{" + strings.ToUpper(idB) + "}"}, metadata.Instance{ID: idB}, nil, 0},
		"both need no file":         {static.Options{InstanceID: idB, Rack: "west", File: missing}, metadata.Instance{ID: idB, Rack: "west"}, nil, 0},
		"ID wins over file":         {static.Options{InstanceID: idB, File: file}, metadata.Instance{ID: idB, Rack: "east"}, nil, 1},
		"same ID does not warn":     {static.Options{InstanceID: strings.ToUpper(idA), File: file}, metadata.Instance{ID: idA, Rack: "east"}, nil, 0},
		"rack wins over file":       {static.Options{Rack: "west", File: file}, metadata.Instance{ID: idA, Rack: "west"}, nil, 1},
		"file does not exist yet":   {static.Options{InstanceID: idB, File: missing}, metadata.Instance{}, metadata.ErrNotReady, 0},
		"no values":                 {static.Options{}, metadata.Instance{}, metadata.ErrInvalid, 0},
		"rack only":                 {static.Options{Rack: "west"}, metadata.Instance{}, metadata.ErrInvalid, 0},
		"unfilled template":         {static.Options{InstanceID: "${meta.oxide.instance_id}"}, metadata.Instance{}, metadata.ErrInvalid, 0},
		"unfilled template of rack": {static.Options{InstanceID: idA, Rack: "${meta.oxide.rack}"}, metadata.Instance{}, metadata.ErrInvalid, 0},
	} {
		t.Run(name, func(t *testing.T) {
			var log lines
			tt.options.Log = slog.New(slog.NewTextHandler(&log, nil))
			p := static.New(tt.options)
			for range 3 {
				got, err := p.Instance(context.Background())
				if got != tt.want || !errors.Is(err, tt.kind) {
					t.Fatalf("got %+v, %v; want %+v, %v", got, err, tt.want, tt.kind)
				}
			}
			if log.count() != tt.warns {
				t.Errorf("logged %d lines in three calls, want %d:\n%s", log.count(), tt.warns, log.buffer.String())
			}
		})
	}
}

// PartialInstance returns the explicit values even without an ID, because another source may know the ID.
func TestPartialInstanceWithoutAnID(t *testing.T) {
	for _, want := range []metadata.Instance{{}, {Rack: "west"}, {ID: idA}, {ID: idA, Rack: "west"}} {
		p := static.New(static.Options{InstanceID: want.ID, Rack: want.Rack})
		if got, err := p.PartialInstance(context.Background()); err != nil || got != want {
			t.Errorf("PartialInstance: %+v, %v; want %+v", got, err, want)
		}
		if got, err := p.Instance(context.Background()); want.ID == "" && !errors.Is(err, metadata.ErrInvalid) {
			t.Errorf("Instance without an ID: %+v, %v; want an ErrInvalid", got, err)
		}
	}
}

func TestUnknownKeysAreLoggedOnceAndWithoutValues(t *testing.T) {
	file := filepath.Join(t.TempDir(), "metadata.env")
	replace(t, file, "OXIDE_INSTANCE_ID="+idA+"\nOXIDE_TOKEN="+secret+"\nPASSWORD=hunter2\n")
	var log lines
	p := static.New(static.Options{File: file, Log: slog.New(slog.NewTextHandler(&log, nil))})
	for range 3 {
		if _, err := p.Instance(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	text := log.buffer.String()
	if log.count() != 2 || !strings.Contains(text, "key=OXIDE_TOKEN") || !strings.Contains(text, "key=PASSWORD") {
		t.Errorf("want one line for each unknown key, got:\n%s", text)
	}
	if strings.Contains(text, secret) || strings.Contains(text, "hunter2") {
		t.Errorf("the log holds a value:\n%s", text)
	}
}

// A file that is written in place, as a shell's redirection does, is not accepted while it is incomplete. The writer
// pauses where an incomplete file would be valid. The test needs real time: the provider compares the file's
// modification time, which the kernel sets, with the clock. If the machine is so busy that a pause is nearly as long as
// settleTime, the attempt proves nothing and is repeated.
func TestHalfWrittenFileIsNotAccepted(t *testing.T) {
	for begun := time.Now(); time.Since(begun) < 5*time.Minute; {
		longest, accepted, rejected := readWhileWriting(t)
		if longest < 80*time.Millisecond {
			if rejected != nil {
				t.Errorf("an error while the file is written: %v", rejected)
			}
			for got := range accepted {
				if got != (metadata.Instance{ID: idA, Rack: "east-12"}) && got != (metadata.Instance{ID: idB, Rack: "west"}) {
					t.Errorf("accepted an incomplete file: %+v", got)
				}
			}
			return
		}
	}
	t.Error("the machine is too busy to write a file without long pauses")
}

// readWhileWriting reads a file while the file is rewritten in place several times. It returns the writer's longest
// pause, all answers of the provider, and the last error other than ErrNotReady.
func readWhileWriting(t *testing.T) (longest time.Duration, accepted map[metadata.Instance]bool, rejected error) {
	file := filepath.Join(t.TempDir(), "metadata.env")
	p := static.New(static.Options{File: file})
	accepted = map[metadata.Instance]bool{}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range 4 {
			longest = max(longest,
				writeSlowly(t, file, "OXIDE_INSTANCE_ID=", idA[:8], idA[8:]+"\n", "OXIDE_RACK=east-1", "2\n"),
				writeSlowly(t, file, "OXIDE_RACK=we", "st\n", "OXIDE_INSTANCE_ID="+idB, "\n"))
		}
	}()
	for writing := true; writing; {
		select {
		case <-done:
			writing = false
		default:
		}
		got, err := p.Instance(context.Background())
		if err == nil {
			accepted[got] = true
		} else if !errors.Is(err, metadata.ErrNotReady) {
			rejected = err
		}
	}
	<-done
	if got, err := p.Instance(context.Background()); err != nil || got.ID != idB {
		t.Errorf("the complete file: %+v, %v", got, err)
	}
	return longest, accepted, rejected
}

// writeSlowly writes a file in place, part by part, and returns its longest pause.
func writeSlowly(t *testing.T, file string, parts ...string) (longest time.Duration) {
	f, err := os.Create(file)
	if err != nil {
		t.Error(err)
		return 0
	}
	defer f.Close()
	last := time.Now()
	for _, part := range parts {
		if _, err := f.WriteString(part); err != nil {
			t.Error(err)
		}
		<-time.After(20 * time.Millisecond)
		longest, last = max(longest, time.Since(last)), time.Now()
	}
	return longest
}

// replace replaces the file by a rename. The new file has an old modification time, so that the provider does not wait
// until it has not changed for a while.
func replace(t *testing.T, file, text string) {
	t.Helper()
	temporary, err := os.CreateTemp(filepath.Dir(file), "new")
	if err != nil {
		t.Error(err)
		return
	}
	_, err = temporary.WriteString(text)
	modified := time.Now().Add(-time.Hour)
	if err := errors.Join(
		err,
		temporary.Close(),
		os.Chtimes(temporary.Name(), modified, modified),
		os.Rename(temporary.Name(), file),
	); err != nil {
		t.Error(err)
	}
}

// lines records a log and counts its lines.
type lines struct {
	mu     sync.Mutex
	buffer bytes.Buffer
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buffer.Write(b)
}

func (l *lines) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return bytes.Count(l.buffer.Bytes(), []byte("\n"))
}
