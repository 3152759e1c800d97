// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package diagnose_test

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/admin/diagnose"
	"github.com/oxidecomputer/oxide-csi-plugin/core/controller"
	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/restart"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// traced is an orchestrator that knows one volume.
type traced orchestrator.Trace

func (t traced) Trace(context.Context, orchestrator.Subject) (orchestrator.Trace, error) {
	return orchestrator.Trace(t), nil
}

// story is a situation that is made on a simulated rack with a real controller. arrange returns what the orchestrator
// then knows.
type story struct {
	reason string
	rig    func(*coretest.Options)
	// arrange makes the situation. trace already has the ID of the volume and of node-a.
	arrange func(t *testing.T, r *coretest.Rig, trace *orchestrator.Trace)
	// asks changes how the command reaches the rack.
	asks func(*rack.Config)
}

// said puts the answer of the plugin where the orchestrator puts it.
func said(trace *orchestrator.Trace, err error) {
	if err != nil {
		trace.Messages = append(trace.Messages, orchestrator.TraceMessage{Text: status.Convert(err).Message()})
	}
}

func publishOnA(t *testing.T, r *coretest.Rig, trace *orchestrator.Trace) {
	said(trace, r.Publish(t, trace.VolumeID, r.Node(t, "node-a")))
}

func graceOf(grace time.Duration) func(*coretest.Options) {
	return func(o *coretest.Options) { o.DetachGrace = grace }
}

// claims is an orchestrator that gives one answer about each volume.
type claims struct {
	by  string
	err error
}

func (claims) Moved(context.Context, string, string, string) (bool, error) { return false, nil }
func (claims) Registered(context.Context, string) ([]string, error)        { return nil, nil }

func (c claims) Claimed(_ context.Context, _ string, volumeIDs []string) (map[string]string, error) {
	return map[string]string{volumeIDs[0]: c.by}, c.err
}

// asking makes a rig whose controller asks for the claims, but carries no deferred detach out by itself.
func asking(o orchestrator.Claims) func(*coretest.Options) {
	return func(opts *coretest.Options) {
		opts.DetachGrace, opts.Orchestrator, opts.Unplanned = 100*time.Millisecond, o, true
	}
}

// publishFromB publishes on node-a the volume that was just unpublished from node-b.
func publishFromB(t *testing.T, r *coretest.Rig, trace *orchestrator.Trace) {
	coretest.Must(t, r.Publish(t, trace.VolumeID, r.Node(t, "node-b")))
	coretest.Must(t, r.Unpublish(t, trace.VolumeID, r.Node(t, "node-b")))
	publishOnA(t, r, trace)
}

func noHotplug(o *coretest.Options) { o.Rack.Hotplug = false }

func condition(condition orchestrator.TraceCondition) func(*testing.T, *coretest.Rig, *orchestrator.Trace) {
	return func(_ *testing.T, _ *coretest.Rig, trace *orchestrator.Trace) {
		trace.Conditions = append(trace.Conditions, condition)
	}
}

// badGateway answers as a proxy that does not reach the rack.
type badGateway struct{}

func (badGateway) RoundTrip(req *http.Request) (*http.Response, error) {
	return &http.Response{StatusCode: http.StatusBadGateway, Request: req, Header: http.Header{}, Body: http.NoBody}, nil
}

