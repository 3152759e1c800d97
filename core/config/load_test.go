// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package config

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"log/slog"
	"math/big"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/knadh/koanf/v2"
	"github.com/spf13/pflag"
)

const (
	instanceA = "6f3a1c9e-2b7d-4e58-9a41-0d5c8e7f1a23"
	token     = "oxide-token-canary"
)

// load calls Load with a command line, an environment and the text of a file.
func load(t *testing.T, args, environ []string, yaml string) (Config, []string, error) {
	t.Helper()
	fs := pflag.NewFlagSet("oxide-csi", pflag.ContinueOnError)
	fs.Bool("version", false, "a flag of cmd's own")
	Flags(fs)
	if yaml != "" {
		args = append([]string{"--config=" + write(t, yaml)}, args...)
	}
	if err := fs.Parse(args); err != nil {
		t.Fatalf("parse %q: %v", args, err)
	}
	return Load(fs, environ)
}

// write makes a file in a new folder. The file's name is short, so that errors stay short.
func write(t *testing.T, text string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

// testCA makes a CA's certificate, and returns it in DER and in PEM.
func testCA(t *testing.T) (der, text []byte) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), IsCA: true}
	if der, err = x509.CreateCertificate(rand.Reader, template, template, key.Public(), key); err != nil {
		t.Fatal(err)
	}
	return der, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// complete are arguments of a valid configuration.
var complete = []string{
	"--endpoint=unix:///csi/csi.sock", "--mode=all", "--oxide-host=rack.example.com", "--oxide-project=demo",
	"--cluster-id=c1", "--instance-id=" + instanceA,
}

var tokenEnv = []string{"OXIDE_TOKEN=" + token}

// without returns the arguments without those of one flag.
func without(args []string, flag string) []string {
	var rest []string
	for _, arg := range args {
		if !strings.HasPrefix(arg, "--"+flag+"=") {
			rest = append(rest, arg)
		}
	}
	return rest
}

// An ID of a project is used as the rack's API names it. A name stays as it is.
func TestProjectNotations(t *testing.T) {
	const id = "6f1d1e6e-0000-4000-8000-000000000001"
	for given, want := range map[string]string{
		"demo":                             "demo",
		id:                                 id,
		strings.ToUpper(id):                id,
		"{" + id + "}":                     id,
		strings.ReplaceAll(id, "-", ""):    id,
		"deadbeefdeadbeefdeadbeefdeadbeef": "deadbeefdeadbeefdeadbeefdeadbeef",
	} {
		got, _, err := load(t, append(without(complete, "oxide-project"), "--oxide-project="+given), tokenEnv, "")
		if err != nil || got.OxideProject != want {
			t.Errorf("%q is project %q: %v", given, got.OxideProject, err)
		}
	}
}

