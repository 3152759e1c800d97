// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpcmetadata "google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/core/metrics"
	"github.com/oxidecomputer/oxide-csi-plugin/core/metrics/metricstest"
	"github.com/oxidecomputer/oxide-csi-plugin/core/restart"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// reported returns the restarts that a controller reports on request, for one volume or for all. It is nil without a
// report.
func (r *rig) reported(t *testing.T, volumeID string) []rpc.Restart {
	t.Helper()
	ctx := grpcmetadata.AppendToOutgoingContext(t.Context(), rpc.MetadataAskRestarts, "yes")
	var header grpcmetadata.MD
	var err error
	if volumeID == "" {
		_, err = r.ListVolumes(ctx, &csi.ListVolumesRequest{}, grpc.Header(&header))
	} else {
		_, err = r.ControllerGetVolume(ctx, &csi.ControllerGetVolumeRequest{VolumeId: volumeID}, grpc.Header(&header))
	}
	r.Must(t, err)
	var restarts []rpc.Restart
	for _, text := range header.Get(rpc.MetadataRestarts) {
		r.Must(t, json.Unmarshal([]byte(text), &restarts))
	}
	return restarts
}

// waitForReport waits until the restart of a node for a volume is reported with this reason, and returns it.
func (r *rig) waitForReport(t *testing.T, volumeID, node string, reason rpc.RestartReason) rpc.Restart {
	t.Helper()
	var found rpc.Restart
	await.Eventually(t, "the restart is reported as "+string(reason), func() bool {
		for _, one := range r.reported(t, volumeID) {
			if one.InstanceID == node && one.Reason == reason {
				found = one
				return true
			}
		}
		return false
	})
	return found
}

func disksOf(pending []rpc.PendingAttach) (ids []string) {
	for _, one := range pending {
		ids = append(ids, one.VolumeID)
	}
	return ids
}

// inAnHour is the next start while restarts must not start.
func inAnHour(now time.Time) time.Time { return now.Add(time.Hour) }

// claims receives the reports about claims.
type claims struct {
	*guests
	reports chan string
}

func (c claims) ReportClaim(_ context.Context, volume, claim string, report orchestrator.Report) error {
	c.reports <- fmt.Sprint(volume, " of ", claim, ": ", report.Event.Reason, ": ", report.Message)
	return nil
}

// While an RPC waits for a restart, the claim of its volume says what it waits for.
func TestPlannedWaitIsReportedToTheClaim(t *testing.T) {
	t.Parallel()
	reported := claims{newGuests(), make(chan string, 10)}
	r := newRestartRig(t, func(o *coretest.Options) {
		o.Restarts.Requester, o.Restarts.Claims = reported, reported
		o.Restarts.NextStart, o.Restarts.Wait = inAnHour, 10*time.Second
	})
	req := coretest.CreateRequest("pvc-1")
	req.Parameters = map[string]string{"csi.storage.k8s.io/pvc/namespace": "shop", "csi.storage.k8s.io/pvc/name": "data"}
	created, err := r.CreateVolume(t.Context(), req)
	r.Must(t, err)
	ctx, stop := context.WithCancel(t.Context())
	answered := make(chan error, 1)
	node := r.Node(t, "node-a")
	go func() {
		_, err := r.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{
			VolumeId: created.GetVolume().GetVolumeId(), NodeId: node, VolumeCapability: coretest.MountWriter(),
		})
		answered <- err
	}()
	select {
	case got := <-reported.reports:
		if !strings.HasPrefix(got, "pvc-1 of shop/data: WaitsForRestart: volume ") || !strings.Contains(got, node) {
			t.Errorf("the report is %q", got)
		}
	case err := <-answered:
		t.Fatalf("answered without a report: %v", err)
	}
	stop()
	coretest.WantCode(t, <-answered, codes.Canceled)
}

