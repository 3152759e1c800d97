// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package auto_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/auto"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/metadatatest"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/nomad"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/static"
)

const (
	idA    = "6f3a1c9e-2b7d-4e58-9a41-0d5c8e7f1a23"
	idB    = "b81d0f42-77c3-4c0a-8e6f-93a5d2b4c716"
	secret = "oxide-token-canary"
)

// world is what the sources of an identity know: the operator, the machine and the Nomad agent.
type world struct {
	// explicit holds the operator's values.
	explicit static.Options
	// vendor, firmware and cloudInit are the machine's vendor, system UUID and instance data.
	vendor, firmware, cloudInit string
	// agent is the agent's answer. If it is empty, the agent closes the connection.
	agent string
	// noAgent leaves out the Nomad source.
	noAgent bool
}

func meta(pairs ...string) string {
	var text strings.Builder
	for i := 0; i+1 < len(pairs); i += 2 {
		if i > 0 {
			text.WriteString(", ")
		}
		text.WriteString(`"` + pairs[i] + `": "` + pairs[i+1] + `"`)
	}
	return `{"Meta": {` + text.String() + `}}`
}

// build makes the provider of a world. The provider logs to the buffer.
func (w world) build(t *testing.T, log *bytes.Buffer) metadata.Provider {
	t.Helper()
	options := guest.Options{Sys: t.TempDir()}
	options.CloudInit = filepath.Join(options.Sys, "instance-data.json")
	write := func(path, text string) {
		if text == "" {
			return
		}
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	write(filepath.Join(options.Sys, "class/dmi/id/sys_vendor"), w.vendor)
	write(filepath.Join(options.Sys, "class/dmi/id/product_uuid"), w.firmware)
	write(options.CloudInit, w.cloudInit)
	discovered := []auto.Source{{Name: "guest", Provider: guest.New(options)}}
	if !w.noAgent {
		discovered = append(discovered, auto.Source{Name: "nomad", Provider: nomad.New(nomad.Options{Address: w.listen(t)})})
	}
	return auto.New(auto.Options{
		Explicit: auto.Source{Name: "static", Provider: static.New(w.explicit)}, Discovered: discovered,
		Log: slog.New(slog.NewTextHandler(log, nil)),
	})
}

func (w world) listen(t *testing.T) string {
	server := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		switch w.agent {
		case "":
			panic(http.ErrAbortHandler) // closes the connection
		case "refuses":
			http.Error(rw, "Permission denied", http.StatusForbidden)
		default:
			_, _ = rw.Write([]byte(w.agent)) // an error means that the client has disconnected
		}
	}))
	t.Cleanup(server.Close)
	return server.URL
}