var stories = map[string]story{
	"nothing is wrong": {reason: "Works", arrange: publishOnA},
	"no hot-plug":      {reason: "RackHasNoHotplug", rig: noHotplug, arrange: publishOnA},
	"instance stopped": {
		reason: "InstanceStopped",
		arrange: func(t *testing.T, r *coretest.Rig, trace *orchestrator.Trace) {
			publishOnA(t, r, trace)
			coretest.Must(t, r.Sim.SetRunState(t.Context(), "node-a", "stopped"))
			trace.Conditions = append(trace.Conditions, orchestrator.NodeNotReady)
		},
	},
	"instance deleted": {
		reason: "InstanceDeleted",
		arrange: func(t *testing.T, r *coretest.Rig, trace *orchestrator.Trace) {
			id := r.Node(t, "node-a")
			coretest.Must(t, r.Sim.SetRunState(t.Context(), "node-a", "stopped"))
			coretest.Must(t, r.SDK.InstanceDelete(t.Context(), oxide.InstanceDeleteParams{Instance: oxide.NameOrId(id)}))
			said(trace, r.Publish(t, trace.VolumeID, id))
			trace.Conditions = append(trace.Conditions, orchestrator.NodeNotReady)
		},
	},
	"quota full": {reason: "QuotaExhausted", arrange: func(t *testing.T, r *coretest.Rig, trace *orchestrator.Trace) {
		coretest.Must(t, r.Sim.Set(t.Context(), simtest.Settings{QuotaBytes: new(int64(1))}))
		trace.VolumeID, trace.CSIName = "", "pvc-2"
		_, err := r.CreateVolume(t.Context(), coretest.CreateRequest("pvc-2"))
		said(trace, err)
	}},
	"slots full": {reason: "InstanceFull", arrange: func(t *testing.T, r *coretest.Rig, trace *orchestrator.Trace) {
		for range r.Options.MaxDisks - 1 {
			coretest.Must(t, r.Publish(t, r.Create(t, rackName(t)), r.Node(t, "node-a")))
		}
		publishOnA(t, r, trace)
	}},
	"token revoked": {reason: "TokenRejected", arrange: func(t *testing.T, r *coretest.Rig, trace *orchestrator.Trace) {
		r.Token.Store("oxide-token-revoked")
		publishOnA(t, r, trace)
	}},
	"token revoked, seen by the command alone": {
		reason: "TokenRejected", arrange: func(*testing.T, *coretest.Rig, *orchestrator.Trace) {},
		asks: func(c *rack.Config) { c.Token = rack.FixedToken("oxide-token-revoked") },
	},
	"wrong project": {
		reason: "ProjectUnusable", arrange: func(*testing.T, *coretest.Rig, *orchestrator.Trace) {},
		asks: func(c *rack.Config) { c.Project = "another" },
	},
	"role too low": {reason: "RoleTooLow", arrange: func(t *testing.T, r *coretest.Rig, trace *orchestrator.Trace) {
		token, err := r.Sim.NewToken(t.Context(), "viewer")
		coretest.Must(t, err)
		r.Token.Store(token)
		publishOnA(t, r, trace)
	}},
	"twin serial": {reason: "SerialCollision", arrange: func(t *testing.T, r *coretest.Rig, trace *orchestrator.Trace) {
		twin := string(r.Disk(t, trace.VolumeID).Name) + "-twin"
		r.AttachByHand(t, r.UserDisk(t, coretest.Project, twin, "").Id, r.Node(t, "node-a"))
		publishOnA(t, r, trace)
	}},
	"attached elsewhere": {
		reason: "AttachedElsewhere",
		arrange: func(t *testing.T, r *coretest.Rig, trace *orchestrator.Trace) {
			coretest.Must(t, r.Publish(t, trace.VolumeID, r.Node(t, "node-b")))
			publishOnA(t, r, trace)
		},
	},
	"detach deferred": {
		reason: "DetachDeferred", rig: graceOf(time.Hour),
		arrange: publishFromB,
	},
	"detach deferred without a time": {
		reason: "DetachUntimed", rig: graceOf(time.Hour),
		arrange: func(t *testing.T, r *coretest.Rig, trace *orchestrator.Trace) {
			for range 2 {
				coretest.Must(t, r.Publish(t, trace.VolumeID, r.Node(t, "node-b")))
				coretest.Must(t, r.Unpublish(t, trace.VolumeID, r.Node(t, "node-b")))
			}
			said(trace, r.Delete(t, trace.VolumeID))
		},
	},
	"nobody says whether the disk is in use": {
		reason: "ClaimsUnknown", rig: asking(claims{err: errors.New("the token may not read")}), arrange: publishFromB,
	},
	"the disk is in use on the other node": {
		reason: "ClaimedThere", rig: asking(claims{by: "allocation 5a7d9b11"}), arrange: publishFromB,
	},
	"disk gone": {reason: "DiskGone", arrange: func(t *testing.T, r *coretest.Rig, trace *orchestrator.Trace) {
		coretest.Must(t, r.SDK.DiskDelete(t.Context(), oxide.DiskDeleteParams{Disk: oxide.NameOrId(trace.VolumeID)}))
		publishOnA(t, r, trace)
	}},
	"disk faulted": {reason: "DiskFaulted", arrange: func(t *testing.T, r *coretest.Rig, trace *orchestrator.Trace) {
		coretest.Must(t, r.Sim.SetDiskState(t.Context(), trace.VolumeID, "faulted"))
		publishOnA(t, r, trace)
	}},
	"restart planned": {
		reason: "RestartPlanned", arrange: publishOnA,
		rig: func(o *coretest.Options) {
			noHotplug(o)
			o.Restarts = &controller.PlannedRestarts{Wait: 50 * time.Millisecond, Options: restart.Options{
				Shutdown: restart.Hard, MaxDown: 1, HaltTimeout: time.Minute, Window: time.Hour,
			}}
		},
	},
	"restart refused": {
		reason: "RestartRefused", rig: refusals(1000), arrange: publishUntil("pods would end; next try after"),
	},
	"restart refused, and requested again": {
		reason: "RestartRefused", rig: refusals(1),
		arrange: publishUntil("last failure: its node plugin refuses: pods would end"),
	},
	"state unknown": {reason: "StateUnknown", arrange: func(t *testing.T, r *coretest.Rig, trace *orchestrator.Trace) {
		state := map[string]any{"state": map[string]any{"state": "hibernating"}}
		coretest.Must(t, r.Sim.Show(t.Context(), trace.VolumeID, state))
		publishOnA(t, r, trace)
	}},
	"proxy answers": {
		reason: "ProxyAnswered", arrange: func(*testing.T, *coretest.Rig, *orchestrator.Trace) {},
		asks: func(c *rack.Config) { c.HTTPClient = &http.Client{Transport: badGateway{}} },
	},
	"rack unavailable": {
		reason: "RackUnavailable",
		arrange: func(t *testing.T, r *coretest.Rig, trace *orchestrator.Trace) {
			r.Inject(t, "disk_view", simtest.FaultStatus, 503)
			publishOnA(t, r, trace)
		},
	},
	"node gone":             {reason: "NodeNotReady", arrange: condition(orchestrator.NodeNotReady)},
	"plugin not registered": {reason: "PluginNotRegistered", arrange: condition(orchestrator.NotRegistered)},
	"no controller":         {reason: "ControllerNotRunning", arrange: condition(orchestrator.NoController)},
	"claim not released":    {reason: "ClaimNotReleased", arrange: condition(orchestrator.ClaimOfEnded)},
	"no controller, and the workload runs": {
		reason: "ControllerNotRunning", arrange: func(t *testing.T, r *coretest.Rig, trace *orchestrator.Trace) {
			publishOnA(t, r, trace)
			trace.Conditions = []orchestrator.TraceCondition{
				orchestrator.NoController, orchestrator.Running, orchestrator.Attached,
			}
		},
	},
	"another allocation has the claim": {reason: "ClaimHeld", arrange: condition(orchestrator.ClaimOfAnother)},
	"the claim is being deleted": {
		reason: "ClaimTerminating", arrange: func(t *testing.T, r *coretest.Rig, trace *orchestrator.Trace) {
			publishOnA(t, r, trace)
			trace.Conditions = []orchestrator.TraceCondition{
				orchestrator.Terminating, orchestrator.Running, orchestrator.Attached,
			}
		},
	},
	"all nodes are full": {
		reason: "NodesFull", arrange: func(_ *testing.T, _ *coretest.Rig, trace *orchestrator.Trace) {
			trace.Messages = []orchestrator.TraceMessage{{
				Link: "workload", Text: "FailedScheduling: 0/2 nodes are available: 2 node(s) exceed max volume count.",
			}}
		},
	},
	"a claim waits, and nobody says why": {
		reason: "NotStartedYet", arrange: func(_ *testing.T, _ *coretest.Rig, trace *orchestrator.Trace) {
			trace.Steps = append(trace.Steps, orchestrator.TraceStep{Link: "claim", Object: "claim x/y", State: "Pending"})
		},
	},
	"several nodes at once": {
		reason: "AccessModeUnsupported", arrange: func(t *testing.T, r *coretest.Rig, trace *orchestrator.Trace) {
			req := coretest.CreateRequest("shared")
			req.VolumeCapabilities[0].AccessMode.Mode = csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
			_, err := r.CreateVolume(t.Context(), req)
			said(trace, err)
		},
	},
	"an unknown filesystem": {
		reason: "FilesystemUnsupported", arrange: func(t *testing.T, r *coretest.Rig, trace *orchestrator.Trace) {
			req := coretest.CreateRequest("zfs")
			req.VolumeCapabilities[0].GetMount().FsType = "zfs"
			_, err := r.CreateVolume(t.Context(), req)
			said(trace, err)
		},
	},
	"a mount flag with a typo": {
		reason: "OptionNotAllowed", arrange: func(t *testing.T, r *coretest.Rig, trace *orchestrator.Trace) {
			req := coretest.CreateRequest("flags")
			req.VolumeCapabilities[0].GetMount().MountFlags = []string{"noatme"}
			_, err := r.CreateVolume(t.Context(), req)
			said(trace, err)
		},
	},
	"larger than a disk": {
		reason: "SizeUnsupported", arrange: func(t *testing.T, r *coretest.Rig, trace *orchestrator.Trace) {
			req := coretest.CreateRequest("large")
			req.CapacityRange.RequiredBytes = 2 << 40
			_, err := r.CreateVolume(t.Context(), req)
			said(trace, err)
		},
	},
	"class without plugin": {reason: "OtherDriver", arrange: condition(orchestrator.OtherDriver)},
	"snapshot not ready":   {reason: "SnapshotNotReady", arrange: condition(orchestrator.SnapshotNotReady)},
	"nothing was said yet": {
		reason: "NotStartedYet", arrange: func(_ *testing.T, _ *coretest.Rig, trace *orchestrator.Trace) {
			trace.Steps = append(trace.Steps, orchestrator.TraceStep{Link: "workload", Object: "Pod x/y", State: "Pending"})
		},
	},
	"expansion waits": {reason: "ExpansionWaits", arrange: condition(orchestrator.ExpansionPending)},
}

