// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build nomad

package nomad_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/nomad/api"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// deploy is the folder of the job files.
const deploy = "../../deploy/nomad"

// nodes are the instances of the rack. Each is a client of Nomad.
var nodes = []string{"node-a", "node-b"}

// programs are built as released: the job files' memory limits are for these.
var programs simtest.Programs

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	flag.Parse()
	dir, err := os.MkdirTemp("", "nomad")
	code := 1
	if err == nil {
		programs, err = simtest.Build(dir, false)
	}
	if err == nil {
		code = m.Run()
	}
	if err := errors.Join(err, os.RemoveAll(dir)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

// cluster is a Nomad with one server, and a client in each instance of a simulated rack.
type cluster struct {
	t   *testing.T
	dir string
	// nomad, dockerd and docker are paths of programs.
	nomad, dockerd, docker string
	address                string
	// management is a token with all rights.
	management string
	admin      *api.Client
	sim        *simtest.Sim
	server     *process
	clients    map[string]*machine
	// rpc is the server's port for clients.
	rpc int
	// firstPort is the first of the ports that Nomad gives to tasks. Clusters of tests that run at once share a machine.
	firstPort int
	// grace is the grace period of a detach. Empty means that of the job files, with which each detach takes a minute.
	grace string
	// controllerCount is the number of controllers. 0 means that of the job files, which is one.
	controllerCount int
	// printed is the checked output of each allocation.
	printed map[string]string
}

// impatient has the server notice a lost client after seconds instead of half a minute, and check its claims as often
// instead of every 5 minutes.
const impatient = `
  heartbeat_grace               = "2s"
  min_heartbeat_ttl             = "2s"
  csi_volume_claim_gc_interval  = "3s"
  csi_volume_claim_gc_threshold = "3s"`

// clusters counts the clusters, for their ports.
var clusters atomic.Int32

const (
	// clientPorts is how many ports each client has for its tasks.
	clientPorts = 1000
	// clustersAtOnce is how many clusters may exist at a time. Their ports end below those that the kernel gives out.
	clustersAtOnce = 6
)

// newCluster starts all parts, and waits until the clients are ready. timings are settings of the server; "" means
// Nomad's defaults.
func newCluster(t *testing.T, timings string) *cluster { return newWiredCluster(t, timings, nil) }

// newWiredCluster is [newCluster] with clients that reach the server only by these wires, unless they are nil.
func newWiredCluster(t *testing.T, timings string, w *wires) *cluster {
	c := &cluster{
		t:         t,
		printed:   map[string]string{},
		nomad:     program(t, "nomad"),
		dockerd:   program(t, "dockerd"),
		docker:    program(t, "docker"),
		clients:   map[string]*machine{},
		firstPort: 20000 + int(clusters.Add(1)-1)%clustersAtOnce*len(nodes)*clientPorts,
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root: Nomad clients that run tasks, and guests with disks")
	}
	// Short, because paths of sockets are below this folder.
	var err error
	c.dir, err = os.MkdirTemp("", "n")
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(c.dir)) })
	c.sim, err = simtest.StartSimWith(programs.Sim, simtest.SimOptions{Args: []string{
		"--guest-root=" + filepath.Join(c.dir, "guests"), "--state=" + filepath.Join(c.dir, "rack"), "--hotplug",
		"--instances=" + strings.Join(nodes, ","),
	}})
	must(t, err)
	t.Cleanup(func() {
		must(t, c.sim.Stop()) // fails if anything is left
	})
	http, rpc, serf := freePort(t), freePort(t), freePort(t)
	c.rpc = rpc
	configs := []string{"agent", "-config=" + filepath.Join(c.dir, "server.hcl")}
	if w != nil {
		c.rpc = w.to(t, rpc)
		c.write(filepath.Join(c.dir, "wires.hcl"), fmt.Sprintf("advertise { rpc = \"127.0.0.1:%d\" }", c.rpc))
		configs = append(configs, "-config="+filepath.Join(c.dir, "wires.hcl"))
	}
	c.address = fmt.Sprintf("http://127.0.0.1:%d", http)
	c.write(filepath.Join(c.dir, "server.hcl"), `
server {
  enabled          = true
  bootstrap_expect = 1`+timings+`
}
`+c.common("server", filepath.Join(c.dir, "server"), http, rpc, serf))
	c.server = start(t, "server", []string{"PATH=" + os.Getenv("PATH")}, c.nomad, configs...)
	c.connect("")
	c.server.eventually("Nomad has a leader", func() bool {
		leader, err := c.admin.Status().Leader()
		return err == nil && leader != ""
	})
	c.server.eventually("ACLs are bootstrapped", func() bool {
		made, _, err := c.admin.ACLTokens().Bootstrap(nil)
		if err == nil {
			c.management = made.SecretID
		}
		return err == nil
	})
	c.connect(c.management)
	c.chroot()
	for _, name := range nodes {
		c.clients[name] = c.newMachine(name)
		c.clients[name].boot()
	}
	for _, name := range nodes {
		c.clients[name].ready()
	}
	return c
}

