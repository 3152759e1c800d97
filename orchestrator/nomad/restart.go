// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package nomad

import (
	"context"
	"fmt"
	"net/url"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/nomad/api"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/nomad"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// Controller and node plugin exchange the messages of a planned restart in the dynamic metadata of the Nomad client.
// Nomad has no conditional write, but changes several keys in one step and answers with all keys as they are after that
// step. So each half writes its own key first, and sees in the answer what the other half has written before. This
// decides which of the two was first.
//
// The keys begin with "unique." so that they do not count for a node's class, by which the scheduler groups nodes.
const (
	// keyRestart is the ID of the requested restart. The controller writes it, the node plugin reads it.
	keyRestart = "unique.oxide.restart"
	// keyReply is the reply to the request. The node plugin writes it, the controller reads it.
	keyReply = "unique.oxide.restart_reply"
	// keyDrain is the ID of the restart for which the node is ineligible. The controller writes and reads it.
	keyDrain = "unique.oxide.restart_drain"
	// keyReport is the last report. The controller writes it for operators.
	keyReport = "unique.oxide.restart_report"

	// driver is the plugin's name. Its ID in Nomad depends on the job, so the plugin is found by its name.
	driver = "csi.oxide.computer"
	// clientTimeout is how long a request waits for a client that may be down. A server forwards the request.
	clientTimeout = 5 * time.Second
)

func restartOperation(what string) nomad.Operation {
	return nomad.Operation{
		What:   what + " through",
		Wrong:  "the response is not from a Nomad agent",
		Policy: "the rules of deploy/nomad/policies/restart-controller.policy.hcl or restart-node.policy.hcl",
	}
}

// Restarts is the controller's half of planned restarts: a [orchestrator.RestartRequester] and a
// [orchestrator.Drainer]. With ACLs on it needs
//
//	plugin { policy = "read" }
//	node { policy = "write" }
//	namespace "*" { capabilities = ["read-job", "alloc-lifecycle"] } # only to drain
type Restarts struct {
	options options
	nodeCache
}

// NewRestarts makes the controller's half. It does no I/O.
func NewRestarts(o nomad.Options) *Restarts { return &Restarts{options: options{o}} }

// Request implements [orchestrator.RestartRequester].
func (r *Restarts) Request(ctx context.Context, instanceID, restartID string) error {
	node, err := r.nodeID(ctx, r.options, instanceID)
	if err != nil {
		return err
	}
	_, err = r.options.apply(ctx, "request a restart of "+node, node, keys{keyRestart: &restartID})
	return err
}

// Reply implements [orchestrator.RestartRequester]. If the client is down, the reply comes from the servers.
func (r *Restarts) Reply(ctx context.Context, instanceID, restartID string) (orchestrator.RestartReply, error) {
	_, meta, err := r.restartedNode(ctx, instanceID, restartID, r.options.readOrAskServers)
	if err != nil || meta[keyRestart] != restartID {
		return orchestrator.RestartReply{}, err
	}
	return orchestrator.ParseRestartReply(meta[keyReply], restartID), nil
}

// Withdraw implements [orchestrator.RestartRequester].
func (r *Restarts) Withdraw(ctx context.Context, instanceID, restartID string) (orchestrator.RestartReply, error) {
	node, meta, err := r.restartedNode(ctx, instanceID, restartID, r.options.readClient)
	if err != nil {
		return orchestrator.RestartReply{}, err
	}
	what := "withdraw the restart of " + node
	reply := orchestrator.ParseRestartReply(meta[keyReply], restartID)
	switch requested := meta[keyRestart]; {
	case requested != restartID && requested != "":
		return orchestrator.RestartReply{}, nil
	case requested == restartID && reply.State == orchestrator.RestartAccepted:
		return reply, nil
	case requested == restartID:
		if meta, err = r.options.apply(ctx, what, node, keys{keyRestart: nil}); err != nil {
			return orchestrator.RestartReply{}, err
		}
		reply = orchestrator.ParseRestartReply(meta[keyReply], restartID)
	}
	switch {
	case reply.State == orchestrator.RestartAccepted:
		// The node plugin accepted before the request was withdrawn, in this call or in an earlier call that did not
		// finish. Restore the request, because later replies are found by its ID.
		_, err = r.options.apply(ctx, what, node, keys{keyRestart: &restartID})
	case reply.State != orchestrator.RestartUnanswered:
		_, err = r.options.apply(ctx, what, node, keys{keyReply: nil})
	}
	if err != nil {
		return orchestrator.RestartReply{}, err
	}
	return reply, nil
}

// Forget implements [orchestrator.RestartRequester].
func (r *Restarts) Forget(ctx context.Context, instanceID, restartID string) error {
	node, meta, err := r.restartedNode(ctx, instanceID, restartID, r.options.readClient)
	if err != nil || meta[keyRestart] != restartID {
		return err
	}
	_, err = r.options.apply(ctx, "forget the restart of "+node, node, keys{keyRestart: nil, keyReply: nil})
	return err
}

// restartedNode is the node that was asked for a restart, with its metadata. read reads the metadata of the instance's
// node. If that node has neither the request nor a reply to it, restartedNode asks the servers for the node that has:
// another node may report the instance's ID since. The servers have an accepted reply before the guest stops.
func (r *Restarts) restartedNode(
	ctx context.Context,
	instanceID, restartID string,
	read func(ctx context.Context, node string) (map[string]string, error),
) (node string, meta map[string]string, err error) {
	if node, err = r.nodeID(ctx, r.options, instanceID); err != nil {
		return "", nil, err
	}
	if meta, err = read(ctx, node); err != nil || concerns(meta, restartID) {
		return node, meta, err
	}
	var all []struct{ ID string }
	if err := r.options.query(ctx, "look for restart "+restartID, "/v1/nodes", 0, &all, nil); err != nil {
		return "", nil, err
	}
	for _, other := range all {
		info, _, err := r.options.nodeInfo(ctx, other.ID, 0)
		if err != nil {
			return "", nil, err
		}
		if other.ID != node && concerns(info.Meta, restartID) {
			meta, err = r.options.readOrAskServers(ctx, other.ID)
			return other.ID, meta, err
		}
	}
	return node, meta, nil
}

// concerns reports whether a node's metadata has the request for a restart or a reply to it.
func concerns(meta map[string]string, restartID string) bool {
	return meta[keyRestart] == restartID ||
		orchestrator.ParseRestartReply(meta[keyReply], restartID).State != orchestrator.RestartUnanswered
}

// Report implements [orchestrator.RestartRequester]. Nomad has no events that a plugin can write. So the last report is
// written into the client's metadata, which "nomad node meta read" shows.
func (r *Restarts) Report(ctx context.Context, instanceID string, report orchestrator.Report) error {
	node, err := r.nodeID(ctx, r.options, instanceID)
	if err != nil {
		return err
	}
	text := time.Now().UTC().Format(time.RFC3339) + " " + report.Event.Reason + ": " + report.Message
	_, err = r.options.apply(ctx, "report about "+node, node, keys{keyReport: &text})
	return err
}

// Listener is the node's half of planned restarts: a [orchestrator.RestartListener]. With ACLs on it needs
//
//	plugin { policy = "read" }
//	node { policy = "write" }
type Listener struct {
	options    options
	instanceID string
	nodeCache
}

// NewListener makes the node's half. instanceID is the instance of the agent's client. It does no I/O.
func NewListener(o nomad.Options, instanceID string) *Listener {
	return &Listener{options: options{o}, instanceID: instanceID}
}

// ownNode stands for the client of the agent that gets the request.
const ownNode = ""

// Requested implements [orchestrator.RestartListener].
func (l *Listener) Requested(ctx context.Context) (string, orchestrator.RestartReply, error) {
	meta, err := l.options.read(ctx, "read whether a restart is requested", ownNode)
	if err != nil || meta[keyRestart] == "" {
		return "", orchestrator.RestartReply{}, err
	}
	return meta[keyRestart], orchestrator.ParseRestartReply(meta[keyReply], meta[keyRestart]), nil
}

// pollInterval is the time between two reads of the client's metadata. Nomad has no blocking query for it. The client
// answers from memory, without asking a server.
const pollInterval = 5 * time.Second

// Changes implements [orchestrator.RestartListener].
func (l *Listener) Changes(ctx context.Context) <-chan struct{} {
	changes := make(chan struct{}, 1)
	changes <- struct{}{}
	go func() {
		ticker := time.NewTicker(pollInterval)
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
				metadata.Signal(changes)
			case <-ctx.Done():
				return
			}
		}
	}()
	return changes
}