// refusals makes a rig without hot-plug whose nodes refuse so many restarts, and then do not reply.
func refusals(n int64) func(*coretest.Options) {
	return func(o *coretest.Options) {
		noHotplug(o)
		r := &refusing{}
		r.left.Store(n)
		o.Restarts = &controller.PlannedRestarts{Wait: 50 * time.Millisecond, Options: restart.Options{
			Shutdown: restart.Guest, Requester: r, MaxDown: 1, HaltTimeout: time.Minute,
			CoolDown: 2 * time.Second, Poll: 10 * time.Millisecond, Idle: 10 * time.Millisecond,
		}}
	}
}

// publishUntil publishes the volume again and again until the answer has the text.
func publishUntil(text string) func(*testing.T, *coretest.Rig, *orchestrator.Trace) {
	return func(t *testing.T, r *coretest.Rig, trace *orchestrator.Trace) {
		for end := time.Now().Add(time.Minute); time.Now().Before(end); {
			err := r.Publish(t, trace.VolumeID, r.Node(t, "node-a"))
			if strings.Contains(status.Convert(err).Message(), text) {
				said(trace, err)
				return
			}
		}
		t.Errorf("no answer has %q", text)
	}
}

// refusing is a node that refuses some restarts.
type refusing struct {
	left atomic.Int64
	last atomic.Value // the ID of the last restart that it refused
}

