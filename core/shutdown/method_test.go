// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package shutdown_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/godbus/dbus/v5"

	"github.com/oxidecomputer/oxide-csi-plugin/core/shutdown"
)

// TestMain is also the plugin's process in TestSignal.
func TestMain(m *testing.M) {
	if os.Getenv("SHUTDOWN_TEST") == "" {
		os.Exit(m.Run())
	}
	method := shutdown.Signal{Signal: syscall.SIGUSR2}
	err := method.Check(context.Background())
	if err == nil {
		err = method.PowerOff(context.Background())
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

// bus is a real dbus-daemon with fakes of systemd and logind.
type bus struct {
	t      *testing.T
	socket string
	conn   *dbus.Conn
}

const busConfig = `<busconfig>
  <listen>unix:path=%s</listen>
  <auth>EXTERNAL</auth>
  <policy context="default">
    <allow send_destination="*" eavesdrop="true"/>
    <allow eavesdrop="true"/>
    <allow own="*"/>
    <allow user="*"/>
  </policy>
</busconfig>`

func newBus(t *testing.T) *bus {
	daemon, err := exec.LookPath("dbus-daemon")
	if err != nil {
		t.Skip("needs dbus-daemon, of the Debian package dbus-daemon")
	}
	dir := t.TempDir()
	b := &bus{t: t, socket: filepath.Join(dir, "bus")}
	config := filepath.Join(dir, "bus.conf")
	if err := os.WriteFile(config, fmt.Appendf(nil, busConfig, dbus.EscapeBusAddressValue(b.socket)), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(daemon, "--nofork", "--nopidfile", "--config-file="+config, "--print-address=1")
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // Wait reports the end
		_ = cmd.Wait()
	})
	if _, err := out.Read(make([]byte, 1)); err != nil { // the daemon prints its address once it listens
		t.Fatal(err)
	}
	if b.conn, err = dbus.Connect("unix:path=" + dbus.EscapeBusAddressValue(b.socket)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.conn.Close() })
	return b
}

func (b *bus) export(name string, path dbus.ObjectPath, iface string, object any) {
	if err := b.conn.Export(object, path, iface); err != nil {
		b.t.Fatal(err)
	}
	if reply, err := b.conn.RequestName(
		name,
		dbus.NameFlagDoNotQueue,
	); err != nil ||
		reply != dbus.RequestNameReplyPrimaryOwner {
		b.t.Fatal(reply, err)
	}
}

// manager is the fake systemd.
type manager struct {
	mu      sync.Mutex
	started []string
	fails   *dbus.Error
}

func (m *manager) StartUnit(unit, mode string) (dbus.ObjectPath, *dbus.Error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fails != nil {
		return "/", m.fails
	}
	m.started = append(m.started, unit+" "+mode)
	return "/org/freedesktop/systemd1/job/1", nil
}

func (m *manager) fail(err *dbus.Error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fails = err
}

func (m *manager) units() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return strings.Join(m.started, ", ")
}

type properties struct{}

func (properties) Get(_, _ string) (dbus.Variant, *dbus.Error) { return dbus.MakeVariant("252"), nil }

func (b *bus) systemd() *manager {
	m := &manager{}
	if err := b.conn.Export(properties{}, "/org/freedesktop/systemd1", "org.freedesktop.DBus.Properties"); err != nil {
		b.t.Fatal(err)
	}
	b.export("org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager", m)
	return m
}

type lock struct {
	What, Who, Why, Mode string
	UID, PID             uint32
}

// logind is the fake logind.
type logind struct {
	locks []lock
	fails *dbus.Error
}

func (l *logind) ListInhibitors() ([]lock, *dbus.Error) { return l.locks, l.fails }

func (b *bus) logind(l *logind) {
	b.export("org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager", l)
}

