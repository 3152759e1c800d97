// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package blackbox

import (
	"context"
	"crypto/rand"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/iohang"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// TestPluginIsReplacedWhileADiskHangs kills a node plugin with an unstage in flight that waits for a disk. The thread
// outlives SIGKILL, and with it the plugin's socket and HTTP address. The next plugin comes up, serves the other
// volumes, does not touch the volume of the disk that hangs, and unstages it when the disk answers.
func TestPluginIsReplacedWhileADiskHangs(t *testing.T) {
	needRoot(t)
	t.Parallel()
	dir := shortDir(t)
	sim := startSimWithGuests(t, dir, "--hotplug", "--instances=node-a")
	controller := startPlugin(t, simtest.PluginOptions{Mode: "controller", Sim: sim})
	place := filepath.Join(dir, "node")
	if err := os.Mkdir(place, 0o755); err != nil {
		t.Fatal(err)
	}
	address := freeAddress(t)
	opts := simtest.PluginOptions{
		Mode: "node", Dir: place, Sim: sim, Instance: sim.Instance("node-a"), Args: []string{"--http-endpoint=" + address},
	}
	killed, err := simtest.StartPlugin(programs.Plugin, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := killed.Kill(); err != nil {
			t.Error(err)
		}
	})
	c := newClient()
	volumes := map[string]*mounted{}
	for _, name := range []string{"hung", "other"} {
		volume := send(t, c, controller.CreateVolume, createRequest(name, mountVolume(""))).GetVolume()
		published := send(
			t,
			c,
			controller.ControllerPublishVolume,
			publishRequest(volume, sim.Instance("node-a"), mountVolume("")),
		)
		volumes[name] = stageAndPublish(
			t, c, killed, filepath.Join(dir, name), volume, mountVolume(""), published.GetPublishContext())
	}
	hung, other := volumes["hung"], volumes["other"]
	write16MiB(t, hung.target)
	disk := deviceOf(t, hung.target)
	send(
		t,
		c,
		killed.NodeUnpublishVolume,
		&csi.NodeUnpublishVolumeRequest{VolumeId: hung.volume.GetVolumeId(), TargetPath: hung.target},
	)

	release := iohang.Start(t, killed.PID(), unix.Major(disk), unix.Minor(disk))
	unstage := &csi.NodeUnstageVolumeRequest{VolumeId: hung.volume.GetVolumeId(), StagingTargetPath: hung.staging}
	ctx, giveUp := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := killed.NodeUnstageVolume(ctx, unstage)
		ended <- err
	}()
	// A thread also waits for a moment on its way there. Real time: the kernel says no more than "waits".
	await.Eventually(t, "the unstage waits for the disk", func() bool {
		for range 20 {
			if hungThreads(t, killed.PID()) == 0 {
				return false
			}
			time.Sleep(25 * time.Millisecond)
		}
		return true
	})
	if err := killed.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	giveUp() // the kernel keeps the connection open too
	if err := <-ended; err == nil {
		t.Error("the volume was unstaged although its disk hangs")
	}

	start := time.Now()
	next := startPlugin(t, opts)
	if took := time.Since(start); took > 10*time.Second {
		t.Errorf("the next plugin was ready after %s", took)
	}
	if hungThreads(t, killed.PID()) == 0 {
		t.Fatal("the killed plugin has ended, so this test shows nothing")
	}
	if log := next.Stderr().String(); !strings.Contains(log, "does not respond") {
		t.Errorf("the next plugin does not say why the socket was in use:\n%s", log)
	}
	other.plugin, hung.plugin = next, next
	other.unpublishAndUnstage(t)
	if _, err := next.NodeUnstageVolume(within(t, 2500*time.Millisecond), unstage); err == nil {
		t.Error("the volume was unstaged although its disk hangs")
	}
	release()
	send(t, c, next.NodeUnstageVolume, unstage)
	await.Eventually(t, "the HTTP address is served again", func() bool { return isLive(address) })
	for _, m := range volumes {
		id := m.volume.GetVolumeId()
		send(
			t,
			c,
			controller.ControllerUnpublishVolume,
			&csi.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: sim.Instance("node-a").ID},
		)
		send(t, c, controller.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: id})
	}
	checkLeftovers(t, sim, 0)
}

// write16MiB writes a file without fsync, so that the unmount must write it to the disk.
func write16MiB(t *testing.T, folder string) {
	t.Helper()
	data := make([]byte, 16<<20)
	if _, err := rand.Read(data); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(folder, "unsynced"), data, 0o600); err != nil {
		t.Fatal(err)
	}
}

func deviceOf(t *testing.T, path string) uint64 {
	t.Helper()
	var stat unix.Stat_t
	if err := unix.Stat(path, &stat); err != nil {
		t.Fatal(err)
	}
	return stat.Dev
}

// hungThreads counts the threads of a process in state D.
func hungThreads(t *testing.T, pid int) (count int) {
	t.Helper()
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if stat, err := os.ReadFile(file); err == nil && strings.Contains(string(stat), ") D ") {
			count++
		}
	}
	return count
}

func isLive(address string) bool {
	client := &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Get("http://" + address + "/livez")
	if err != nil {
		return false
	}
	return resp.Body.Close() == nil && resp.StatusCode == http.StatusOK
}