func (r *refusing) Request(_ context.Context, _, id string) error {
	if r.left.Add(-1) >= 0 {
		r.last.Store(id)
	}
	return nil
}

func (r *refusing) Reply(_ context.Context, _, id string) (orchestrator.RestartReply, error) {
	if r.last.Load() != id {
		return orchestrator.RestartReply{}, nil
	}
	return orchestrator.RestartReply{State: orchestrator.RestartRefused, Reason: "pods would end"}, nil
}

func (r *refusing) Withdraw(ctx context.Context, instance, id string) (orchestrator.RestartReply, error) {
	return r.Reply(ctx, instance, id)
}
func (*refusing) Forget(context.Context, string, string) error              { return nil }
func (*refusing) Report(context.Context, string, orchestrator.Report) error { return nil }

func rackName(t *testing.T) string { return t.Name() + time.Now().String() }

// The verdict of each story that a rack and a controller can make is right. Its first line says what is wrong, who acts
// and what to do, with all names filled in. The command only reads.
func TestStories(t *testing.T) {
	for name, s := range stories {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := coretest.New(t, func(o *coretest.Options) {
				o.Rack = simrack.Options{
					Token: coretest.Token, Project: coretest.Project, Instances: []string{"node-a", "node-b"}, Hotplug: true,
				}
				if s.rig != nil {
					s.rig(o)
				}
			})
			trace := orchestrator.Trace{
				VolumeID: r.Create(t, "pvc-1"), Claim: "default/data", Node: "worker-1", NodeID: r.Node(t, "node-a"),
			}
			s.arrange(t, r, &trace)
			config := rack.Config{
				Name:    "default",
				Host:    r.Sim.Host,
				Project: coretest.Project,
				Token:   rack.FixedToken(coretest.Token),
			}
			if s.asks != nil {
				s.asks(&config)
			}
			client, err := rack.New(config)
			coretest.Must(t, err)
			r.ClearCalls(t)
			got, err := diagnose.Explain(
				t.Context(),
				orchestrator.Subject{Claim: "default/data"},
				traced(trace),
				[]*rack.Client{client},
				coretest.Cluster,
				diagnose.Host{},
			)
			if err != nil || got.Reason != s.reason {
				t.Errorf("%s, %v, want %s: %s; messages %v", got.Reason, err, s.reason, got.Verdict, got.Messages)
			}
			if strings.ContainsAny(got.Verdict+got.Next, "{}") || got.Actor == "" || got.Next == "" || got.Verdict == "" {
				t.Errorf("incomplete: %+v", got)
			}
			calls, err := r.Sim.Calls(t.Context())
			coretest.Must(t, err)
			for _, call := range calls.Log {
				if call.Method != "GET" && !strings.HasPrefix(s.reason, "Restart") { // there the engine works too
					t.Errorf("the command sent %s %s", call.Method, call.Path)
				}
			}
		})
	}
}