func TestSystemdCheck(t *testing.T) {
	kubelet := lock{"shutdown", "kubelet", "Kubelet needs time to handle node shutdown", "delay", 0, 7}
	for name, tt := range map[string]struct {
		locks    []lock
		fails    *dbus.Error
		nologind bool
		says     string // empty: the power-off is allowed
	}{
		"no logind":         {nologind: true},
		"no inhibitors":     {},
		"graceful shutdown": {locks: []lock{kubelet}, says: "the kubelet has graceful node shutdown on, which ends pods for good: remove shutdownGracePeriod"},
		"another delay":     {locks: []lock{{"shutdown:sleep", "NetworkManager", "wants to say goodbye", "delay", 0, 8}}},
		"sleep only":        {locks: []lock{{"sleep:idle", "backup", "runs", "block", 0, 9}}},
		"blocked":           {locks: []lock{{"sleep:shutdown", "dpkg", "upgrades", "block", 0, 9}}, says: `"dpkg" (process 9) inhibits a shutdown of the guest: "upgrades"; see systemd-inhibit`},
		"blocked weakly":    {locks: []lock{{"shutdown", "dpkg", "upgrades", "block-weak", 0, 9}}, says: "inhibits a shutdown"},
		"logind fails":      {fails: dbus.MakeFailedError(errors.New("out of order")), says: "list logind's inhibitors: out of order"},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBus(t)
			m := b.systemd()
			if !tt.nologind {
				b.logind(&logind{tt.locks, tt.fails})
			}
			err := shutdown.Systemd{Bus: b.socket}.Check(t.Context())
			if tt.says == "" && err != nil || tt.says != "" && (err == nil || !strings.Contains(err.Error(), tt.says)) {
				t.Errorf("error %v, want one that says %q", err, tt.says)
			}
			if units := m.units(); units != "" {
				t.Errorf("started %s", units)
			}
		})
	}
}

func TestSystemdWithoutBusOrManager(t *testing.T) {
	none := shutdown.Systemd{Bus: filepath.Join(t.TempDir(), "none")}
	for what, err := range map[string]error{"check": none.Check(t.Context()), "power off": none.PowerOff(t.Context())} {
		if err == nil || !strings.Contains(err.Error(), "connect to the system bus: ") ||
			!strings.Contains(err.Error(), "none into the plugin, or set --restart-poweroff") {
			t.Errorf("%s: %v", what, err)
		}
	}
	b := newBus(t)
	without := shutdown.Systemd{Bus: b.socket}
	if err := without.Check(
		t.Context(),
	); err == nil ||
		!strings.Contains(err.Error(), "systemd does not respond on the system bus: ") {
		t.Error(err)
	}
	if err := without.PowerOff(t.Context()); err == nil {
		t.Error("powered off")
	}
}

func TestSystemdPowerOff(t *testing.T) {
	b := newBus(t)
	m := b.systemd()
	method := shutdown.Systemd{Bus: b.socket}
	if err := method.PowerOff(t.Context()); err != nil || m.units() != "poweroff.target replace-irreversibly" {
		t.Errorf("started %q, %v", m.units(), err)
	}
	m.fail(dbus.NewError("org.freedesktop.systemd1.TransactionIsDestructive", []any{"a reboot is under way"}))
	if err := method.PowerOff(
		t.Context(),
	); err == nil ||
		!strings.Contains(err.Error(), "ask systemd for poweroff.target: a reboot is under way") {
		t.Error(err)
	}
}

// Signal signals process 1 of its PID namespace, and refuses if it is process 1 itself.
func TestSignal(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: a PID namespace")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		args []string
		code int
		says string
	}{
		"init is process 1":       {[]string{"sh", "-c", `trap "exit 42" USR2; "$0" & wait; exit 3`, self}, 42, ""},
		"the plugin is process 1": {[]string{self}, 1, "run it in the guest's (hostPID: true)"},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.Command("unshare", append([]string{"--pid", "--fork", "--kill-child"}, tt.args...)...)
			cmd.Env = append(os.Environ(), "SHUTDOWN_TEST=1")
			out, _ := cmd.CombinedOutput() // the exit code is checked below
			if code := cmd.ProcessState.ExitCode(); code != tt.code || !strings.Contains(string(out), tt.says) {
				t.Errorf("exit code %d, want %d: %s", code, tt.code, out)
			}
		})
	}
}
