// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package nomad

import (
	"context"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/nomad/api"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// The word of a planned restart stands in the dynamic metadata of the Nomad client. A change of several keys is one step, whose
// answer is what all keys are after it: each half writes its own key first and learns by the answer what the other had written
// until then. So it is certain who was first, although nothing can be written on a condition.
//
// Keys that begin with "unique." do not count for the class of a node, by which the scheduler takes nodes together.
const (
	// keyRestart is the ID of the restart that the controller asks for. The node plugin reads it.
	keyRestart = "unique.oxide.restart"
	// keyReply is what the node plugin says to it. The controller reads it.
	keyReply = "unique.oxide.restart_reply"
	// keyDrain is the ID of the restart for which the controller has made the node ineligible, for itself to read.
	keyDrain = "unique.oxide.restart_drain"
	// keyReport is for operators.
	keyReport = "unique.oxide.restart_report"

	// driver is the plugin's name, by which it is found among others whatever ID its jobs give it.
	driver = "csi.oxide.computer"
	// clientTimeout is for how long a client is waited for that may be down. It is asked through a server.
	clientTimeout = 5 * time.Second
)

func restartOperation(what string) operation {
	return operation{
		what:   what + " by way of",
		wrong:  "the answer is not that of a Nomad agent",
		policy: "the rules of deploy/nomad/policies/restart-controller.policy.hcl or restart-node.policy.hcl",
	}
}

// Restarts is the controller's half of planned restarts: a [metadata.RestartRequester] and a [metadata.Drainer]. With ACLs on it needs
//
//	plugin { policy = "read" }
//	node { policy = "write" }
//	namespace "*" { capabilities = ["read-job", "alloc-lifecycle"] } # only to drain
type Restarts struct {
	options Options
	nodeCache
}

// NewRestarts makes the controller's half. It asks nothing yet.
func NewRestarts(options Options) *Restarts { return &Restarts{options: options} }

// Request implements [metadata.RestartRequester].
func (r *Restarts) Request(ctx context.Context, instanceID, restartID string) error {
	node, err := r.nodeID(ctx, r.options, instanceID)
	if err != nil {
		return err
	}
	_, err = r.options.apply(ctx, "ask for a restart of "+node, node, keys{keyRestart: &restartID})
	return err
}

// Reply implements [metadata.RestartRequester]. Of a client that is down it is what the servers know.
func (r *Restarts) Reply(ctx context.Context, instanceID, restartID string) (metadata.RestartReply, error) {
	node, err := r.nodeID(ctx, r.options, instanceID)
	if err != nil {
		return metadata.RestartReply{}, err
	}
	meta, err := r.options.readOrAskServers(ctx, node)
	if err != nil || meta[keyRestart] != restartID {
		return metadata.RestartReply{}, err
	}
	return metadata.ParseRestartReply(meta[keyReply], restartID), nil
}

// Withdraw implements [metadata.RestartRequester].
func (r *Restarts) Withdraw(ctx context.Context, instanceID, restartID string) (metadata.RestartReply, error) {
	node, err := r.nodeID(ctx, r.options, instanceID)
	if err != nil {
		return metadata.RestartReply{}, err
	}
	what := "withdraw the restart of " + node
	meta, err := r.options.read(ctx, what, node)
	if err != nil {
		return metadata.RestartReply{}, err
	}
	said := metadata.ParseRestartReply(meta[keyReply], restartID)
	switch asked := meta[keyRestart]; {
	case asked != restartID && asked != "":
		return metadata.RestartReply{}, nil
	case asked == restartID && said.State == metadata.RestartAccepted:
		return said, nil
	case asked == restartID:
		if meta, err = r.options.apply(ctx, what, node, keys{keyRestart: nil}); err != nil {
			return metadata.RestartReply{}, err
		}
		said = metadata.ParseRestartReply(meta[keyReply], restartID)
	}
	switch {
	case said.State == metadata.RestartAccepted:
		// It was first, here or in an earlier call that did not come to an end. What it does is looked for under its ID.
		_, err = r.options.apply(ctx, what, node, keys{keyRestart: &restartID})
	case said.State != metadata.RestartUnanswered:
		_, err = r.options.apply(ctx, what, node, keys{keyReply: nil})
	}
	if err != nil {
		return metadata.RestartReply{}, err
	}
	return said, nil
}

// Forget implements [metadata.RestartRequester].
func (r *Restarts) Forget(ctx context.Context, instanceID, restartID string) error {
	node, err := r.nodeID(ctx, r.options, instanceID)
	if err != nil {
		return err
	}
	what := "forget the restart of " + node
	meta, err := r.options.read(ctx, what, node)
	if err != nil || meta[keyRestart] != restartID {
		return err
	}
	_, err = r.options.apply(ctx, what, node, keys{keyRestart: nil, keyReply: nil})
	return err
}

// Report implements [metadata.RestartRequester]. Nomad has no events that others may write, so that the last report stands in the
// client's metadata: nomad node meta read.
func (r *Restarts) Report(ctx context.Context, instanceID string, report metadata.RestartReport) error {
	node, err := r.nodeID(ctx, r.options, instanceID)
	if err != nil {
		return err
	}
	text := time.Now().UTC().Format(time.RFC3339) + " " + report.Reason + ": " + report.Message
	_, err = r.options.apply(ctx, "report about "+node, node, keys{keyReport: &text})
	return err
}

// Listener is the node's half of planned restarts: a [metadata.RestartListener]. With ACLs on it needs
//
//	plugin { policy = "read" }
//	node { policy = "write" }
type Listener struct {
	options    Options
	instanceID string
	nodeCache
}

// NewListener makes the node's half, for the instance that the agent's client is. It asks nothing yet.
func NewListener(options Options, instanceID string) *Listener {
	return &Listener{options: options, instanceID: instanceID}
}

// ownNode is the client of the agent that is asked.
const ownNode = ""

// Requested implements [metadata.RestartListener].
func (l *Listener) Requested(ctx context.Context) (string, metadata.RestartReply, error) {
	meta, err := l.options.read(ctx, "look whether a restart is asked for", ownNode)
	if err != nil || meta[keyRestart] == "" {
		return "", metadata.RestartReply{}, err
	}
	return meta[keyRestart], metadata.ParseRestartReply(meta[keyReply], meta[keyRestart]), nil
}

// pollInterval lies between two looks at the client's metadata. Nomad has no blocking query for it: the client answers from
// memory, and no server is asked.
const pollInterval = 5 * time.Second

// Changes implements [metadata.RestartListener].
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

// Reply implements [metadata.RestartListener]. An acceptance is said once the servers know of it: with the guest the client goes
// down that keeps it.
func (l *Listener) Reply(ctx context.Context, restartID string, answer metadata.RestartReply) error {
	what := "answer to a restart"
	meta, err := l.options.read(ctx, what, ownNode)
	if err != nil {
		return err
	}
	if meta[keyRestart] != restartID {
		return notRequested(restartID)
	}
	text := answer.Text(restartID)
	if meta, err = l.options.apply(ctx, what, ownNode, keys{keyReply: &text}); err != nil {
		return err
	}
	if meta[keyRestart] != restartID {
		if _, err := l.options.apply(ctx, what, ownNode, keys{keyReply: nil}); err != nil {
			return err
		}
		return notRequested(restartID)
	}
	if answer.State != metadata.RestartAccepted {
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

// keys are to be written to a client's metadata; nil removes one.
type keys map[string]*string

// apply changes a client's metadata in one step, and returns all of it as it is then.
func (o Options) apply(ctx context.Context, what, node string, meta keys) (after map[string]string, err error) {
	err = o.call(ctx, restartOperation(what), func(client *api.Client) error {
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
func (o Options) read(ctx context.Context, what, node string) (meta map[string]string, err error) {
	err = o.call(ctx, restartOperation(what), func(client *api.Client) error {
		answer, err := client.Nodes().Meta().Read(node, (&api.QueryOptions{}).WithContext(ctx))
		if err == nil {
			meta = answer.Meta
		}
		return err
	})
	return meta, err
}

// readOrAskServers reads a client's metadata, from the servers where the client does not answer: they have it some seconds later.
func (o Options) readOrAskServers(ctx context.Context, node string) (map[string]string, error) {
	limited, cancel := context.WithTimeout(ctx, clientTimeout)
	defer cancel()
	meta, err := o.read(limited, "read the metadata of "+node, node)
	if err == nil || ctx.Err() != nil {
		return meta, err
	}
	info, _, err := o.nodeInfo(ctx, node, 0)
	return info.Meta, err
}

// nodeInfo is what is read of what the servers know of a node.
type nodeInfo struct {
	Meta                  map[string]string
	SchedulingEligibility string
}

// nodeInfo reads what the servers know of a node, once it is newer than an index.
func (o Options) nodeInfo(ctx context.Context, node string, after uint64) (info nodeInfo, index uint64, err error) {
	err = o.query(ctx, "look up node "+node, "/v1/node/"+url.PathEscape(node), after, &info, &index)
	return info, index, err
}

// awaitServers waits until the servers know a client's metadata to be this.
func (o Options) awaitServers(ctx context.Context, node, key, value string) error {
	var after uint64
	for {
		info, index, err := o.nodeInfo(ctx, node, after)
		if err != nil || info.Meta[key] == value {
			return err
		}
		after = index
	}
}

// query reads an object from the servers, once it is newer than an index. api's own types stay out: they would bring all of a job.
func (o Options) query(ctx context.Context, what, path string, after uint64, out any, index *uint64) error {
	return o.call(ctx, restartOperation(what), func(client *api.Client) error {
		meta, err := client.Raw().Query(path, out, (&api.QueryOptions{WaitIndex: after}).WithContext(ctx))
		if err == nil && index != nil {
			*index = meta.LastIndex
		}
		return err
	})
}

// nodeCache finds nodeCache by their instances.
type nodeCache struct {
	mu sync.Mutex
	// lastSeen are the nodes on which instances were last found.
	lastSeen map[string]string
}

// nodeID is the ID of the node that is an instance.
func (n *nodeCache) nodeID(ctx context.Context, o Options, instanceID string) (string, error) {
	node, err := n.lookUpNodeID(ctx, o, instanceID)
	if err == nil && node == "" {
		return "", &metadata.Error{
			Kind: metadata.ErrNotReady,
			What: fmt.Sprintf("no Nomad node is instance %s: no node plugin of %s calls itself so", instanceID, driver),
			Next: "check that the node plugin runs there and is healthy: nomad plugin status",
		}
	}
	return node, err
}

// lookUpNodeID is the ID of the node that is an instance, as the node plugin there says, or empty. While that plugin is not up, it is
// the node where it was last seen.
func (n *nodeCache) lookUpNodeID(ctx context.Context, o Options, instanceID string) (string, error) {
	node, err := o.searchNodeID(ctx, instanceID)
	if err != nil {
		return "", err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if node == "" {
		return n.lastSeen[instanceID], nil
	}
	if n.lastSeen == nil {
		n.lastSeen = map[string]string{}
	}
	n.lastSeen[instanceID] = node
	return node, nil
}

// searchNodeID is the ID of the node whose node plugin says that it is an instance, or empty.
func (o Options) searchNodeID(ctx context.Context, instanceID string) (string, error) {
	what := "look for instance " + instanceID
	var plugins []struct{ ID, Provider string }
	if err := o.query(ctx, what, "/v1/plugins?type=csi", 0, &plugins, nil); err != nil {
		return "", err
	}
	for _, p := range plugins {
		if p.Provider != driver {
			continue
		}
		var plugin struct {
			Nodes map[string]struct{ NodeInfo struct{ ID string } }
		}
		if err := o.query(ctx, what, "/v1/plugin/csi/"+url.PathEscape(p.ID), 0, &plugin, nil); err != nil {
			return "", err
		}
		for _, node := range slices.Sorted(maps.Keys(plugin.Nodes)) {
			if plugin.Nodes[node].NodeInfo.ID == instanceID {
				return node, nil
			}
		}
	}
	return "", nil
}
