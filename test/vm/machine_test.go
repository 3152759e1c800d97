// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build vm

package vm

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"
)

const (
	// bootTime is how long a guest may take to boot on a busy machine. On an idle machine it takes 4 s.
	bootTime = 90 * time.Second
	// plugTime is how long the guest may take to notice that a disk was attached or detached.
	plugTime = 60 * time.Second
)

// serverInGuest is the address in the guest of a server on the host.
const serverInGuest = "10.0.2.100:6443"

// disk is a disk of a rack.
type disk struct {
	// id is the disk's UUID on the rack. The guest sees the first 20 bytes of its name as the serial.
	id, name string
	// file holds the disk's content on the host.
	file      string
	sizeBytes int64
	// ownSubsystem makes the guest's kernel accept the disk beside another disk with the same serial. QEMU can do
	// this, a rack never does.
	ownSubsystem bool
	// stallAfter makes the disk accept no more writes after this many bytes, so that the power can be cut between two
	// writes. 0 means no limit.
	stallAfter int64
	// log is a file that records each write in order, see readLog. Empty means no log.
	log string
}

// newDisk creates a blank disk, which is deleted at the end of the test.
func newDisk(t *testing.T, name string, sizeBytes int64) *disk {
	t.Helper()
	d := &disk{id: uuid.NewString(), name: name, file: filepath.Join(t.TempDir(), "disk"), sizeBytes: sizeBytes}
	if err := errors.Join(os.WriteFile(d.file, nil, 0o600), os.Truncate(d.file, sizeBytes)); err != nil {
		t.Fatal(err)
	}
	return d
}

// serial returns the part of the name that the guest sees.
func (d *disk) serial() string { return d.name[:min(20, len(d.name))] }

// slots are a machine's disks by slot, 0 to 11 as on a rack.
type slots map[int]*disk

// address returns a slot's address on the guest's PCI bus (docs/reference/rack.md §9).
func address(slot int) string {
	if slot < 8 {
		return fmt.Sprintf("%02x", 0x10+slot)
	}
	return fmt.Sprintf("%02x", 0x1a+slot-8)
}

// IDs in QEMU of the parts of a slot.
func deviceID(slot int) string   { return fmt.Sprintf("disk%d", slot) }
func contentID(slot int) string  { return fmt.Sprintf("content%d", slot) }
func throttleID(slot int) string { return fmt.Sprintf("throttle%d", slot) }

// processors has the number of machines on each processor of the host.
var processors struct {
	sync.Mutex
	machines map[string]int
}

// onOneCPU runs all threads of a program on one processor of the host. Beside busy processors a guest's disk is then
// half as fast again.
//
// It may also prevent a fault that was seen once on two processors: commands of one disk were never taken. An unproved
// explanation: guest and disk tell each other of new commands through memory (shadow doorbells), and without memory
// barriers two processors may see these writes in another order.
//
// It takes the processor with the fewest machines. The caller calls ended when the program has ended.
func onOneCPU(t *testing.T, program string, args ...string) (cmd *exec.Cmd, ended func()) {
	t.Helper()
	var allowed unix.CPUSet
	if err := unix.SchedGetaffinity(0, &allowed); err != nil {
		t.Fatal(err)
	}
	processors.Lock()
	defer processors.Unlock()
	if processors.machines == nil {
		processors.machines = map[string]int{}
		for cpu := range 1024 {
			if allowed.IsSet(cpu) {
				processors.machines[strconv.Itoa(cpu)] = 0
			}
		}
	}
	cpu := slices.MinFunc(slices.Sorted(maps.Keys(processors.machines)), func(a, b string) int {
		return processors.machines[a] - processors.machines[b]
	})
	processors.machines[cpu]++
	ended = func() {
		processors.Lock()
		defer processors.Unlock()
		processors.machines[cpu]--
	}
	return exec.Command("taskset", append([]string{"--cpu-list", cpu, program}, args...)...), ended
}

// throttle returns a limit of one byte per second, after a burst of stallAfter bytes.
func (d *disk) throttle(slot int) map[string]any {
	limits := map[string]any{"bps-write": 1, "bps-write-max": d.stallAfter}
	return map[string]any{"qom-type": "throttle-group", "id": throttleID(slot), "limits": limits}
}

// content describes the disk's file and the layers before it to QEMU. Flushes go to the host's page cache, which
// survives the machine.
func (d *disk) content(slot int) map[string]any {
	file := func(path string) map[string]any {
		return map[string]any{"driver": "file", "filename": path, "cache": map[string]any{"no-flush": true}}
	}
	content := map[string]any{"driver": "raw", "file": file(d.file)}
	if d.log != "" {
		content = map[string]any{"driver": "blklogwrites", "file": content, "log": file(d.log)}
	}
	if d.stallAfter > 0 {
		content = map[string]any{"driver": "throttle", "throttle-group": throttleID(slot), "file": content}
	}
	content["node-name"] = contentID(slot)
	return content
}