// common returns the part of the configuration that server and clients share.
func (c *cluster) common(name, data string, http, rpc, serf int) string {
	return fmt.Sprintf(`
name                        = %q
data_dir                    = %q
bind_addr                   = "127.0.0.1"
disable_update_check        = true
disable_anonymous_signature = true
leave_on_interrupt          = false

advertise {
  http = "127.0.0.1"
  rpc  = "127.0.0.1"
  serf = "127.0.0.1"
}

ports {
  http = %d
  rpc  = %d
  serf = %d
}

acl {
  enabled    = true
  policy_ttl = "50ms"
  token_ttl  = "50ms"
}
`, name, data, http, rpc, serf)
}

func (c *cluster) connect(token string) {
	var err error
	c.admin, err = api.NewClient(&api.Config{Address: c.address, SecretID: token})
	must(c.t, err)
}

// chroot creates the root folder of tasks of the exec driver. By default Nomad copies the machine's.
func (c *cluster) chroot() {
	busybox, err := exec.LookPath("busybox")
	must(c.t, err)
	bin := filepath.Join(c.dir, "chroot", "bin")
	must(c.t, os.MkdirAll(bin, 0o755))
	for _, name := range []string{"sh", "cat", "sync", "sleep"} {
		c.copy(busybox, filepath.Join(bin, name))
	}
	etc := filepath.Join(c.dir, "chroot", "etc")
	must(c.t, os.MkdirAll(etc, 0o755))
	c.copy("/etc/passwd", filepath.Join(etc, "passwd"))
	c.copy("/etc/group", filepath.Join(etc, "group"))
	c.copy(programs.Plugin, filepath.Join(bin, "oxide-csi"))
}

func (c *cluster) copy(from, to string) {
	content, err := os.ReadFile(from)
	must(c.t, err)
	info, err := os.Stat(from)
	must(c.t, err)
	must(c.t, os.WriteFile(to, content, info.Mode()))
}

func (c *cluster) write(path, text string) { must(c.t, os.WriteFile(path, []byte(text), 0o600)) }

// host is the path at which each client finds its own folder.
func (c *cluster) host() string { return filepath.Join(c.dir, "host") }

// node returns the client as the servers see it, or nil if they do not know it.
func (c *cluster) node(name string) *api.NodeListStub {
	list, _, err := c.admin.Nodes().List(nil)
	if err != nil {
		return nil
	}
	if i := slices.IndexFunc(list, func(n *api.NodeListStub) bool { return n.Name == name }); i >= 0 {
		return list[i]
	}
	return nil
}

// machine is a namespace in which a Nomad client runs.
type machine struct {
	*process
	cluster *cluster
}