// A next step has the names that an operator types.
func TestNextStepsHaveTheNames(t *testing.T) {
	r := coretest.New(t)
	id := r.Create(t, "postgres")
	coretest.Must(t, r.Publish(t, id, r.Node(t, "node-b")))
	for _, test := range []struct {
		workload, claim, orchestrator string
		want                          []string
	}{
		{"pod shop/db-0", "shop/data", orchestrator.Kubernetes,
			[]string{"kubectl cordon worker-1", "kubectl delete pod -n shop db-0:"}},
		{"allocation 5a7d9b11 (db)", "default/data", orchestrator.Nomad,
			[]string{"client worker-1", "nomad alloc stop 5a7d9b11:"}},
		{"allocation 5a7d9b11 (db)", "shop/data", orchestrator.Nomad, []string{"nomad alloc stop -namespace=shop 5a7d9b11:"}},
		{"", "", orchestrator.Kubernetes, []string{"kubectl delete pod -n NAMESPACE POD:"}},
	} {
		trace := orchestrator.Trace{
			VolumeID: id, Node: "worker-1", Workload: test.workload, Claim: test.claim, Orchestrator: test.orchestrator,
			Messages: []orchestrator.TraceMessage{{Text: "takes no more [InstanceFull]"}},
		}
		got, err := diagnose.Explain(
			t.Context(),
			orchestrator.Subject{VolumeID: id},
			traced(trace),
			[]*rack.Client{newRack(t, r)},
			coretest.Cluster,
			nil,
		)
		coretest.Must(t, err)
		for _, want := range test.want {
			if !strings.Contains(got.Next, want) {
				t.Errorf("%s, %q: %s, want %s", got.Reason, test.workload, got.Next, want)
			}
		}
	}
}