func TestPrecedence(t *testing.T) {
	const id, rack = "oxide.instance_id", "oxide.rack"
	file := filepath.Join(t.TempDir(), "metadata.env")
	if err := os.WriteFile(file, []byte("OXIDE_RACK=file\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		world world
		want  metadata.Instance
		logs  []string // one line each
		kind  error
		says  string
	}{
		"only the machine": {world{vendor: "Oxide", firmware: idA, noAgent: true}, metadata.Instance{ID: idA},
			[]string{"instance_id_from=guest rack_from=configuration"}, nil, ""},
		"ID of the machine, rack of the agent": {world{vendor: "Oxide", firmware: idA, agent: meta(rack, "east")}, metadata.Instance{ID: idA, Rack: "east"},
			[]string{"instance_id_from=guest rack_from=nomad"}, nil, ""},
		"both agree": {world{vendor: "Oxide", firmware: idA, agent: meta(id, strings.ToUpper(idA), rack, "east")}, metadata.Instance{ID: idA, Rack: "east"},
			[]string{"instance_id_from=guest rack_from=nomad"}, nil, ""},
		"neither knows the rack": {world{vendor: "Oxide", firmware: idA, agent: meta(id, idA)}, metadata.Instance{ID: idA},
			[]string{"instance_id_from=guest"}, nil, ""},
		"another vendor's machine": {world{vendor: "QEMU", firmware: idB, agent: meta(id, idA, rack, "east")}, metadata.Instance{ID: idA, Rack: "east"},
			[]string{"instance_id_from=nomad rack_from=nomad", "source=guest reason=\"this is no Oxide instance"}, nil, ""},
		"the operator's ID wins": {world{explicit: static.Options{InstanceID: idA}, vendor: "Oxide", firmware: idB, agent: meta(id, idB)}, metadata.Instance{ID: idA},
			[]string{"level=WARN msg=\"metadata: two sources differ about the instance ID\" used=" + idA + " from=static not_used=" + idB + " by=guest", "by=nomad", "instance_id_from=static"}, nil, ""},
		"the operator's rack wins": {world{explicit: static.Options{Rack: "west"}, vendor: "Oxide", firmware: idA, agent: meta(id, idA, rack, "east")}, metadata.Instance{ID: idA, Rack: "west"},
			[]string{"two sources differ about the rack\" used=west from=static not_used=east by=nomad", "instance_id_from=guest rack_from=static"}, nil, ""},
		"the rack of a file": {world{explicit: static.Options{File: file}, vendor: "Oxide", firmware: idA, noAgent: true}, metadata.Instance{ID: idA, Rack: "file"},
			[]string{"instance_id_from=guest rack_from=static"}, nil, ""},
		"the operator's ID overrides a conflict of the machine": {
			world{explicit: static.Options{InstanceID: idA}, vendor: "Oxide", firmware: idA, cloudInit: `{"v1": {"instance_id": "` + idB + `"}}`, noAgent: true}, metadata.Instance{ID: idA},
			[]string{"instance_id_from=static", "source=guest"}, nil, ""},
		"a source asked for comparison is down": {world{explicit: static.Options{InstanceID: idA, Rack: "west"}, vendor: "QEMU"}, metadata.Instance{ID: idA, Rack: "west"},
			[]string{"instance_id_from=static", "source=guest", "source=nomad"}, nil, ""},

		"two sources differ": {world{vendor: "Oxide", firmware: idA, agent: meta(id, idB)}, metadata.Instance{}, nil,
			metadata.ErrInvalid, "guest says that this is instance " + idA + ", and nomad that it is " + idB + ": sources contradict each other; find out which is right"},
		"two sources differ, rack given": {world{explicit: static.Options{Rack: "west"}, vendor: "Oxide", firmware: idA, agent: meta(id, idB)}, metadata.Instance{}, nil,
			metadata.ErrConflict, ""},
		"a machine that contradicts itself": {world{vendor: "Oxide", firmware: idA, cloudInit: `{"v1": {"instance_id": "` + idB + `"}}`, agent: meta(id, idA, rack, "east")}, metadata.Instance{}, nil,
			metadata.ErrConflict, "instance-data.json that it is " + idB},
		"the rack's source is down": {world{vendor: "Oxide", firmware: idA}, metadata.Instance{}, nil,
			metadata.ErrNotReady, "guest knows the instance, but nomad, which may know the rack, failed: ask the Nomad agent at "},
		"the rack's source denies access": {world{explicit: static.Options{InstanceID: idA}, vendor: "Oxide", firmware: idA, agent: "refuses"}, metadata.Instance{}, nil,
			metadata.ErrInvalid, "static knows the instance, but nomad, which may know the rack, failed: ask the Nomad agent at "},
		"no source knows the ID yet": {world{vendor: "QEMU", agent: meta(rack, "east")}, metadata.Instance{}, nil,
			metadata.ErrNotReady, "no source knows which instance this is: guest: this is no Oxide instance: "},
		"no source can know the ID": {world{agent: "refuses"}, metadata.Instance{}, nil,
			metadata.ErrInvalid, "; nomad: ask the Nomad agent at "},
		"only a machine, and it does not know": {world{vendor: "QEMU", noAgent: true}, metadata.Instance{}, nil,
			metadata.ErrInvalid, "this is no Oxide instance"},
		"the operator's file is missing": {world{explicit: static.Options{File: file + ".none"}, vendor: "Oxide", firmware: idA, noAgent: true}, metadata.Instance{}, nil,
			metadata.ErrNotReady, "wait for " + file + ".none"},
		"the operator's ID is invalid": {world{explicit: static.Options{InstanceID: "${meta.x}"}, vendor: "Oxide", firmware: idA, noAgent: true}, metadata.Instance{}, nil,
			metadata.ErrInvalid, "--instance-id: "},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var log bytes.Buffer
			p := tt.world.build(t, &log)
			for range 2 { // the second call logs nothing
				got, err := p.Instance(context.Background())
				if got != tt.want || !errors.Is(err, tt.kind) || err != nil && !strings.Contains(err.Error(), tt.says) {
					t.Fatalf("got %+v, %v; want %+v, %v that says %q", got, err, tt.want, tt.kind, tt.says)
				}
			}
			lines := strings.Split(strings.TrimSpace(log.String()), "\n")
			if log.Len() == 0 {
				lines = nil
			}
			if len(lines) != len(tt.logs) {
				t.Fatalf("logged %d lines, want %d:\n%s", len(lines), len(tt.logs), &log)
			}
			for i, want := range tt.logs {
				if !strings.Contains(lines[i], want) {
					t.Errorf("line %d is %q, want %q in it", i, lines[i], want)
				}
			}
		})
	}
}