// newMachine makes the folder of a client.
func (c *cluster) newMachine(name string) *machine {
	folder := filepath.Join(c.dir, name)
	for _, dir := range []string{"data", dockerFolder, filepath.Join(dockerState, "guest")} {
		must(c.t, os.MkdirAll(filepath.Join(folder, dir), 0o755))
	}
	must(c.t, os.MkdirAll(c.host(), 0o755))
	config := filepath.Join(folder, "client.hcl")
	firstPort := c.firstPort + clientPorts*slices.Index(nodes, name)
	// Only the loopback interface. The fingerprinters of clouds would query link-local addresses.
	c.write(config, fmt.Sprintf(`
client {
  enabled           = true
  servers           = ["127.0.0.1:%d"]
  network_interface = "lo"
  cgroup_parent     = %q
  gc_interval       = "10s"

  # The test reads the output of allocations that have ended, also on a machine whose disk is full.
  gc_disk_usage_threshold  = 100
  gc_inode_usage_threshold = 100

  min_dynamic_port  = %d
  max_dynamic_port  = %d

  options = {
    "fingerprint.denylist" = "env_aws,env_gce,env_azure,env_digitalocean"
  }

  chroot_env = {
    %q = "/"
  }

  meta {
    "oxide.rack" = "default"
  }
}

plugin "raw_exec" {
  config {
    enabled = true
  }
}

plugin "docker" {
  config {
    endpoint         = "unix://%s"
    allow_privileged = true

    volumes {
      enabled = true
    }

    gc {
      image = false
    }
  }
}
`, c.rpc, c.cgroup(name), firstPort, firstPort+clientPorts-1, filepath.Join(c.dir, "chroot"), filepath.Join(c.host(), dockerFolder, dockerSocket))+
		c.common(name, filepath.Join(c.host(), "data"), freePort(c.t), freePort(c.t), freePort(c.t)))
	m := &machine{process: &process{t: c.t, name: name}, cluster: c}
	c.t.Cleanup(func() {
		if c.t.Failed() {
			c.t.Logf("the calls that the plugins of %s answered:\n%s", name, strings.Join(m.answers(), ""))
		}
	})
	c.t.Cleanup(func() { c.removeCgroups(name) }) // after the namespace has ended
	return m
}

// boot starts the client in its own namespaces. When the client ends it is started again, as by systemd.
func (m *machine) boot() {
	c, folder := m.cluster, filepath.Join(m.cluster.dir, m.name)
	guest := c.sim.Instance(m.name).Guest
	script := `mount --bind "$1" "$2" && mount --bind "$5" "$2/` + dockerState + `/guest" && mount --make-rshared / || exit 1
docker=$2/` + dockerFolder + `
rm -f "$docker/pid" "$docker/` + dockerSocket + `"
mkdir -p "$docker/data" && mount -t tmpfs tmpfs "$docker/data" || exit 1
"$6" --data-root="$docker/data" --exec-root="$docker/exec" --pidfile="$docker/pid" --host="unix://$docker/` + dockerSocket + `" \
    --storage-driver=overlay2 --bridge=none --iptables=false --ip-forward=false --cgroup-parent="/$7" \
    --add-runtime="here=$8" --default-runtime=here >"$docker/log" 2>&1 &
until [ -S "$docker/` + dockerSocket + `" ]; do kill -0 $! || { cat "$docker/log"; exit 1; }; sleep 0.1; done
while :; do "$3" agent -config="$4"; done`
	// Tasks of raw_exec inherit the agent's environment.
	m.process = start(
		c.t,
		m.name,
		[]string{
			"PATH=" + os.Getenv("PATH"),
			"HOME=/root",
			"OXIDE_CSI_DEV_ROOT=" + guest + "/dev",
			"OXIDE_CSI_SYS_ROOT=" + guest + "/sys",
			"OXIDE_CSI_LOG_LEVEL=debug",
		},
		"unshare",
		"--mount",
		"--propagation=private",
		"--pid",
		"--fork",
		"--kill-child",
		"--mount-proc",
		"sh",
		"-c",
		script,
		"sh",
		folder,
		c.host(),
		c.nomad,
		filepath.Join(folder, "client.hcl"),
		guest,
		c.dockerd,
		c.cgroup(m.name),
		c.runtime(),
	)
}

// ready waits until the servers know the client.
func (m *machine) ready() {
	m.t.Helper()
	m.eventually("the client is ready", func() bool {
		node := m.cluster.node(m.name)
		return node != nil && node.Status == api.NodeStatusReady
	})
}