// Reply implements [orchestrator.RestartListener]. When it accepts, it waits until the servers have the reply, because
// the client stops with the guest.
func (l *Listener) Reply(ctx context.Context, restartID string, reply orchestrator.RestartReply) error {
	what := "reply to a restart"
	meta, err := l.options.read(ctx, what, ownNode)
	if err != nil {
		return err
	}
	if meta[keyRestart] != restartID {
		return notRequested(restartID)
	}
	text := reply.Text(restartID)
	if meta, err = l.options.apply(ctx, what, ownNode, keys{keyReply: &text}); err != nil {
		return err
	}
	if meta[keyRestart] != restartID {
		if _, err := l.options.apply(ctx, what, ownNode, keys{keyReply: nil}); err != nil {
			return err
		}
		return notRequested(restartID)
	}
	if reply.State != orchestrator.RestartAccepted {
		return nil
	}
	node, err := l.nodeID(ctx, l.options, l.instanceID)
	if err != nil {
		return err
	}
	return l.options.awaitServers(ctx, node, keyReply, text)
}

func notRequested(restartID string) error {
	return &metadata.Error{
		Kind: metadata.ErrNotReady,
		What: "no reply was written: restart " + restartID + " is not requested any more",
		Next: "no action is needed",
	}
}

// keys are values to write to a client's metadata. A nil value removes the key.
type keys map[string]*string