// device describes the NVMe controller to QEMU, which pads the serial with spaces. QEMU shows 20 bytes of a longer
// serial, but puts all of it into the name of the NVMe subsystem, by which the kernel tells controllers apart.
func (d *disk) device(slot int) map[string]any {
	serial := d.serial()
	if d.ownSubsystem {
		serial += "-" + d.id
	}
	return map[string]any{
		"driver": "nvme",
		"id":     deviceID(slot),
		"serial": serial,
		"drive":  contentID(slot),
		"bus":    "pci.0",
		"addr":   "0x" + address(slot),
	}
}

// machine is a virtual machine with a running guest.
type machine struct {
	instance string
	process  *exec.Cmd
	ended    chan struct{}
	qmp      *qmp
	agent    string // address on the host
	slots    slots
	// Files with the output of the guest's kernel and of the plugin in the guest.
	console, pluginLog string
}

// boot starts a machine with disks attached, and returns when its guest answers. The machine ends with the test. If
// the test fails, the guest's output is logged.
func boot(t *testing.T, attached slots) *machine {
	t.Helper()
	return bootAs(t, uuid.NewString(), "", attached)
}

// bootAs starts the machine of an instance. If server is not empty, the guest reaches that server of the host at
// [serverInGuest].
func bootAs(t *testing.T, instance, server string, attached slots) *machine {
	t.Helper()
	return guest.boot(t, instance, server, attached)
}

func (s system) boot(t *testing.T, instance, server string, attached slots) *machine {
	t.Helper()
	dir, err := os.MkdirTemp("", "vm") // t.TempDir's path is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	m := &machine{
		instance: instance,
		slots:    slots{},
		ended:    make(chan struct{}),
		console:  filepath.Join(dir, "console"), pluginLog: filepath.Join(dir, "plugin"),
	}
	socket := filepath.Join(dir, "qmp")
	// io_timeout: the emulated controllers sometimes lose an interrupt. The kernel notices this after io_timeout, and
	// goes on. The timeout must be shorter than the deadline of a call, and longer than an I/O of an emulated disk on
	// a busy machine. no_timer_check: at boot the kernel counts the emulated timer's interrupts during a delay loop, and
	// panics if a busy machine delivers too few. qemu64 and norandmaps: a processor with few features costs less to
	// emulate, and QEMU translates a program once if it always has the same addresses. Together they save a quarter of
	// the host's time.
	args := []string{
		"-machine",
		"pc",
		"-accel",
		"tcg,thread=multi",
		"-cpu",
		"qemu64",
		"-smp",
		"1",
		"-m",
		"512",
		"-nodefaults",
		"-no-user-config",
		"-display",
		"none",
		"-no-reboot",
		"-kernel",
		s.kernel,
		"-initrd",
		s.initramfs,
		"-append",
		"console=ttyS0 net.ifnames=0 panic=-1 no_timer_check norandmaps nvme_core.io_timeout=45",
		"-smbios",
		fmt.Sprintf("type=1,manufacturer=Oxide,product=OxVM,serial=%s,uuid=%s", m.instance, m.instance),
		"-serial",
		"file:" + m.console,
		"-serial",
		"file:" + m.pluginLog,
		"-qmp",
		"unix:" + socket + ",server=on,wait=off",
	}
	for slot, d := range attached {
		if d.stallAfter > 0 {
			args = append(args, "-object", encode(t, d.throttle(slot)))
		}
		args = append(args, "-blockdev", encode(t, d.content(slot)), "-device", encode(t, d.device(slot)))
		m.slots[slot] = d
	}
	network := "user,id=net,restrict=on,ipv6=off,hostfwd=tcp:127.0.0.1:0-:9000"
	if server != "" {
		network += ",guestfwd=tcp:" + serverInGuest + "-cmd:busybox nc " + strings.Replace(server, ":", " ", 1)
	}
	args = append(args, "-netdev", network, "-device", "virtio-net-pci,netdev=net,romfile=,addr=0x8")
	var said bytes.Buffer
	process, ended := onOneCPU(t, "qemu-system-x86_64", args...)
	m.process = process
	m.process.Stdout, m.process.Stderr = &said, &said
	m.process.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	start := time.Now()
	if err := m.process.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(m.ended)
		defer ended()
		_ = process.Wait() // usually killed
	}()
	t.Cleanup(func() {
		m.cutPower(t)
		if t.Failed() {
			t.Logf(
				"QEMU said: %s\nthe guest's console:\n%s\nthe plugin's log:\n%s",
				&said,
				m.text(t, m.console),
				m.text(t, m.pluginLog),
			)
		}
	})
	m.connect(t, socket)
	t.Logf("the guest answered %s after power on", time.Since(start).Round(100*time.Millisecond))
	return m
}

// forwarded matches the line of QEMU's connection table with the agent's port on the host.
var forwarded = regexp.MustCompile(`HOST_FORWARD\]\s+\S+\s+127\.0\.0\.1\s+(\d+)`)