// losePower ends all processes of the client at once. The rack does not notice it.
func (m *machine) losePower() {
	m.t.Helper()
	agent := m.agent()
	m.kill()
	await.Within(m.t, waitLimit, "no agent runs on "+m.name, func() bool { return syscall.Kill(agent, 0) != nil })
}

// answers returns the log lines of the machine's plugins about answered calls.
func (m *machine) answers() (lines []string) {
	logs, err := filepath.Glob(
		filepath.Join(m.cluster.dir, m.name, "data", "alloc", "*", "alloc", "logs", "plugin.stderr.*"),
	)
	must(m.t, err)
	for _, log := range logs {
		text, err := os.ReadFile(log)
		must(m.t, err)
		for line := range strings.Lines(string(text)) {
			if strings.Contains(line, "msg=responded") && !strings.Contains(line, "level=DEBUG") ||
				strings.Contains(line, "method=NodeGetInfo") {
				lines = append(lines, line)
			}
		}
	}
	slices.Sort(lines) // by time
	return lines
}

// answered counts the successful calls of an RPC by the machine's plugins.
func (m *machine) answered(rpc string) (n int) {
	for _, line := range m.answers() {
		if strings.Contains(line, "msg=responded method="+rpc+" ") && strings.Contains(line, "code=OK") {
			n++
		}
	}
	return n
}

// cgroup returns the name of the client's own control group, so that leftovers can be found.
func (c *cluster) cgroup(name string) string { return filepath.Base(c.dir) + "-" + name }

// removeCgroups removes the control groups that Nomad leaves below /sys/fs/cgroup. It fails if a task still runs
// there.
func (c *cluster) removeCgroups(name string) {
	roots, err := filepath.Glob("/sys/fs/cgroup/*/" + c.cgroup(name))
	must(c.t, err)
	for _, root := range append(roots, "/sys/fs/cgroup/"+c.cgroup(name)) {
		var folders []string
		err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
			if err == nil && entry.IsDir() {
				folders = append(folders, path)
			}
			return nil // already gone
		})
		must(c.t, err)
		for _, folder := range slices.Backward(folders) {
			await.Within(c.t, waitLimit, "no process is in "+folder, func() bool {
				err := os.Remove(folder)
				return err == nil || errors.Is(err, os.ErrNotExist)
			})
		}
	}
}

// agent returns the process ID of the client's agent, or 0 while none runs.
func (m *machine) agent() int { return find(m.pid(), " agent -config=") }

// plugin returns the process ID of the plugin, or 0 if none runs.
func (m *machine) plugin(mode string) int {
	return find(m.pid(), "\x00OXIDE_CSI_MODE="+mode+"\x00")
}

// memoryLimit returns the limit of the control group of a plugin in bytes. Without a limit it is at least 2^60.
func (m *machine) memoryLimit(mode string) (bytes uint64) {
	m.t.Helper()
	groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", m.plugin(mode)))
	must(m.t, err)
	for line := range strings.Lines(string(groups)) {
		_, group, _ := strings.Cut(strings.TrimSpace(line), ":")
		controllers, path, _ := strings.Cut(group, ":")
		file := filepath.Join("/sys/fs/cgroup", path, "memory.max") // version 2
		if slices.Contains(strings.Split(controllers, ","), "memory") {
			file = filepath.Join("/sys/fs/cgroup/memory", path, "memory.limit_in_bytes")
		} else if controllers != "" {
			continue // another controller of version 1
		}
		text, err := os.ReadFile(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue // version 2 without the memory controller, which is one of version 1
		}
		must(m.t, err)
		if limit := strings.TrimSpace(string(text)); limit != "max" {
			bytes, err = strconv.ParseUint(limit, 10, 64)
			must(m.t, err)
			return bytes
		}
		return math.MaxUint64
	}
	m.t.Fatalf("the plugin is in no control group with memory: %s", groups)
	return 0
}