// apply changes a client's metadata in one step, and returns all of the metadata after that step.
func (o options) apply(ctx context.Context, what, node string, meta keys) (after map[string]string, err error) {
	err = o.Call(ctx, restartOperation(what), func(client *api.Client) error {
		answer, err := client.Nodes().
			Meta().
			Apply(&api.NodeMetaApplyRequest{NodeID: node, Meta: meta}, (&api.QueryOptions{}).WithContext(ctx))
		if err == nil {
			after = answer.Meta
		}
		return err
	})
	return after, err
}

// read reads a client's metadata from the client itself.
func (o options) read(ctx context.Context, what, node string) (meta map[string]string, err error) {
	err = o.Call(ctx, restartOperation(what), func(client *api.Client) error {
		answer, err := client.Nodes().Meta().Read(node, (&api.QueryOptions{}).WithContext(ctx))
		if err == nil {
			meta = answer.Meta
		}
		return err
	})
	return meta, err
}

// readClient is read of another client, with an error that names the client.
func (o options) readClient(ctx context.Context, node string) (map[string]string, error) {
	return o.read(ctx, "read the metadata of "+node, node)
}

// readOrAskServers reads a client's metadata from the client. If the client does not answer, it reads from the servers,
// which get changes some seconds later.
func (o options) readOrAskServers(ctx context.Context, node string) (map[string]string, error) {
	wait := clientTimeout
	if deadline, ok := ctx.Deadline(); ok {
		wait = min(wait, time.Until(deadline)/2) // the servers need time too
	}
	limited, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	meta, err := o.readClient(limited, node)
	if err == nil || ctx.Err() != nil {
		return meta, err
	}
	info, _, err := o.nodeInfo(ctx, node, 0)
	return info.Meta, err
}

// nodeInfo has the fields of a node that are read from the servers.
type nodeInfo struct {
	Meta                  map[string]string
	SchedulingEligibility string
}

// nodeInfo reads a node from the servers. It blocks until the node is newer than an index.
func (o options) nodeInfo(ctx context.Context, node string, after uint64) (info nodeInfo, index uint64, err error) {
	err = o.query(ctx, "look up node "+node, "/v1/node/"+url.PathEscape(node), after, &info, &index)
	return info, index, err
}