// A disk of another volume may be in the way. The next step has that volume, and the instance that has its disk.
func TestNextStepNamesTheVolumeInTheWay(t *testing.T) {
	r := coretest.New(t, func(o *coretest.Options) { o.DetachGrace, o.MaxDisks = time.Hour, 2 })
	other, id, node := r.Create(t, "other"), r.Create(t, "data"), r.Node(t, "node-a")
	for range 2 { // the second time its detach gets no time
		coretest.Must(t, r.Publish(t, other, node))
		coretest.Must(t, r.Unpublish(t, other, node))
	}
	trace := orchestrator.Trace{VolumeID: id, Orchestrator: orchestrator.Nomad, NodeID: node}
	said(&trace, r.Publish(t, id, node))
	got, err := diagnose.Explain(t.Context(), orchestrator.Subject{VolumeID: id}, traced(trace),
		[]*rack.Client{newRack(t, r)}, coretest.Cluster, nil)
	want := "oxide-csi volume detach " + other + " --node=" + node + " --unmounted"
	if err != nil || got.Reason != "DetachUntimed" || !strings.Contains(got.Next, want) {
		t.Errorf("%v: %s: %s, want %s; %v", err, got.Reason, got.Next, want, got.Messages)
	}
}

// byClaim is an orchestrator that knows several volumes of one workload.
type byClaim map[string]orchestrator.Trace

func (b byClaim) Trace(_ context.Context, subject orchestrator.Subject) (orchestrator.Trace, error) {
	return b[subject.Claim], nil
}