// signal sends a signal to a process of the machine. Process ID 0 would be the test itself.
func (m *machine) signal(pid int, signal syscall.Signal) {
	m.t.Helper()
	if pid == 0 {
		m.t.Fatalf("no such process on %s", m.name)
	}
	must(m.t, syscall.Kill(pid, signal))
}

// stagedBytes is the size of the filesystem of the volume that is staged on the machine.
func (m *machine) stagedBytes() int64 {
	m.t.Helper()
	mounts, err := os.ReadFile(fmt.Sprintf("/proc/%d/mounts", m.agent()))
	must(m.t, err)
	for line := range strings.Lines(string(mounts)) {
		if at := strings.Fields(line)[1]; strings.Contains(at, "/staging/") {
			var fs syscall.Statfs_t
			must(m.t, syscall.Statfs(fmt.Sprintf("/proc/%d/root%s", m.agent(), at), &fs))
			return int64(fs.Blocks) * fs.Bsize
		}
	}
	m.t.Fatalf("no volume is staged on %s:\n%s", m.name, mounts)
	return 0
}

// find returns a process below parent whose command line has this text. For a plugin, its environment may have the
// text instead.
func find(parent int, text string) int {
	for _, child := range children(parent) {
		line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", child)) // empty if the process has ended
		if strings.Contains(strings.ReplaceAll(string(line), "\x00", " "), text) && strings.Contains(text, "agent") {
			if path, _, _ := bytes.Cut(line, []byte{0}); filepath.Base(string(path)) == "nomad" {
				return child
			}
		}
		if path, _, _ := bytes.Cut(line, []byte{0}); filepath.Base(string(path)) == filepath.Base(programs.Plugin) {
			environ, _ := os.ReadFile(fmt.Sprintf("/proc/%d/environ", child)) // empty if the process has ended
			if strings.Contains("\x00"+string(environ), text) {
				return child
			}
		}
		if pid := find(child, text); pid != 0 {
			return pid
		}
	}
	return 0
}

func children(pid int) []int {
	var all []int
	lists, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, list := range lists {
		text, _ := os.ReadFile(list) // empty if the process has ended
		for _, field := range strings.Fields(string(text)) {
			child, err := strconv.Atoi(field)
			if err == nil {
				all = append(all, child)
			}
		}
	}
	return all
}

// cli runs the nomad command as a user would, and returns its stdout.
type cli struct {
	*cluster
	token     string
	variables []string
	stdin     string
}

// pluginNamespace is the namespace of the plugin's jobs.
const pluginNamespace = "oxide-csi"

// namespaceOf returns the namespace of a job.
func namespaceOf(job string) string {
	if strings.HasPrefix(job, "oxide-csi") {
		return pluginNamespace
	}
	return api.DefaultNamespace
}

// installer returns a user with all rights who works in the namespace of the plugin's jobs.
func (c *cluster) installer(variables ...string) cli {
	return c.as(c.management, append(variables, "NOMAD_NAMESPACE="+pluginNamespace)...)
}

// pluginAllocs returns the allocations of one of the plugin's jobs.
func (c *cluster) pluginAllocs(job string) ([]*api.AllocationListStub, error) {
	allocs, _, err := c.admin.Jobs().Allocations(job, false, &api.QueryOptions{Namespace: pluginNamespace})
	return allocs, err
}

// as returns a user who confirms any question.
func (c *cluster) as(token string, variables ...string) cli { return cli{c, token, variables, "y\n"} }

// putToken stores the rack's token where a job can read it.
func (c *cluster) putToken(t *testing.T, job, token string) {
	t.Helper()
	root := c.as(c.management)
	root.stdin = token + "\n"
	root.run(t, "var", "put", "-force", "-out=none", "-namespace="+pluginNamespace, "nomad/jobs/"+job, "token=-")
}

func (c cli) try(args ...string) (stdout, stderr string, err error) {
	return c.tryProgram(c.nomad, args...)
}