// The report says for which volumes an instance needs a restart, since when, and why it has not started.
func TestPlannedReportSaysWhyNothingStarts(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		change func(*coretest.Options)
		reason rpc.RestartReason
		says   string
	}{
		{"the window", func(o *coretest.Options) { o.Restarts.Window = time.Hour }, rpc.ReasonWindow, "1h"},
		{"the cool-down", func(o *coretest.Options) { o.Restarts.CoolDown = time.Hour }, rpc.ReasonCoolDown, "wait until"},
		{"the hours", func(o *coretest.Options) { o.Restarts.NextStart = inAnHour }, rpc.ReasonHours, "the next time in --restart-hours"},
		{"the own instance is unknown", func(o *coretest.Options) {
			o.Restarts.Self = func() (string, bool) { return "", false }
		}, rpc.ReasonSelf, "does not know yet"},
		{"the refusal of the node", func(o *coretest.Options) {
			refuse := fixedReply{newGuests(), orchestrator.RestartReply{State: orchestrator.RestartRefused, Reason: "graceful node shutdown is on"}}
			o.Restarts.Shutdown, o.Restarts.Requester, o.Restarts.CoolDown = restart.Guest, refuse, time.Second
		}, rpc.ReasonRefused, "graceful node shutdown is on; next try after"},
		{"a guest that hangs", func(o *coretest.Options) {
			o.Restarts.Shutdown, o.Restarts.Requester, o.Restarts.HaltTimeout = restart.Guest, hangingGuests(), time.Millisecond
		}, rpc.ReasonUnderWay, "has not halted"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			before := time.Now()
			r := newRestartRig(t, test.change)
			node := r.Node(t, "node-a")
			volume, other := r.Create(t, "v"), r.Create(t, "other")
			if err := r.Publish(t, volume, node); status.Code(err) != codes.FailedPrecondition {
				t.Fatal(err)
			}
			var got rpc.Restart
			await.Eventually(t, "the report says what the volume waits for", func() bool {
				got = r.waitForReport(t, volume, node, test.reason)
				return strings.Contains(got.Message, test.says)
			})
			if len(got.Attach) != 1 || got.Attach[0].VolumeID != volume || got.Attach[0].Since.Before(before) ||
				got.Attach[0].LastRequested.Before(got.Attach[0].Since) ||
				len(got.Detach) > 0 {
				t.Errorf("reported %+v", got)
			}
			if got.Since.Before(before) || (got.ID != "") != (test.reason == rpc.ReasonUnderWay) {
				t.Errorf("reported %+v", got)
			}
			if diff := cmp.Diff([]string{volume}, disksOf(r.waitForReport(t, "", node, test.reason).Attach)); diff != "" {
				t.Errorf("ListVolumes reports other disks (-want +got):\n%s", diff)
			}
			if all := r.reported(t, other); all == nil || len(all) > 0 {
				t.Errorf("reported for a volume that does not wait: %+v", all)
			}
			// The RPC says the same. It repeats the attach request, which the next report shows.
			if err := r.Publish(t, volume, node); !strings.Contains(status.Convert(err).Message(), node) {
				t.Errorf("the RPC answers: %v", err)
			}
			await.Eventually(t, "the repetition is reported", func() bool {
				for _, one := range r.reported(t, volume) {
					return one.Attach[0].LastRequested.After(got.Attach[0].LastRequested) &&
						one.Attach[0].Since.Equal(got.Attach[0].Since)
				}
				return false
			})
		})
	}
}

// fixedReply are guests that give the same reply to every request and keep running.
type fixedReply struct {
	*guests
	answer orchestrator.RestartReply
}

// hangingGuests accept every request and keep running.
func hangingGuests() fixedReply {
	return fixedReply{newGuests(), orchestrator.RestartReply{State: orchestrator.RestartAccepted}}
}

func (a fixedReply) Request(_ context.Context, instance, id string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.asked[instance], a.answers[instance] = id, a.answer
	return nil
}

func (a fixedReply) Reply(context.Context, string, string) (orchestrator.RestartReply, error) {
	return a.answer, nil
}