// A workload waits for the volume with which something is wrong, whichever it is. What is not in the table is quoted.
func TestExplainAllVolumesOfAWorkload(t *testing.T) {
	r := coretest.New(t)
	racks := []*rack.Client{newRack(t, r)}
	second := orchestrator.Subject{Claim: "shop/b", Workload: "5a7d9b11"}
	first := orchestrator.Trace{
		VolumeID: r.Create(t, "a"), Claim: "shop/a", Others: []orchestrator.Subject{second},
		Steps: []orchestrator.TraceStep{{Link: "workload", Object: "allocation", State: "pending"}},
	}
	for text, want := range map[string]string{"x [DiskNotBlank]": "DiskNotBlank", "neither known nor mute": "Unknown"} {
		b := orchestrator.Trace{
			VolumeID: r.Create(t, want), Claim: "shop/b", Messages: []orchestrator.TraceMessage{{Text: text}},
		}
		knows := byClaim{"shop/a": first, "shop/b": b}
		got, err := diagnose.Explain(t.Context(), orchestrator.Subject{Claim: "shop/a"}, knows, racks, coretest.Cluster, nil)
		if err != nil || got.Reason != want || want == "Unknown" && !strings.HasSuffix(got.Verdict, text) {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
	}
}

// everything is an orchestrator that knows a volume by any subject.
type everything orchestrator.Trace

func (e everything) Trace(_ context.Context, subject orchestrator.Subject) (orchestrator.Trace, error) {
	if subject.VolumeID == e.VolumeID {
		return orchestrator.Trace{VolumeID: e.VolumeID, Workload: "another allocation"}, nil
	}
	return orchestrator.Trace(e), nil
}

// The whole ID of an allocation looks like that of a disk. The answer is about this allocation.
func TestExplainAnAllocation(t *testing.T) {
	r := coretest.New(t)
	trace := everything{
		VolumeID: r.Create(t, "a"), Workload: "allocation 5a7d9b11",
		Messages: []orchestrator.TraceMessage{{Text: "x [DiskNotBlank]"}},
	}
	got, err := diagnose.Explain(t.Context(), orchestrator.Subject{VolumeID: coretest.NoVolumeID}, trace,
		[]*rack.Client{newRack(t, r)}, coretest.Cluster, nil)
	if err != nil || got.Reason != "DiskNotBlank" {
		t.Errorf("%+v, %v", got, err)
	}
}

// The verdict goes by the word of a message, also if it is not the first message, and by nothing else that it says.
func TestTheVerdictGoesByTheWord(t *testing.T) {
	for _, row := range fault.Table {
		for text, want := range map[string]*fault.Row{
			"NodeStageVolume: " + row.Verdict: diagnose.Unknown,
			row.Word:                          diagnose.Unknown,
			"rpc error: code = X desc = whatever [" + row.Word + "] (repeated)": row,
		} {
			got := diagnose.Verdict(diagnose.Facts{Trace: orchestrator.Trace{
				Messages: []orchestrator.TraceMessage{{Text: "waiting"}, {Text: text}},
			}})
			if got != want {
				t.Errorf("%s: %s, want %s", text, got.Word, want.Word)
			}
		}
	}
}

// A volume that neither the orchestrator nor a rack knows is an error.
// Without an orchestrator the rack's part is shown.
func TestExplainWithoutAnOrchestrator(t *testing.T) {
	r := coretest.New(t)
	id, racks := r.Create(t, "postgres"), []*rack.Client{newRack(t, r)}
	for _, subject := range []orchestrator.Subject{{VolumeID: id}, {Name: "postgres"}} {
		got, err := diagnose.Explain(t.Context(), subject, nil, racks, coretest.Cluster, nil)
		typed := subject.VolumeID + subject.Name
		if err != nil || got.Reason != "Works" || len(got.Chain) != 1 || !strings.Contains(got.Verdict, "volume "+typed+",") {
			t.Errorf("%+v: %+v, %v", subject, got, err)
		}
	}
	if got, err := diagnose.Explain(
		t.Context(),
		orchestrator.Subject{Name: "none"},
		nil,
		racks,
		coretest.Cluster,
		nil,
	); err == nil {
		t.Errorf("%+v", got)
	}
}

// knows is an orchestrator that knows one volume by its ID.
type knows string

func (k knows) Trace(_ context.Context, subject orchestrator.Subject) (orchestrator.Trace, error) {
	if subject.VolumeID != string(k) {
		return orchestrator.Trace{}, errors.New("no PersistentVolume has " + subject.VolumeID)
	}
	return orchestrator.Trace{VolumeID: string(k), Claim: "shop/data"}, nil
}

// Errors name the disk of a grown volume by its own ID. That leads to the volume, on the rack and in the orchestrator.
func TestExplainADisk(t *testing.T) {
	r := coretest.New(t)
	id := r.Create(t, "postgres")
	_, disk := grow(t, r, id)
	racks := []*rack.Client{newRack(t, r)}
	for name, tracer := range map[string]orchestrator.Tracer{"orchestrator": knows(id), "only the rack": nil} {
		subject := orchestrator.Subject{VolumeID: disk.Id}
		got, err := diagnose.Explain(t.Context(), subject, tracer, racks, coretest.Cluster, nil)
		if err != nil || got.Reason != "Works" || len(got.Messages) > 0 || !strings.Contains(got.Verdict, id) ||
			len(got.Chain) != 1 || !strings.Contains(got.Chain[0].Object, string(disk.Name)) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
	got, err := diagnose.Explain(
		t.Context(), orchestrator.Subject{VolumeID: coretest.NoVolumeID}, knows(coretest.NoVolumeID), racks, coretest.Cluster,
		nil)
	if err != nil || got.Reason != "DiskGone" || got.Chain[0].Object != "disk of volume "+coretest.NoVolumeID {
		t.Errorf("an ID that no rack knows: %+v, %v", got, err)
	}
}

// unreachable is an orchestrator that does not answer.
type unreachable struct{}

func (unreachable) Trace(context.Context, orchestrator.Subject) (orchestrator.Trace, error) {
	return orchestrator.Trace{}, errors.New("connection refused")
}

// If the orchestrator does not answer, the rack's part of a volume ID is shown, and that the rest is not known. A claim
// cannot be explained then.
func TestExplainSaysThatTheOrchestratorWasNotAsked(t *testing.T) {
	r := coretest.New(t)
	racks := []*rack.Client{newRack(t, r)}
	subject := orchestrator.Subject{VolumeID: r.Create(t, "x")}
	got, err := diagnose.Explain(t.Context(), subject, unreachable{}, racks, coretest.Cluster, nil)
	if err != nil || len(got.Chain) != 1 || len(got.Messages) != 1 ||
		!strings.Contains(got.Messages[0].Text, "not asked: connection refused") {
		t.Errorf("%+v, %v", got, err)
	}
	claim := orchestrator.Subject{Claim: "default/x"}
	if got, err := diagnose.Explain(
		t.Context(),
		claim,
		unreachable{},
		racks,
		coretest.Cluster,
		nil,
	); err == nil {
		t.Errorf("%+v", got)
	}
}