// tryProgram runs a program with the settings of the user in its environment.
func (c cli) tryProgram(program string, args ...string) (stdout, stderr string, err error) {
	ctx, cancel := context.WithTimeout(c.t.Context(), 3*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir = deploy
	cmd.Stdin = strings.NewReader(c.stdin)
	cmd.Env = append(
		[]string{
			"PATH=" + os.Getenv("PATH"),
			"HOME=" + c.dir,
			"NOMAD_ADDR=" + c.address,
			"NOMAD_TOKEN=" + c.token,
			"NOMAD_CLI_NO_COLOR=1",
		},
		c.variables...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	return out.String(), errs.String(), err
}

func (c cli) run(t *testing.T, args ...string) string {
	t.Helper()
	stdout, stderr, err := c.try(args...)
	if err != nil {
		t.Fatalf("nomad %s: %v\n%s%s", strings.Join(args, " "), err, stdout, stderr)
	}
	return stdout
}

// filled returns the path of a copy of a file of deploy/nomad with placeholders replaced.
func (c *cluster) filled(t *testing.T, file string, replace ...string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(deploy, file))
	must(t, err)
	path := filepath.Join(t.TempDir(), filepath.Base(file))
	filled := strings.NewReplacer(replace...).Replace(string(text))
	if filled == string(text) {
		t.Fatalf("%s has none of %q", file, replace)
	}
	must(t, os.WriteFile(path, []byte(filled), 0o600))
	return path
}

// process is a program that runs until the end of a test.
type process struct {
	t    *testing.T
	name string
	cmd  *exec.Cmd
	done chan struct{}
	log  string
}

// start starts a program with exactly this environment, and ends it with the test.
func start(t *testing.T, name string, environ []string, path string, args ...string) *process {
	t.Helper()
	p := &process{
		t:    t,
		name: name,
		cmd:  exec.Command(path, args...),
		done: make(chan struct{}),
		log:  filepath.Join(t.TempDir(), "log"),
	}
	log, err := os.Create(p.log)
	must(t, err)
	p.cmd.Env = environ
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	must(t, p.cmd.Start())
	go func() { _ = p.cmd.Wait(); close(p.done) }() // its log says how it ended
	t.Cleanup(func() {
		p.kill()
		must(t, log.Close())
		if keep := os.Getenv("OXIDE_CSI_KEEP_LOGS"); keep != "" {
			text, _ := os.ReadFile(p.log)
			must(t, os.WriteFile(filepath.Join(keep, p.name+".log"), text, 0o600))
		}
		if t.Failed() {
			t.Logf("the end of the log of %s:\n%s", p.name, p.tail())
		}
	})
	return p
}

func (p *process) pid() int { return p.cmd.Process.Pid }

// kill ends the program at once.
func (p *process) kill() {
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		p.t.Errorf("end %s: %v", p.name, err)
	}
	<-p.done
}

func (p *process) tail() []byte {
	text, err := os.ReadFile(p.log)
	if err != nil {
		return []byte(err.Error())
	}
	return text[max(0, len(text)-6000):]
}

// eventually polls ask until it returns true, while the program runs.
func (p *process) eventually(what string, ask func() bool) {
	p.t.Helper()
	await.Within(p.t, waitLimit, p.name+": "+what, func() bool {
		select {
		case <-p.done:
			p.t.Fatalf("%s has ended:\n%s", p.name, p.tail())
		default:
		}
		return ask()
	})
}

// waitLimit exceeds Nomad's longest wait between two attempts in these tests, which is a minute.
const waitLimit = 3 * time.Minute

// program returns the path of a program that test/programs/build.sh has built.
func program(t *testing.T, name string) string {
	t.Helper()
	dir := os.Getenv("OXIDE_CSI_PROGRAMS")
	if dir == "" {
		cache, err := os.UserCacheDir()
		must(t, err)
		dir = filepath.Join(cache, "oxide-csi-plugin", "programs")
	}
	path := filepath.Join(dir, name)
	if _, err := os.Stat(path); err != nil {
		t.Skipf("needs %s, which is not in %s; run test/programs/build.sh nomad docker versitygw", name, dir)
	}
	return path
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// freePort returns a TCP port that was free a moment ago.
func freePort(t *testing.T) int {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	must(t, listener.Close())
	return listener.Addr().(*net.TCPAddr).Port
}