// A volume that moves waits for two instances, and the report shows both. Another controller reports what is in the
// records: the disk that is still attached, but not the attach request.
func TestPlannedReportOfMovingVolume(t *testing.T) {
	t.Parallel()
	closed := make(chan struct{})
	r := newRestartRig(t, func(o *coretest.Options) {
		o.Restarts.NextStart = func(now time.Time) time.Time {
			select {
			case <-closed:
				return inAnHour(now)
			default:
				return now
			}
		}
	})
	from, to := r.Node(t, "node-a"), r.Node(t, "node-b")
	moving := r.Create(t, "moving")
	r.published(t, moving, from)
	r.restartsDone(t)
	close(closed)
	other := r.again(t)
	r.Must(t, r.Unpublish(t, moving, from))
	for _, controller := range []*rig{r, other} {
		still := controller.waitForReport(t, moving, from, "")
		if !cmp.Equal(still, rpc.Restart{InstanceID: from, Detach: []string{moving}}) {
			t.Errorf("reported for the unpublished disk: %+v", still)
		}
	}
	if err := r.Publish(t, moving, to); status.Code(err) != codes.FailedPrecondition {
		t.Fatal(err)
	}
	if first := r.waitForReport(
		t,
		moving,
		from,
		rpc.ReasonHours,
	); !cmp.Equal(first.Detach, []string{moving}) ||
		len(first.Attach) > 0 {
		t.Errorf("reported for the instance that has the disk: %+v", first)
	}
	await.Eventually(t, "the request is reported to wait for the other instance", func() bool {
		for _, one := range r.reported(t, moving) {
			if one.InstanceID == to {
				return strings.Contains(one.Attach[0].Problem, from)
			}
		}
		return false
	})
	if err := r.Publish(t, moving, to); !strings.Contains(status.Convert(err).Message(), "--restart-hours") {
		t.Errorf("the RPC does not say why the first of two instances is not restarted: %v", err)
	}
	for _, one := range other.reported(t, "") {
		if len(one.Attach) > 0 {
			t.Errorf("a controller reports a request that another controller got: %+v", one)
		}
	}
}

// A controller reports the restart that another controller carries out, and that its own volumes wait for it.
func TestPlannedReportOfAnotherController(t *testing.T) {
	t.Parallel()
	r := newRestartRig(
		t,
		func(o *coretest.Options) { o.Restarts.Shutdown, o.Restarts.Requester = restart.Guest, hangingGuests() },
	)
	a, b := r.Node(t, "node-a"), r.Node(t, "node-b")
	first, second := r.Create(t, "first"), r.Create(t, "second")
	if err := r.Publish(t, first, a); status.Code(err) != codes.FailedPrecondition {
		t.Fatal(err)
	}
	mine := r.waitForReport(t, first, a, rpc.ReasonUnderWay)
	other := r.again(t)
	theirs := other.waitForReport(t, first, a, rpc.ReasonUnderWay)
	if mine.ID == "" || theirs.ID != mine.ID || !cmp.Equal(disksOf(theirs.Attach), []string{first}) ||
		!strings.Contains(theirs.Message, "another controller") {
		t.Errorf("one reports %+v, the other %+v", mine, theirs)
	}
	if err := other.Publish(t, second, b); status.Code(err) != codes.FailedPrecondition {
		t.Fatal(err)
	}
	if waits := other.waitForReport(
		t,
		second,
		b,
		rpc.ReasonOthers,
	); !strings.Contains(
		waits.Message,
		"--restart-max-down",
	) {
		t.Errorf("reported %+v", waits)
	}
}

// A volume that was attached and not published again waits for no restart, even if another instance is being restarted.
func TestPlannedReportOfAttachedVolume(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) { o.Rack.StateTime = 300 * time.Millisecond })
	a, b := r.Node(t, "node-a"), r.Node(t, "node-b")
	first, second := r.Create(t, "first"), r.Create(t, "second")
	if err := r.Publish(t, first, a); status.Code(err) != codes.FailedPrecondition {
		t.Fatal(err)
	}
	await.Eventually(t, "the disk is attached", func() bool { return r.Holder(t, first) == a })
	r.restartsDone(t)
	if err := r.Publish(t, second, b); status.Code(err) != codes.FailedPrecondition {
		t.Fatal(err)
	}
	r.waitForReport(t, second, b, rpc.ReasonUnderWay)
	await.Eventually(t, "the other restart is over", func() bool {
		for _, one := range r.reported(t, first) {
			if one.InstanceID != a || one.Reason != "" || !strings.Contains(one.Attach[0].Problem, "repeat the request") {
				t.Fatalf("reported %+v", one)
			}
		}
		return len(r.records(t, "csi-restart-")) == 0
	})
}

// An orchestrator does not request a report and gets none. In attach mode hot there is nothing to report on a rack with
// hot-plug.
func TestPlannedReportOnlyOnRequest(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t)
	var header grpcmetadata.MD
	_, err := r.ListVolumes(t.Context(), &csi.ListVolumesRequest{}, grpc.Header(&header))
	r.Must(t, err)
	if got := header.Get(rpc.MetadataRestarts); len(got) > 0 {
		t.Errorf("reported without a request: %v", got)
	}
	if got := r.reported(t, ""); got == nil || len(got) > 0 {
		t.Errorf("reported although no restart is needed: %v", got)
	}
	hot := newRig(t)
	if got := hot.reported(t, ""); got != nil {
		t.Errorf("reported in attach mode hot: %v", got)
	}
}