// hanging is a provider that never answers.
type hanging struct{}

func (hanging) Instance(ctx context.Context) (metadata.Instance, error) {
	<-ctx.Done()
	return metadata.Instance{}, &metadata.Error{Kind: metadata.ErrNotReady, What: "ask the source", Cause: ctx.Err()}
}

// A source that is only asked for comparison delays the answer by one second at most.
func TestHangingSourceDelaysOneSecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		p := auto.New(auto.Options{
			Explicit:   auto.Source{Name: "static", Provider: static.New(static.Options{InstanceID: idA, Rack: "west"})},
			Discovered: []auto.Source{{Name: "nomad", Provider: hanging{}}},
			Log:        slog.New(slog.NewTextHandler(&log, nil)),
		})
		start := time.Now()
		if got, err := p.Instance(t.Context()); err != nil || got != (metadata.Instance{ID: idA, Rack: "west"}) {
			t.Errorf("got %+v, %v", got, err)
		}
		if took := time.Since(start); took != time.Second {
			t.Errorf("the answer took %s, want a second", took)
		}
		if !strings.Contains(log.String(), "source=nomad") {
			t.Errorf("the log does not name the source that hangs:\n%s", &log)
		}
	})
}

// If several racks are configured, a source must name one of them.
func TestSeveralRacks(t *testing.T) {
	for _, test := range []struct {
		rack, want string
		racks      []string
	}{
		{"west", "", []string{"east", "west"}},
		{"", "no source names its rack, and the configuration has several (east, west)", []string{"east", "west"}},
		{"", "no source names its rack", []string{"default", "west"}},
		{"wets", `on rack "wets", and the configuration has only east, west`, []string{"east", "west"}},
		{"", "", []string{"east"}},
		{"other", "", []string{"east"}},
		{"", "", nil},
	} {
		p := auto.New(auto.Options{
			Explicit: auto.Source{Name: "static", Provider: static.New(static.Options{InstanceID: idA, Rack: test.rack})},
			Racks:    test.racks,
		})
		got, err := p.Instance(t.Context())
		switch {
		case test.want == "" && (err != nil || got.Rack != test.rack):
			t.Errorf("%+v: %+v, %v", test, got, err)
		case test.want != "" && (!errors.Is(err, metadata.ErrNotReady) || !strings.Contains(err.Error(), test.want)):
			t.Errorf("%+v: %+v, %v", test, got, err)
		}
	}
}