// connect connects to QEMU, and waits for the agent in the guest.
func (m *machine) connect(t *testing.T, socket string) {
	t.Helper()
	m.await(t, bootTime, "QEMU's control socket", func() bool {
		q, err := dialQMP(socket)
		m.qmp = q
		return err == nil
	})
	var table string
	if err := m.qmp.call("human-monitor-command", map[string]any{"command-line": "info usernet"}, &table); err != nil {
		t.Fatal(err)
	}
	port := forwarded.FindStringSubmatch(table)
	if port == nil {
		t.Fatalf("QEMU forwards no port:\n%s", table)
	}
	m.agent = "127.0.0.1:" + port[1]
	m.await(t, bootTime, "the guest", func() bool {
		// QEMU accepts connections long before the guest does. It never answers such a connection.
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := m.run(ctx, "true")
		return err == nil
	})
}

// await waits until so returns true. It fails after limit, or when the machine ends.
func (m *machine) await(t *testing.T, limit time.Duration, what string, so func() bool) {
	t.Helper()
	deadline := time.After(limit)
	for !so() {
		select {
		case <-m.ended:
			t.Fatalf("the machine ended while the test waited for %s", what)
		case <-deadline:
			t.Fatalf("waited %s for %s", limit, what)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// cutPower ends the machine at once, without notice to the guest.
func (m *machine) cutPower(t *testing.T) {
	t.Helper()
	if err := m.process.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		t.Error(err)
	}
	<-m.ended
}

// plug attaches a disk while the guest runs. The guest notices it later. The disk stays attached until it is unplugged
// or the test ends.
func (m *machine) plug(t *testing.T, slot int, d *disk) {
	t.Helper()
	if err := m.qmp.call("blockdev-add", d.content(slot), nil); err != nil {
		t.Fatal(err)
	}
	if err := m.qmp.call("device_add", d.device(slot), nil); err != nil {
		t.Fatal(err)
	}
	m.slots[slot] = d
	t.Cleanup(func() {
		if m.slots[slot] == d {
			m.unplug(t, slot)
		}
	})
}

// unplug detaches the disk in a slot, and returns when the guest's kernel has released it.
func (m *machine) unplug(t *testing.T, slot int) {
	t.Helper()
	if err := m.qmp.call("device_del", map[string]any{"id": deviceID(slot)}, nil); err != nil {
		t.Fatal(err)
	}
	if err := m.qmp.waitDeleted(deviceID(slot), plugTime); err != nil {
		t.Fatal(err)
	}
	if err := m.qmp.call("blockdev-del", map[string]any{"node-name": contentID(slot)}, nil); err != nil {
		t.Fatal(err)
	}
	delete(m.slots, slot)
}

// slotOf returns the slot of an attached disk.
func (m *machine) slotOf(d *disk) int {
	for slot, attached := range m.slots {
		if attached == d {
			return slot
		}
	}
	return -1
}

// result is the result of a script in the guest, see the agent.
type result struct {
	Code           int
	Stdout, Stderr string
}

// run runs a script in the guest. The error means that the script could not be started.
func (m *machine) run(ctx context.Context, script string) (result, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+m.agent+"/exec", strings.NewReader(script))
	if err != nil {
		return result{}, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return result{}, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, err := io.ReadAll(resp.Body)
		return result{}, errors.Join(fmt.Errorf("the guest's agent: %s: %s", resp.Status, text), err)
	}
	var r result
	err = json.NewDecoder(resp.Body).Decode(&r)
	return r, err
}

// sh runs a script in the guest and returns its output. The script must succeed.
func (m *machine) sh(t *testing.T, format string, args ...any) string {
	t.Helper()
	script := fmt.Sprintf(format, args...)
	r, err := m.run(within(t, time.Minute), script)
	if err != nil {
		t.Fatalf("%s: %v", script, err)
	}
	if r.Code != 0 {
		t.Fatalf("%s: exit code %d: %s%s", script, r.Code, r.Stdout, r.Stderr)
	}
	return r.Stdout
}

// dial connects to a unix socket in the guest.
func (m *machine) dial(ctx context.Context, socket string) (net.Conn, error) {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", m.agent)
	if err != nil {
		return nil, err
	}
	reader := bufio.NewReader(conn)
	_, err = fmt.Fprintf(conn, "CONNECT %s HTTP/1.1\r\nHost: guest\r\n\r\n", socket)
	if err == nil {
		err = connected(reader)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("connect to %s in the guest: %w", socket, err), conn.Close())
	}
	return tunnel{conn, reader}, nil
}

func connected(reader *bufio.Reader) error {
	resp, err := http.ReadResponse(reader, &http.Request{Method: http.MethodConnect})
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	return nil
}

// tunnel is a connection whose first bytes may have been read together with the answer to CONNECT.
type tunnel struct {
	net.Conn
	reader *bufio.Reader
}

func (c tunnel) Read(p []byte) (int, error) { return c.reader.Read(p) }

// text returns the content of a file that QEMU writes.
func (m *machine) text(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Error(err)
	}
	return strings.ReplaceAll(string(text), "\r\n", "\n")
}

// within returns a context that ends after limit.
func within(t *testing.T, limit time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	return ctx
}

func encode(t *testing.T, value any) string {
	t.Helper()
	text, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