// A restart that is needed is counted by its reason, and logged once.
func TestPlannedMetricsAndLog(t *testing.T) {
	t.Parallel()
	m := metrics.New(metrics.Process{Driver: rpc.PluginName, Version: "test", Mode: "controller"})
	log := &simtest.Output{}
	r := newRestartRig(t, func(o *coretest.Options) {
		o.Restarts.NextStart, o.Metrics, o.Log = inAnHour, m, log
	})
	node := r.Node(t, "node-a")
	volume := r.Create(t, "v")
	if err := r.Publish(t, volume, node); status.Code(err) != codes.FailedPrecondition {
		t.Fatal(err)
	}
	waiting := func(reason string) float64 {
		return metricstest.Read(t, metricstest.Page(m))[`oxide_csi_restart_instances_waiting{rack="default",reason="`+reason+`"}`]
	}
	await.Eventually(t, "the instance is counted", func() bool { return waiting("hours") == 1 })
	samples := metricstest.Read(t, metricstest.Page(m))
	if samples[`oxide_csi_restart_volumes_waiting{rack="default"}`] != 1 ||
		samples[`oxide_csi_restarts_in_flight{rack="default"}`] != 0 {
		t.Errorf("metrics: %v", samples.Matching("oxide_csi_restart"))
	}
	r.Must(t, r.Unpublish(t, volume, node))
	await.Eventually(t, "the instance is no longer counted", func() bool { return waiting("hours") == 0 })
	var lines []string
	for line := range strings.Lines(log.String()) {
		if strings.Contains(line, "restart needed") && strings.Contains(line, "reason=hours") {
			lines = append(lines, line)
		}
	}
	if len(lines) != 1 || !strings.Contains(lines[0], node) || !strings.Contains(lines[0], volume) {
		t.Errorf("logged %d times: %v", len(lines), lines)
	}
}

// In attach mode hot nothing is restarted. The report says which instances must be stopped for which volumes, until the
// rack has done it or the orchestrator wants it no more.
func TestHotReportsWhatWaitsForAStop(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(o *coretest.Options) { o.Rack.Hotplug = false })
	node := r.Node(t, "node-a")
	there, wanted, other := r.Create(t, "there"), r.Create(t, "wanted"), r.Create(t, "other")
	r.stop(t, node)
	r.Must(t, r.Publish(t, there, node))
	r.Must(t, r.Sim.SetRunState(t.Context(), node, "running"))
	before := time.Now()
	for _, err := range []error{r.Publish(t, wanted, node), r.Publish(t, wanted, node), r.Unpublish(t, there, node)} {
		coretest.WantCode(t, err, codes.FailedPrecondition, "[RackHasNoHotplug]")
	}
	all := r.reported(t, "")
	if len(all) != 1 || all[0].InstanceID != node || all[0].Reason != rpc.ReasonManual ||
		!strings.Contains(all[0].Message, "--attach-mode=hot") || all[0].Since.Before(before) ||
		!cmp.Equal(disksOf(all[0].Attach), []string{wanted}) || !cmp.Equal(all[0].Detach, []string{there}) ||
		!all[0].Attach[0].LastRequested.After(all[0].Attach[0].Since) {
		t.Fatalf("reported %+v", all)
	}
	if got := r.reported(t, other); got != nil {
		t.Errorf("reported for a volume that does not wait: %+v", got)
	}
	r.stop(t, node)
	await.Eventually(t, "the disks are changed", func() bool {
		return r.Publish(t, wanted, node) == nil && r.Unpublish(t, there, node) == nil
	})
	if got := r.reported(t, ""); got != nil {
		t.Errorf("reported after the stop: %+v", got)
	}
	r.Must(t, r.Sim.SetRunState(t.Context(), node, "running"))
	coretest.WantCode(t, r.Publish(t, there, node), codes.FailedPrecondition, "[RackHasNoHotplug]")
	r.Must(t, r.Unpublish(t, there, node))
	if got := r.reported(t, ""); got != nil {
		t.Errorf("reported although nobody wants the disk there any more: %+v", got)
	}
}
