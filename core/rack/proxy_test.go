// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// An error says that a proxy answered, and not the rack. Whatever the proxy answers says nothing about the rack, the
// token or the project.
func TestProxyAnswersInsteadOfTheRack(t *testing.T) {
	const page = "<html><head><title>nginx</title></head><body>oxide-token-echoed</body></html>"
	r := newRig(t, simrack.Options{})
	for _, answer := range []struct {
		status     int
		kind, body string
		mentions   string
	}{
		{502, "text/html", page, "Bad Gateway (HTTP 502)"},
		{503, "text/html", page, "Service Unavailable (HTTP 503)"},
		{504, "text/html", page, "Gateway Timeout (HTTP 504)"},
		{502, "", "", "Bad Gateway (HTTP 502)"},
		{503, "text/plain", "upstream connect error", "Service Unavailable (HTTP 503)"},
		{504, "application/json", `{"message":"Endpoint request timed out"}`, "Endpoint request timed out (HTTP 504)"},
		{400, "text/html", page, "Bad Request (HTTP 400)"},
		{401, "text/html", page, "Unauthorized (HTTP 401)"},
		{403, "text/html", page, "Forbidden (HTTP 403)"},
		{404, "text/html", page, "Not Found (HTTP 404)"},
		{407, "text/html", page, "Proxy Authentication Required (HTTP 407)"},
		{500, "text/html", page, "Internal Server Error (HTTP 500)"},
		{302, "text/html", page, "Found (HTTP 302)"},
		{200, "text/html; charset=utf-8", page, "a page in HTML"},
	} {
		t.Run(strconv.Itoa(answer.status)+" "+answer.kind, func(t *testing.T) {
			r.intercept(func(w http.ResponseWriter, req *http.Request) bool {
				if strings.HasSuffix(req.URL.Path, "/ping") {
					return false
				}
				w.Header().Set("Content-Type", answer.kind)
				w.WriteHeader(answer.status)
				_, err := w.Write([]byte(answer.body))
				return err == nil
			})
			_, created := r.CreateDisk(t.Context(), DiskSpec{Name: "d", SizeBytes: gib, BlockSize: 4096})
			_, listed := r.Instances(t.Context())
			for call, err := range map[string]error{"create": created, "list": listed} {
				switch {
				case err == nil || !errors.Is(err, ErrUnavailable) || fault.Of(err) != fault.ProxyAnswered:
					t.Errorf("%s: error %v, want an unknown outcome", call, err)
				case !strings.Contains(err.Error(), ErrProxy.Error()) || !strings.Contains(err.Error(), answer.mentions):
					t.Errorf("%s: error %q does not say that a proxy answered %q", call, err, answer.mentions)
				case strings.Contains(err.Error(), "oxide-token-") || strings.Contains(err.Error(), "<"):
					t.Errorf("%s: error %q repeats the page", call, err)
				}
				for _, wrong := range []error{ErrUnauthenticated, ErrForbidden, ErrNotFound, ErrProject, ErrInternal} {
					if errors.Is(err, wrong) {
						t.Errorf("%s: error %q blames the rack: %v", call, err, wrong)
					}
				}
			}
		})
	}
}

// The first request of a process is a ping.
func TestProxyAnswersThePing(t *testing.T) {
	r := newRig(t, simrack.Options{})
	r.intercept(func(w http.ResponseWriter, _ *http.Request) bool { w.WriteHeader(http.StatusBadGateway); return true })
	_, err := r.Check(t.Context())
	if err == nil || fault.Of(err) != fault.ProxyAnswered || !strings.Contains(err.Error(), ErrProxy.Error()) ||
		!strings.Contains(err.Error(), "Bad Gateway (HTTP 502)") {
		t.Errorf("error %v does not say that a proxy answered", err)
	}
}

// Go's error for a proxy that does not connect is its status alone, such as "Bad Gateway".
func TestProxyDoesNotConnect(t *testing.T) {
	for _, status := range []int{403, 407, 502, 503, 504} {
		t.Run(strconv.Itoa(status), func(t *testing.T) {
			proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				if req.Method != http.MethodConnect {
					t.Errorf("the proxy got %s %s", req.Method, req.URL)
				}
				w.WriteHeader(status)
			}))
			t.Cleanup(proxy.Close)
			at, err := url.Parse(proxy.URL)
			must(t, err)
			at.User = url.UserPassword("user", "canary-password")
			client := NewHTTPClient(nil)
			client.Transport.(*http.Transport).Proxy = http.ProxyURL(at)
			r := newRig(t, simrack.Options{}, func(c *Config) { c.Host, c.HTTPClient = "https://rack.example", client })
			_, err = r.Check(t.Context())
			for _, want := range []string{ErrProxy.Error() + ": " + at.Host, strconv.Itoa(status), "HTTPS_PROXY"} {
				if err == nil || fault.Of(err) != fault.ProxyAnswered || !strings.Contains(err.Error(), want) {
					t.Errorf("error %v does not mention %q", err, want)
				}
			}
			if err != nil && strings.Contains(err.Error(), "canary") {
				t.Errorf("error %q has the proxy's password", err)
			}
		})
	}
}
