// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"cmp"
	"log/slog"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/core/detach"
	"github.com/oxidecomputer/oxide-csi-plugin/core/expand"
	"github.com/oxidecomputer/oxide-csi-plugin/core/metrics"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/restart"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// Service is the CSI Controller service. It calls the racks' APIs and never touches a device.
type Service struct {
	csi.UnimplementedControllerServer

	racks        *racks
	cluster      string
	maxDisks     int
	attaching    *attaching
	refusals     *refusals
	remembered   remembered
	pageTokens   *pageTokens
	volumeCounts *pageCounts
	freeCapacity *capacityCache
	sweeper      *sweeper
	// timed says that there is a grace period before a detach, so the caller may be Nomad.
	timed bool
	// detachers keep the deferred detaches of each rack.
	detachers map[*rack.Client]*detach.Detacher
	// expanders replace the disks of the volumes that grow.
	expanders map[*rack.Client]*expand.Expander
	// engines plan restarts, in attach mode restart. The map is nil in attach mode hot.
	engines map[*rack.Client]*restart.Engine
	// restartWait is how long ControllerPublishVolume waits for a planned restart.
	restartWait time.Duration
	// orchestrator tells which nodes may use a volume. It may be nil.
	orchestrator orchestrator.Claims
	otherWait    time.Duration
	// claims publishes what volumes wait for. It is nil if the orchestrator has no claims.
	claims  orchestrator.ClaimReporter
	self    orchestrator.SelfReporter
	metrics *metrics.Metrics
	log     *slog.Logger
}

// rackController is the service working on one rack: the methods that need a single rack are methods of this type.
type rackController struct {
	*Service
	rack     *rack.Client
	detacher *detach.Detacher
	expander *expand.Expander
	// engine is nil except in attach mode restart.
	engine *restart.Engine
}

func (c *Service) forRack(client *rack.Client) rackController {
	return rackController{c, client, c.detachers[client], c.expanders[client], c.engines[client]}
}

// Options configure a [Service].
type Options struct {
	// Racks are the racks to serve. Each needs a unique name, which becomes its topology segment.
	Racks []*rack.Client
	// Cluster is the cluster ID. It keeps apart the disks of clusters that share a project.
	Cluster string
	// MaxDisks is the maximum number of disks attached to an instance, including its boot disk.
	MaxDisks int
	// DetachGrace is the time from the request to detach from a running instance to the detach. 0 means at once.
	DetachGrace time.Duration
	// TemporaryAge is the age at which the temporary snapshot of a clone counts as left behind; 0 means one hour.
	TemporaryAge time.Duration
	// OtherRacksWait bounds the look for a volume on the racks that a create does not allow; 0 means two seconds.
	OtherRacksWait time.Duration
	// LookAge is how long a look at an expansion counts, see [expand.Expander]; 0 means four seconds, the only safe value.
	LookAge time.Duration
	// Restarts configures attach mode restart. Nil means attach mode hot.
	Restarts *PlannedRestarts
	// Orchestrator tells which nodes may use a volume. It is nil for one that never leaves an unpublish out.
	Orchestrator orchestrator.Claims
	// Self publishes that a token expires. It may be nil.
	Self orchestrator.SelfReporter
	// Metrics receives the number of volumes. It may be nil.
	Metrics *metrics.Metrics
	Log     *slog.Logger
}

// New returns the Controller service. It calls no rack.
func New(opts Options) *Service {
	c := &Service{
		racks:        newRacks(opts.Racks),
		cluster:      opts.Cluster,
		maxDisks:     opts.MaxDisks,
		attaching:    newAttaching(),
		refusals:     newRefusals(),
		remembered:   remembered{disks: map[string]rememberedDisk{}},
		pageTokens:   newPageTokens(),
		volumeCounts: newPageCounts(),
		freeCapacity: newCapacityCache(),
		timed:        opts.DetachGrace > 0,
		orchestrator: opts.Orchestrator,
		otherWait:    cmp.Or(opts.OtherRacksWait, defaultOtherRacksWait),
		self:         opts.Self,
		metrics:      opts.Metrics,
		log:          opts.Log,
	}
	c.sweeper = newSweeper(c, opts.TemporaryAge)
	c.detachers = c.newDetachers(opts.DetachGrace)
	c.expanders = c.newExpanders(opts.LookAge)
	if opts.Restarts != nil {
		c.engines, c.restartWait = c.newEngines(*opts.Restarts), opts.Restarts.Wait
		c.claims = opts.Restarts.Claims
	}
	return c
}