func TestNoSource(t *testing.T) {
	p := auto.New(auto.Options{Explicit: auto.Source{Name: "static", Provider: static.New(static.Options{})}})
	if got, err := p.Instance(
		context.Background(),
	); !errors.Is(err, metadata.ErrInvalid) ||
		!strings.Contains(err.Error(), "set --instance-id or --metadata-file") {
		t.Errorf("got %+v, %v", got, err)
	}
}

// TestConformance runs the suite with a machine that knows nothing and an agent behind a socket.
func TestConformance(t *testing.T) {
	metadatatest.Run(t, func(t *testing.T) metadatatest.Harness {
		a := &agent{t: t, repairs: make(chan struct{})}
		server := httptest.NewServer(a)
		t.Cleanup(server.Close)
		return metadatatest.Harness{
			New: func() metadata.Provider {
				return auto.New(auto.Options{
					Explicit: auto.Source{Name: "static", Provider: static.New(static.Options{})},
					Discovered: []auto.Source{
						{Name: "guest", Provider: guest.New(guest.Options{Sys: t.TempDir()})},
						{Name: "nomad", Provider: nomad.New(nomad.Options{Address: server.URL, Token: secret})},
					},
				})
			},
			Set:     a.set,
			Break:   a.breakIt,
			Repair:  a.repair,
			Secrets: []string{secret},
			Cannot: map[metadatatest.Ability]string{
				metadatatest.CanKnowParts: "this provider asks other providers for partial answers",
			},
		}
	})
}

// agent is a Nomad agent with the metadata that the suite sets.
type agent struct {
	t *testing.T

	mu      sync.Mutex
	world   metadatatest.Content
	fault   metadatatest.Fault
	repairs chan struct{}
}

func (a *agent) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	world, fault, repaired := a.world, a.fault, a.repairs
	a.mu.Unlock()
	switch fault {
	case metadatatest.Down:
		panic(http.ErrAbortHandler) // closes the connection
	case metadatatest.Denied:
		http.Error(w, secret, http.StatusForbidden)
		return
	case metadatatest.Slow:
		select {
		case <-repaired:
			a.ServeHTTP(w, r)
		case <-r.Context().Done():
		}
		return
	}
	meta := map[string]string{}
	if world.ID != nil {
		meta["oxide.instance_id"] = *world.ID
	}
	if world.Rack != nil {
		meta["oxide.rack"] = *world.Rack
	}
	if err := json.NewEncoder(w).Encode(map[string]any{"Meta": meta}); err != nil {
		a.t.Error(err)
	}
}

func (a *agent) set(w metadatatest.Content) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.world = w
}

func (a *agent) breakIt(f metadatatest.Fault) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.fault = f
}

func (a *agent) repair() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.fault = ""
	close(a.repairs)
	a.repairs = make(chan struct{})
}

type followed struct {
	metadata.Provider
	changes chan struct{}
}

func (f followed) Follow(context.Context) <-chan struct{} { return f.changes }

// Follow merges the changes of all sources that report changes. Without such a source, Follow returns nil.
func TestFollow(t *testing.T) {
	a, b := make(chan struct{}), make(chan struct{})
	p := auto.New(auto.Options{Discovered: []auto.Source{
		{Name: "a", Provider: followed{changes: a}}, {Name: "silent", Provider: static.New(static.Options{})},
		{Name: "b", Provider: followed{changes: b}},
	}})
	changes := p.Follow(t.Context())
	for _, source := range []chan struct{}{a, b, a} {
		source <- struct{}{}
		<-changes
	}
	if changes := auto.New(auto.Options{}).Follow(t.Context()); changes != nil {
		t.Error("Follow without sources returns a channel, want nil")
	}
}