// awaitServers waits until the servers have this value in a client's metadata.
func (o options) awaitServers(ctx context.Context, node, key, value string) error {
	var after uint64
	for {
		info, index, err := o.nodeInfo(ctx, node, after)
		if err != nil || info.Meta[key] == value {
			return err
		}
		after = index
	}
}

// query reads an object from the servers. It blocks until the object is newer than an index. The types of package api
// are not used: they would link everything about a job.
func (o options) query(ctx context.Context, what, path string, after uint64, out any, index *uint64) error {
	return o.Call(ctx, restartOperation(what), func(client *api.Client) error {
		meta, err := client.Raw().Query(path, out, (&api.QueryOptions{WaitIndex: after}).WithContext(ctx))
		if err == nil && index != nil {
			*index = meta.LastIndex
		}
		return err
	})
}

// nodeCache finds Nomad nodes by their instances.
type nodeCache struct {
	mu sync.Mutex
	// lastSeen are the IDs of the nodes on which instances were last found, by instance ID.
	lastSeen map[string]string
}

// nodeID is the ID of an instance's node.
func (n *nodeCache) nodeID(ctx context.Context, o options, instanceID string) (string, error) {
	node, err := n.lookUpNodeID(ctx, o, instanceID)
	if err == nil && node == "" {
		return "", &metadata.Error{
			Kind: metadata.ErrNotReady,
			What: fmt.Sprintf("no Nomad node is instance %s: no node plugin of %s has this node ID", instanceID, driver),
			Next: "check that the node plugin runs there and is healthy: nomad plugin status",
		}
	}
	return node, err
}

// lookUpNodeID is the ID of an instance's node, or empty. The node plugin reports which instance it runs in. While that
// plugin is down, lookUpNodeID returns the node on which the instance was last seen.
//
// If the plugins of two nodes report the instance, it is not known which of them it is, and the error is a
// [metadata.ErrConflict].
func (n *nodeCache) lookUpNodeID(ctx context.Context, o options, instanceID string) (string, error) {
	healthy, others, err := o.searchNodeIDs(ctx, instanceID)
	if err != nil {
		return "", err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	last := n.lastSeen[instanceID]
	found := healthy
	if len(healthy) == 0 && last == "" {
		found = others
	}
	switch len(found) {
	case 0:
		return last, nil
	case 1:
		if n.lastSeen == nil {
			n.lastSeen = map[string]string{}
		}
		n.lastSeen[instanceID] = found[0]
		return found[0], nil
	}
	return "", &metadata.Error{
		Kind: metadata.ErrInvalid, Cause: metadata.ErrConflict,
		What: fmt.Sprintf("the plugins of the nodes %s report instance %s", orchestrator.Some(found), instanceID),
		Next: "correct the instance ID of the wrong one, or wait until Nomad forgets the node that is gone",
	}
}

// searchNodeIDs are the IDs of the nodes whose node plugin reports this instance. Nomad forgets the plugin of a client
// that is down, and keeps one that does not answer, as unhealthy.
func (o options) searchNodeIDs(ctx context.Context, instanceID string) (healthy, others []string, err error) {
	what := "look for instance " + instanceID
	var plugins []struct{ ID, Provider string }
	if err := o.query(ctx, what, "/v1/plugins?type=csi", 0, &plugins, nil); err != nil {
		return nil, nil, err
	}
	for _, p := range plugins {
		if p.Provider != driver {
			continue
		}
		var plugin pluginInfo
		if err := o.query(ctx, what, "/v1/plugin/csi/"+url.PathEscape(p.ID), 0, &plugin, nil); err != nil {
			return nil, nil, err
		}
		for node, found := range plugin.Nodes {
			switch {
			case found.NodeInfo.ID != instanceID:
			case found.Healthy:
				healthy = append(healthy, node)
			default:
				others = append(others, node)
			}
		}
	}
	// A client can have several plugins of this driver.
	slices.Sort(healthy)
	slices.Sort(others)
	return slices.Compact(healthy), slices.Compact(others), nil
}