func TestDefaults(t *testing.T) {
	got, warnings, err := load(t, complete, tokenEnv, "")
	if err != nil || len(warnings) > 0 {
		t.Fatal(warnings, err)
	}
	want := Config{
		Endpoint:           "/csi/csi.sock",
		Mode:               ModeAll,
		OxideHost:          "https://rack.example.com",
		OxideProject:       "demo",
		OxideToken:         NewToken(token),
		ClusterID:          "c1",
		Rack:               "default",
		AttachMode:         "hot",
		RestartPoweroff:    "systemd",
		RestartShutdown:    "guest",
		RestartWindow:      10 * time.Second,
		RestartMaxDown:     1,
		RestartCoolDown:    5 * time.Minute,
		RestartHaltTimeout: 2 * time.Minute,
		MaxDisks:           8,
		Metadata:           "auto",
		InstanceID:         instanceA,
		StateDir:           "/var/lib/oxide-csi",
		LUKSMemory:         64 << 20,
		BlankScanLimit:     32 << 30,
		DeviceTimeout:      time.Minute,
		LogFormat:          "text",
		DevRoot:            "/dev",
		SysRoot:            "/sys",
		BootIDFile:         "/proc/sys/kernel/random/boot_id",
		RackLabel:          "oxide.computer/rack",
		KubernetesPort:     "443",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	racks := []Rack{{Name: "default", Host: "https://rack.example.com", Project: "demo", Token: NewToken(token)}}
	if diff := cmp.Diff(racks, got.RackList()); diff != "" {
		t.Errorf("RackList: -want +got:\n%s", diff)
	}
}

// samples returns a text for every setting, and the value that Load makes of the text. The value differs from the
// default where the setting allows another one.
func samples(t *testing.T) map[string]struct {
	text string
	want any
} {
	tokenFile := write(t, token+"\n")
	_, certificate := testCA(t)
	caFile := write(t, string(certificate))
	return map[string]struct {
		text string
		want any
	}{
		"endpoint":               {"unix://run/x.sock", "/run/x.sock"},
		"mode":                   {"controller", ModeController},
		"config":                 {write(t, "maxDisks: 12\n"), nil},
		"oxideHost":              {"http://127.0.0.1:12220/", "http://127.0.0.1:12220"},
		"oxideProject":           {"p2", "p2"},
		"oxideTokenFile":         {tokenFile, tokenFile},
		"oxideCAFile":            {caFile, caFile},
		"oxideToken":             {"oxide-token-other", NewToken("oxide-token-other")},
		"clusterID":              {"0123", "0123"}, // YAML would read a number
		"rack":                   {"east", "east"},
		"attachMode":             {"hot", "hot"},
		"restartShutdown":        {"drain", "drain"},
		"restartWindow":          {"20s", 20 * time.Second},
		"restartMaxDown":         {"3", 3},
		"restartCoolDown":        {"1m", time.Minute},
		"restartHaltTimeout":     {"3m", 3 * time.Minute},
		"restartWait":            {"4m", 4 * time.Minute},
		"restartHours":           {"Sat,Sun 01:00-05:00", "Sat,Sun 01:00-05:00"},
		"restartPoweroff":        {"signal:SIGUSR2", "signal:SIGUSR2"},
		"maxDisks":               {"12", 12},
		"metadata":               {"static", "static"},
		"instanceID":             {"{B81D0F42-77C3-4C0A-8E6F-93A5D2B4C716}", "b81d0f42-77c3-4c0a-8e6f-93a5d2b4c716"},
		"metadataFile":           {"/run/id.env", "/run/id.env"},
		"nodeName":               {"worker-3", "worker-3"},
		"reserveDisks":           {"2", 2},
		"kubeconfig":             {"/etc/kubernetes/kubelet.conf", "/etc/kubernetes/kubelet.conf"},
		"rackLabel":              {"topology.kubernetes.io/zone", "topology.kubernetes.io/zone"},
		"kubernetesHost":         {"10.96.0.1", "10.96.0.1"},
		"kubernetesPort":         {"6443", "6443"},
		"nomadAddress":           {"https://127.0.0.1:4646", "https://127.0.0.1:4646"},
		"nomadSocket":            {"unix:///secrets/api.sock", "unix:///secrets/api.sock"},
		"nomadToken":             {"a-token", NewToken("a-token")},
		"nomadTokenFile":         {"/secrets/nomad_token", "/secrets/nomad_token"},
		"nomadCACert":            {"/etc/nomad.d/ca.pem", "/etc/nomad.d/ca.pem"},
		"nomadClientCert":        {"/etc/nomad.d/cli.pem", "/etc/nomad.d/cli.pem"},
		"nomadClientKey":         {"/etc/nomad.d/cli-key.pem", "/etc/nomad.d/cli-key.pem"},
		"nomadTLSServerName":     {"client.global.nomad", "client.global.nomad"},
		"nomadAllocation":        {"5d1f", "5d1f"},
		"kubeletRegistrationDir": {"/registration", "/registration"},
		"startupTaint":           {"example.com/agent-not-ready", "example.com/agent-not-ready"},
		"httpEndpoint":           {":9808", ":9808"},
		"pprof":                  {"true", true},
		"stateDir":               {"/state", "/state"},
		"luksMemory":             {"128MiB", Size(128 << 20)},
		"blankScanLimit":         {"512MiB", Size(512 << 20)},
		"deviceTimeout":          {"1m30s", 90 * time.Second},
		"detachGrace":            {"60s", time.Minute},
		"logLevel":               {"debug", slog.LevelDebug},
		"logFormat":              {"json", "json"},
		"devRoot":                {"/host/dev", "/host/dev"},
		"sysRoot":                {"/host/sys", "/host/sys"},
		"bootIDFile":             {"/guest/boot_id", "/guest/boot_id"},
	}
}

func TestEverySettingFromEverySource(t *testing.T) {
	samples := samples(t)
	for _, s := range settings() {
		sample, ok := samples[s.key]
		if s.key == "racks" {
			continue // TestRacks has this setting
		}
		if !ok {
			t.Errorf("no sample for %s: add one above", s.key)
			continue
		}
		check := func(source string, args, environ []string, yaml string) {
			t.Run(s.key+" from "+source, func(t *testing.T) {
				base := without(complete, s.flag)
				switch s.key { // settings that need another setting
				case "pprof":
					base = append(base, "--http-endpoint=:9808")
				case "startupTaint":
					base = append(base, "--node-name=worker-3")
				}
				got, _, err := load(t, append(base, args...), append(tokenEnv, environ...), yaml)
				if err != nil {
					t.Fatal(err)
				}
				if s.key == "config" {
					if got.ConfigFile != sample.text || got.MaxDisks != 12 {
						t.Errorf("file %q, MaxDisks %d", got.ConfigFile, got.MaxDisks)
					}
					return
				}
				if diff := cmp.Diff(sample.want, reflect.ValueOf(got).Field(s.field).Interface()); diff != "" {
					t.Errorf("-want +got:\n%s", diff)
				}
			})
		}
		if s.flag != "" {
			check("flag", []string{"--" + s.flag + "=" + sample.text}, nil, "")
		}
		if s.env != "" {
			check("environment", nil, []string{s.env + "=" + sample.text}, "")
		}
		if s.inFile {
			check("file", nil, nil, s.key+": "+quoteYAML(sample.text)+"\n")
		}
	}
}

// quoteYAML quotes a text only if YAML would read it as a mapping.
func quoteYAML(text string) string {
	if strings.HasPrefix(text, "{") {
		return "'" + text + "'"
	}
	return text
}

// TestPrecedence tries every combination of sources for every setting.
func TestPrecedence(t *testing.T) {
	for _, s := range settings() {
		if s.key == "racks" || s.key == "config" {
			continue // racks can be only in the file, and config names the file
		}
		for set := range 1 << 3 {
			var args, environ []string
			var yaml string
			want, from := s.def, ""
			if set&1 != 0 && s.inFile {
				yaml, want, from = s.key+": file\n", "file", "file"
			}
			if set&2 != 0 && s.env != "" {
				environ, want, from = []string{s.env + "=environment"}, "environment", s.env
			}
			if set&4 != 0 && s.flag != "" {
				args, want, from = []string{"--" + s.flag + "=flag"}, "flag", "--"+s.flag
			}
			t.Run(fmt.Sprintf("%s/%03b", s.key, set), func(t *testing.T) {
				fs := pflag.NewFlagSet("oxide-csi", pflag.ContinueOnError)
				Flags(fs)
				if yaml != "" {
					file := write(t, yaml)
					args = append(args, "--config="+file)
					if from == "file" {
						from = file + " line 1"
					}
				}
				if err := fs.Parse(args); err != nil {
					t.Fatal(err)
				}
				l := loader{merged: koanf.New(delim), from: map[string]string{}}
				l.merge(fs, environ)
				if got := l.merged.String(s.key); got != want || l.from[s.key] != from || len(l.problems) > 0 {
					t.Errorf("got %q from %q (%v), want %q from %q", got, l.from[s.key], l.problems, want, from)
				}
			})
		}
	}
}

func TestConfigFileName(t *testing.T) {
	one, two := write(t, "maxDisks: 10\n"), write(t, "maxDisks: 12\n")
	for name, tt := range map[string]struct {
		args, environ []string
		want          int
	}{
		"environment":           {nil, []string{"OXIDE_CSI_CONFIG=" + one}, 10},
		"flag over environment": {[]string{"--config=" + two}, []string{"OXIDE_CSI_CONFIG=" + one}, 12},
		"empty flag":            {[]string{"--config="}, []string{"OXIDE_CSI_CONFIG=" + one}, 8},
	} {
		t.Run(name, func(t *testing.T) {
			got, _, err := load(t, append(tt.args, complete...), append(tt.environ, tokenEnv...), "")
			if err != nil || got.MaxDisks != tt.want {
				t.Errorf("got %d, %v; want %d", got.MaxDisks, err, tt.want)
			}
		})
	}
}

// An empty variable or key of the file does not set a value, because templates leave such behind. An empty flag does.
func TestEmptyVariablesAndKeysAreIgnored(t *testing.T) {
	environ := append([]string{"OXIDE_CSI_MAX_DISKS=", "OXIDE_RACK= ", "OXIDE_CSI_UNKNOWN"}, tokenEnv...)
	got, warnings, err := load(t, complete, environ, "nodeName:\nlogFormat: ''\nlogLevel: ~\nracks:\n")
	if err != nil || got.MaxDisks != 8 || got.Rack != "default" || got.RackGiven || got.NodeName != "" ||
		got.LogFormat != "text" {
		t.Errorf("got %+v, %v", got, err)
	}
	if len(warnings) > 0 {
		t.Errorf("warnings: %v", warnings)
	}
	got, _, err = load(t, append(complete, "--node-name="), append([]string{"OXIDE_CSI_NODE_NAME=n"}, tokenEnv...), "")
	if err != nil || got.NodeName != "" {
		t.Errorf("an empty flag: node name %q, %v; want an empty one", got.NodeName, err)
	}
}

func TestOnlyTheGivenEnvironmentIsRead(t *testing.T) {
	want, _, err := load(t, complete, tokenEnv, "")
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range settings() {
		if s.env != "" {
			t.Setenv(s.env, "from-the-process")
		}
	}
	got, warnings, err := load(t, complete, tokenEnv, "")
	if err != nil || len(warnings) > 0 || !cmp.Equal(want, got) {
		t.Errorf("got %+v, %v, %v", got, warnings, err)
	}
}

func TestNodeHasNoRackAccess(t *testing.T) {
	args := []string{"--endpoint=/csi/csi.sock", "--mode=node", "--instance-id=" + instanceA}
	for name, tt := range map[string]struct {
		args, environ []string
		yaml, rack    string
	}{
		"environment": {nil, []string{"OXIDE_HOST=https://user:pw@x/y", "OXIDE_TOKEN=junk", "OXIDE_TOKEN_FILE=/none", "OXIDE_PROJECT=/", "OXIDE_CSI_CA_FILE=/none"}, "", "default"},
		"flags":       {[]string{"--oxide-host=:", "--oxide-token-file=/none", "--oxide-project=/"}, nil, "", "default"},
		"file":        {nil, nil, "oxideHost: ':'\noxideTokenFile: /none\n", "default"},
		"racks":       {nil, tokenEnv, "racks: [{name: east, host: ':', tokenFile: /none, caFile: /none}]\n", "east"},
		"several":     {nil, tokenEnv, "racks: [{name: east}, {name: west, host: ':'}]\n", "default"},
		"one of them": {[]string{"--rack=west"}, tokenEnv, "racks: [{name: east}, {name: west, host: ':'}]\n", "west"},
	} {
		t.Run(name, func(t *testing.T) {
			got, warnings, err := load(t, append(tt.args, args...), tt.environ, tt.yaml)
			if err != nil || len(warnings) > 0 {
				t.Fatal(warnings, err)
			}
			if got.OxideHost+got.OxideProject+got.OxideTokenFile+got.OxideCAFile+got.OxideToken.Reveal() != "" ||
				got.RackList() != nil ||
				got.Rack != tt.rack {
				t.Errorf("a node got %+v", got)
			}
			for _, rack := range got.Racks {
				if rack.Host+rack.TokenFile+rack.CAFile != "" {
					t.Errorf("a node got %+v", rack)
				}
			}
		})
	}
}

func TestRacks(t *testing.T) {
	tokenFile := write(t, token)
	yaml := "racks:\n- name: east\n  host: east.example.com\n  tokenFile: " + tokenFile + "\n  project: demo\n"
	args := []string{"--endpoint=/csi/csi.sock", "--cluster-id=c1", "--instance-id=" + instanceA}
	environ := []string{"OXIDE_CSI_MODE=all"}
	for name, tt := range map[string]struct {
		args, environ []string
		warns         int
	}{
		"only racks":                 {},
		"with --rack":                {args: []string{"--rack=east"}},
		"with OXIDE_TOKEN":           {environ: tokenEnv, warns: 1},
		"in mode controller":         {args: []string{"--mode=controller"}},
		"CSI_ variables are ignored": {environ: []string{"CSI_OXIDE_HOST=x", "CSI_MODE=x"}},
	} {
		t.Run(name, func(t *testing.T) {
			got, warnings, err := load(t, append(tt.args, args...), append(tt.environ, environ...), yaml)
			if err != nil || len(warnings) != tt.warns {
				t.Fatal(warnings, err)
			}
			want := []Rack{{Name: "east", Host: "https://east.example.com", TokenFile: tokenFile, Project: "demo"}}
			if diff := cmp.Diff(want, got.RackList()); diff != "" || got.Rack != "east" {
				t.Errorf("rack %q, -want +got:\n%s", got.Rack, diff)
			}
		})
	}
}

// Several racks keep their order in the file, and each has its own host, token, project and CA.
func TestSeveralRacks(t *testing.T) {
	east, west := write(t, token), write(t, "oxide-token-west")
	_, certificate := testCA(t)
	ca := write(t, string(certificate))
	yaml := "racks:\n- name: west\n  host: west.example.com:8443\n  tokenFile: " + west + "\n  project: demo\n  caFile: " + ca + "\n" +
		"- {name: east, host: 'https://east.example.com/', tokenFile: " + east + ", project: demo}\n" +
		"- {name: east-2, host: east.example.com, tokenFile: " + east + ", project: other}\n"
	want := []Rack{
		{Name: "west", Host: "https://west.example.com:8443", TokenFile: west, Project: "demo", CAFile: ca},
		{Name: "east", Host: "https://east.example.com", TokenFile: east, Project: "demo"},
		{Name: "east-2", Host: "https://east.example.com", TokenFile: east, Project: "other"},
	}
	for name, tt := range map[string]struct {
		args []string
		rack string
	}{
		"all":                    {[]string{"--mode=all", "--instance-id=" + instanceA, "--rack=east"}, "east"},
		"controller":             {[]string{"--mode=controller"}, "default"},
		"rack found by metadata": {[]string{"--mode=all", "--metadata-file=/run/id.env"}, "default"},
	} {
		t.Run(name, func(t *testing.T) {
			got, warnings, err := load(t, append([]string{"--endpoint=/csi/csi.sock", "--cluster-id=c1"}, tt.args...), nil, yaml)
			if err != nil || len(warnings) > 0 {
				t.Fatal(warnings, err)
			}
			if diff := cmp.Diff(want, got.RackList()); diff != "" || got.Rack != tt.rack {
				t.Errorf("rack %q, -want +got:\n%s", got.Rack, diff)
			}
		})
	}
}

func TestRackGiven(t *testing.T) {
	for _, tt := range []struct {
		args, environ []string
		yaml          string
		want          bool
	}{
		{}, {args: []string{"--rack=default"}, want: true}, {environ: []string{"OXIDE_RACK=default"}, want: true}, {yaml: "rack: default\n", want: true},
	} {
		got, _, err := load(t, append(tt.args, complete...), append(tt.environ, tokenEnv...), tt.yaml)
		if err != nil || got.RackGiven != tt.want {
			t.Errorf("%+v: %v, %v", tt, got.RackGiven, err)
		}
	}
}

func TestWarnings(t *testing.T) {
	open := write(t, token)
	if err := os.Chmod(open, 0o644); err != nil {
		t.Fatal(err)
	}
	tokenFile := write(t, token)
	for name, tt := range map[string]struct {
		args, environ []string
		want          []string
	}{
		"none":        {complete, append([]string{"PATH=/bin", "OXIDE_PROFILE=x", "KUBERNETES_SERVICE_HOST=10.0.0.1", "CSI_NODE_ID=x"}, tokenEnv...), nil},
		"of commands": {complete, append([]string{"OXIDE_CSI_CONTROLLER_ENDPOINT=/c", "OXIDE_CSI_NODE_ENDPOINT=/n", "OXIDE_CSI_STAGING_DIR=/s"}, tokenEnv...), nil},
		"unknown variables": {
			complete,
			append([]string{"OXIDE_CSI_SERVICE_HOST=10.0.0.1", "OXIDE_CSI_MODES=oxide-token-x", "OXIDE_CSI_PORT=1"}, tokenEnv...),
			[]string{`config: unknown environment variables are ignored: "OXIDE_CSI_MODES", "OXIDE_CSI_PORT", "OXIDE_CSI_SERVICE_HOST"`},
		},
		"token not used":  {append(complete, "--oxide-token-file="+tokenFile), tokenEnv, []string{"config: OXIDE_TOKEN is not used, because a token file is named"}},
		"open token file": {append(complete, "--oxide-token-file="+open), nil, []string{"config: every user can read the token file " + open + ": set its mode to 0600 or 0440"}},
		"plain http":      {append(complete, "--oxide-host=http://rack.example.com"), tokenEnv, []string{"config: http://rack.example.com is not https: the token crosses the network in plaintext"}},
		"plain http on loopback": {
			append(complete, "--oxide-host=http://[::1]:12220"), tokenEnv, nil,
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, got, err := load(t, tt.args, tt.environ, "")
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func BenchmarkLoad(b *testing.B) {
	for b.Loop() {
		fs := pflag.NewFlagSet("oxide-csi", pflag.ContinueOnError)
		Flags(fs)
		if err := fs.Parse(complete); err != nil {
			b.Fatal(err)
		}
		if _, _, err := Load(fs, tokenEnv); err != nil {
			b.Fatal(err)
		}
	}
}

// LoadIdentity, for a process that only finds its instance's identity, needs no rack's settings and loads no rack's
// token.
func TestLoadIdentity(t *testing.T) {
	file := write(t, "racks: [{name: east, host: h, tokenFile: /none, project: p}]\nmaxDisks: 12\n")
	fs := pflag.NewFlagSet("metadata", pflag.ContinueOnError)
	IdentityFlags(fs)
	if err := fs.Parse([]string{"--config=" + file, "--metadata=guest", "--sys-root=/host/sys"}); err != nil {
		t.Fatal(err)
	}
	environ := []string{
		"OXIDE_TOKEN=" + token,
		"OXIDE_HOST=not a host",
		"OXIDE_CSI_MODE=controller",
		"OXIDE_CSI_NODE_NAME=worker-3",
		"NOMAD_TOKEN=t",
	}
	got, warnings, err := LoadIdentity(fs, environ)
	if err != nil || len(warnings) > 0 {
		t.Fatal(warnings, err)
	}
	if got.Metadata != "guest" || got.SysRoot != "/host/sys" || got.NodeName != "worker-3" || got.Rack != "east" ||
		got.NomadToken.Reveal() != "t" {
		t.Errorf("%+v", got)
	}
	if !got.OxideToken.Empty() || got.OxideHost != "" || got.Racks[0].TokenFile != "" {
		t.Errorf("the configuration holds settings of a rack: %+v", got)
	}
	if fs.Lookup("endpoint") != nil || fs.Lookup("oxide-token-file") != nil {
		t.Error("there are flags for settings that LoadIdentity does not use")
	}

	environ = []string{
		"OXIDE_CSI_METADATA=aws",
		"OXIDE_RACK=-",
		"OXIDE_CSI_LOG_FORMAT=xml",
		"OXIDE_INSTANCE_ID=${x}",
		"CSI_ENDPOINT=tcp://x",
	}
	_, _, err = LoadIdentity(nil, environ)
	if got := problemsOf(t, err); len(got) != 4 {
		t.Errorf("%d problems, want one for each invalid setting of the identity: %s", len(got), got)
	}
}

// The defaults of --restart-wait and --detach-grace depend on the orchestrator.
func TestDerivedDefaults(t *testing.T) {
	kubernetes, nomad := "KUBERNETES_SERVICE_HOST=10.96.0.1", "NOMAD_UNIX_ADDR=unix:///secrets/api.sock"
	for name, tt := range map[string]struct {
		args, environ []string
		wait, grace   time.Duration
	}{
		"a bare host":           {},
		"Kubernetes":            {environ: []string{kubernetes}, wait: 100 * time.Second},
		"a kubeconfig":          {environ: []string{"OXIDE_CSI_KUBECONFIG=/etc/k"}, wait: 100 * time.Second},
		"Nomad":                 {environ: []string{nomad}, grace: time.Minute},
		"Nomad by its metadata": {args: []string{"--metadata=nomad"}, grace: time.Minute},
		"Nomad without an API":  {environ: []string{"NOMAD_ALLOC_ID=5d1f"}, grace: time.Minute},
		"Nomad, set to nothing": {environ: []string{nomad, "OXIDE_CSI_DETACH_GRACE="}, grace: time.Minute},
		"Kubernetes, set":       {args: []string{"--restart-wait=0s", "--detach-grace=5s"}, environ: []string{kubernetes}, grace: 5 * time.Second},
		"Nomad, set":            {environ: []string{nomad, "OXIDE_CSI_DETACH_GRACE=0s", "OXIDE_CSI_RESTART_WAIT=1s"}, wait: time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			got, _, err := load(t, append(tt.args, complete...), append(tt.environ, tokenEnv...), "")
			if err != nil || got.RestartWait != tt.wait || got.DetachGrace != tt.grace {
				t.Errorf(
					"restart wait %s, want %s; detach grace %s, want %s; %v",
					got.RestartWait,
					tt.wait,
					got.DetachGrace,
					tt.grace,
					err,
				)
			}
		})
	}
}
