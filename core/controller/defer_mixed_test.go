// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/core/controller"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
)

// A controller without a grace period publishes no volume whose disk one with a grace period is about to detach, as in
// a rolling update that sets the grace period to 0.
func TestDetachUnderWayWithoutAGracePeriod(t *testing.T) {
	inDeferring(t, func(t *testing.T, d *deferring) {
		var held atomic.Bool
		sent := make(chan struct{})
		d.stop()
		d.before = func(req *http.Request) {
			if strings.HasSuffix(req.URL.Path, "/disks/detach") && held.CompareAndSwap(false, true) {
				<-sent
			}
		}
		d.start(t)
		id := d.create(t, "v")
		coretest.Must(t, d.publish(t, id, d.nodes[0]))
		d.unpublish(t, id, d.nodes[0])
		time.Sleep(grace + time.Second)
		if !held.Load() {
			t.Fatal("the detach has not begun")
		}
		d.service = d.startController(t, controller.Options{})
		for range 3 {
			wantRejected(t, d.publish(t, id, d.nodes[0]), codes.FailedPrecondition, "is just being detached")
		}
		close(sent)
		synctest.Wait()
		coretest.Must(t, d.publish(t, id, d.nodes[0]))
		time.Sleep(time.Hour)
		d.wantHolder(t, id, d.nodes[0])
	})
}

// The record of a controller that ended during a detach holds a publish up for two minutes, also if no controller has a
// grace period any more. Then no record is left.
func TestEndedDetachWithoutAGracePeriod(t *testing.T) {
	inDeferring(t, func(t *testing.T, d *deferring) {
		id := d.create(t, "v")
		coretest.Must(t, d.publish(t, id, d.nodes[0]))
		d.unpublish(t, id, d.nodes[0])
		d.stop()
		_, err := record.Holds.Create(t.Context(), d.client,
			record.Hold{Cluster: coretest.Cluster, VolumeID: id, Holder: "ended"})
		coretest.Must(t, err)
		d.service = d.startController(t, controller.Options{})
		for began := time.Now(); time.Since(began) < 2*time.Minute; time.Sleep(10 * time.Second) {
			wantRejected(t, d.publish(t, id, d.nodes[0]), codes.FailedPrecondition, "is just being detached")
		}
		_ = d.publish(t, id, d.nodes[0]) // it may be the one that removes the record
		coretest.Must(t, d.publish(t, id, d.nodes[0]))
		d.wantHolder(t, id, d.nodes[0])
		if records, err := d.client.Records(t.Context()); err != nil || len(records) > 0 {
			t.Errorf("records %v, %v", records, err)
		}
	})
}
