package main_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/lab"
)

// Profiles are what go tool pprof and go tool trace read.
func TestProfiles(t *testing.T) {
	t.Parallel()
	addr := freePort(t)
	plugin := startPlugin(t, lab.PluginOptions{Mode: "node", Dir: shortDir(t), Instance: lab.Instance{ID: instanceID}, Args: []string{"--http-endpoint=" + addr, "--pprof"}})
	const gzip = "\x1f\x8b"
	for _, test := range []struct {
		path   string
		code   int
		begins string
	}{
		{"", 200, "allocs "},
		{"heap", 200, gzip},
		{"goroutine?debug=2", 200, "goroutine "},
		{"profile?seconds=1", 200, gzip},
		{"trace?seconds=1", 200, "go 1."},
		{"cmdline", 200, programs.Plugin + "\x00"},
		{"nothing", 404, "there is no such profile"},
		{"profile?seconds=0", 400, "seconds is not"},
		{"trace?seconds=x", 400, "seconds is not"},
		{"trace?seconds=-1", 400, "seconds is not"},
	} {
		t.Run(test.path, func(t *testing.T) {
			code, body := get(t, "http://"+addr+"/debug/pprof/"+test.path)
			if code != test.code || !strings.HasPrefix(body, test.begins) {
				t.Errorf("%d %.40q, want %d and %q", code, body, test.code, test.begins)
			}
		})
	}
	if log := plugin.Stderr().String(); strings.Contains(log, "level=ERROR") {
		t.Errorf("the log says: %s", log)
	}
}

// A second recorder is refused while the first one runs, and taken when the reader of the first has gone.
func TestOneRecorderAtATime(t *testing.T) {
	t.Parallel()
	addr := freePort(t)
	startPlugin(t, lab.PluginOptions{Mode: "node", Dir: shortDir(t), Instance: lab.Instance{ID: instanceID}, Args: []string{"--http-endpoint=" + addr, "--pprof"}})
	reading, leave := context.WithCancel(t.Context())
	first := make(chan error, 1)
	go func() {
		first <- func() error {
			for {
				req, err := http.NewRequestWithContext(reading, http.MethodGet, "http://"+addr+"/debug/pprof/profile?seconds=600", nil)
				if err != nil {
					return err
				}
				resp, err := http.DefaultClient.Do(req)
				if err != nil {
					return err
				}
				if err := resp.Body.Close(); err != nil || resp.StatusCode != http.StatusConflict {
					return fmt.Errorf("status %d, %v", resp.StatusCode, err)
				}
			}
		}()
	}()
	eventually(t, "the second is refused", func() bool {
		code, _ := get(t, "http://"+addr+"/debug/pprof/profile?seconds=1")
		return code == 409
	})
	leave()
	if err := <-first; !errors.Is(err, context.Canceled) {
		t.Errorf("the first ended by itself: %v", err)
	}
	eventually(t, "the next is taken", func() bool {
		code, _ := get(t, "http://"+addr+"/debug/pprof/profile?seconds=1")
		return code == 200
	})
}
