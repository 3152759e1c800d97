// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack_test

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// TestConcurrentClients lets many clients make all kinds of requests for a few disks and instances, some through the
// control endpoint. Meanwhile and afterwards it checks what must always hold: names and slots are unique, a disk is on
// one instance at most, and no limit or quota is exceeded.
func TestConcurrentClients(t *testing.T) {
	const (
		clients  = 8
		requests = 150
		quota    = 12 * gib
	)
	for _, async := range []bool{false, true} {
		t.Run(fmt.Sprintf("async=%v", async), func(t *testing.T) {
			w := newWorld(t, simrack.Options{
				Hotplug: true, HotplugAsync: async, MaxDisks: 3, QuotaBytes: quota, StateDir: t.TempDir(),
			})
			ids := []string{w.instance("i-0"), w.instance("i-1"), w.instance("i-2")}
			done := make(chan struct{})
			var watcher, workers sync.WaitGroup
			watcher.Go(func() {
				for {
					select {
					case <-done:
						return
					default:
						w.checkInvariants(quota, 3)
					}
				}
			})
			for c := range clients {
				workers.Go(func() {
					rng := rand.New(rand.NewPCG(1, uint64(c)))
					for range requests {
						w.anything(rng, ids)
					}
				})
			}
			workers.Wait()
			close(done)
			watcher.Wait()
			w.settle(ids)
			w.checkInvariants(quota, 3)
		})
	}
}

// anything makes a random request. An error answer is fine, but the rack must answer.
func (w *world) anything(rng *rand.Rand, instances []string) {
	disk, instance := fmt.Sprintf("d-%d", rng.IntN(16)), instances[rng.IntN(len(instances))]
	var r reply
	switch rng.IntN(12) {
	case 0, 1, 2:
		r = w.do("POST", "/disks?project=proj", body(disk))
	case 3:
		r = w.do("DELETE", "/disks/"+disk+"?project=proj", "")
	case 4, 5, 6:
		r = w.attach(instance, disk)
	case 7, 8:
		r = w.detach(instance, disk)
	case 9:
		r = w.do("POST", "/instances/"+instance+"/start", "")
	case 10:
		r = w.do("POST", "/instances/"+instance+"/stop", "")
	case 11:
		w.setRun(instance, []string{"stopped", "running", "failed"}[rng.IntN(3)])
		return
	}
	if r.status == 500 || r.status == 401 {
		w.t.Errorf("answered %d: %s", r.status, r.raw)
	}
}

// settle waits until all transitions have ended.
func (w *world) settle(instances []string) {
	w.waitFor("at rest", func() bool {
		for _, i := range instances {
			switch w.must("GET", "/instances/"+i, "").RunState {
			case "starting", "stopping":
				return false
			}
		}
		for _, d := range w.must("GET", "/disks?project=proj", "").Items {
			if s := d.state(); s != "attached" && s != "detached" {
				return false
			}
		}
		return true
	})
}

func (w *world) checkInvariants(quota int64, most int) {
	w.t.Helper()
	seen := map[string]bool{}
	for _, d := range w.must("GET", "/disks?project=proj&limit=10000", "").Items {
		if seen[d.Name] || seen[d.ID] {
			w.t.Errorf("two disks have the name %s", d.Name)
		}
		seen[d.Name], seen[d.ID] = true, true
	}
	if used := w.must("GET", "/utilization", "").Provisioned.Storage; used > quota || used%gib != 0 {
		w.t.Errorf("%d bytes are used of %d", used, quota)
	}
	holder := map[string]string{}
	for _, m := range w.machines() {
		slots := map[int]bool{}
		for _, d := range m.Disks {
			if holder[d.ID] != "" {
				w.t.Errorf("disk %s is on %s and %s", d.Name, holder[d.ID], m.Name)
			}
			holder[d.ID] = m.Name
			if slots[d.Slot] || d.Slot < 0 || d.Slot >= 12 {
				w.t.Errorf("slot %d of %s is given twice, or is none", d.Slot, m.Name)
			}
			slots[d.Slot] = true
		}
		if len(m.Disks) > most {
			w.t.Errorf("%s has %d disks", m.Name, len(m.Disks))
		}
	}
}

// BenchmarkDiskCreate creates disks with 100 concurrent clients on a rack with 10,000 disks.
func BenchmarkDiskCreate(b *testing.B) {
	for _, kept := range []bool{false, true} {
		b.Run(fmt.Sprintf("state=%v", kept), func(b *testing.B) {
			o := simrack.Options{}
			if kept {
				o.StateDir = b.TempDir()
			}
			w := newRawWorld(b, o)
			for n := range 10000 {
				req := mustRequest("POST", "/v1/disks?project=proj")
				req.Body = readCloser(body(fmt.Sprintf("before-%d", n)))
				req.Header.Set("Authorization", "Bearer "+mainToken)
				w.rack.API().ServeHTTP(discard{}, req)
			}
			c := w.clients(100)
			b.ReportAllocs()
			b.ResetTimer()
			var next sync.WaitGroup
			jobs := make(chan int)
			for range 100 {
				next.Go(func() {
					for n := range jobs {
						if err := c.create(fmt.Sprintf("d-%d-%d", n, b.N)); err != nil {
							b.Error(err)
						}
					}
				})
			}
			for n := range b.N {
				jobs <- n
			}
			close(jobs)
			next.Wait()
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "disks/s")
		})
	}
}

// client creates disks over persistent connections.
type client struct {
	http *http.Client
	url  string
}

func (w *world) clients(n int) client {
	return client{url: w.apiURL, http: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: n}}}
}

func (c client) create(name string) error {
	req, err := http.NewRequest("POST", c.url+"/v1/disks?project=proj", strings.NewReader(body(name)))
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+mainToken)
	res, err := c.http.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if _, err := io.Copy(io.Discard, res.Body); err != nil {
		return err
	}
	if res.StatusCode != 201 {
		return fmt.Errorf("answered %d", res.StatusCode)
	}
	return nil
}

func readCloser(s string) io.ReadCloser { return io.NopCloser(strings.NewReader(s)) }
