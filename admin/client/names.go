// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package client

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// named holds the IDs of the volumes or snapshots with a name. A name is valid in one cluster. On each rack at most one
// volume has it.
type named struct {
	kind, name, cluster string
	ids                 []string
	typed               map[string]string
}

// namesTimeout bounds the question for the names of instances in an error.
const namesTimeout = 2 * time.Second

// instanceIDs finds the instances that a text names by their IDs alone.
var instanceIDs = regexp.MustCompile(`\binstance [0-9a-f]{8}-[0-9a-f-]{27}\b`)

// InWords writes the names that the caller has given in the place of the IDs that they stand for. It asks the
// controller once for the names of other instances, and writes them beside their IDs.
func (c *Client) InWords(text string) string {
	for id, name := range c.typed {
		text = strings.NewReplacer(
			fmt.Sprintf("%q (%s)", name, id), strconv.Quote(name), name+" ("+id+")", name,
			"-"+id, "-"+id, // a name on the rack
			id, name,
		).Replace(text)
	}
	if c.volume == "" || !instanceIDs.MatchString(text) {
		return text
	}
	if c.names == nil {
		ctx, cancel := context.WithTimeout(context.Background(), namesTimeout)
		defer cancel()
		c.names = c.nodeNames(ctx, c.volume)
	}
	return withNodeNames(text, c.names)
}

// missing is the text for a name or an ID that nothing has.
func (n named) missing() string {
	if n.cluster == "" {
		return fmt.Sprintf("no %s has the ID %s", n.kind, n.name)
	}
	return fmt.Sprintf("cluster %q has no %s named %q", n.cluster, n.kind, n.name)
}

// id returns the only ID.
func (n named) id() (string, error) {
	switch len(n.ids) {
	case 0:
		return "", failed(codes.NotFound, "%s: check the name, or use the %s's ID", n.missing(), n.kind)
	case 1:
		n.typed[n.ids[0]] = n.name
		return n.ids[0], nil
	}
	return "", failed(codes.FailedPrecondition, "several racks have a %s named %q of cluster %q: use its ID, one of %s",
		n.kind, n.name, n.cluster, strings.Join(n.ids, ", "))
}

// find finds volumes or snapshots by an ID, which need not exist, or by a name. list returns those with the name.
func (c *Client) find(
	ctx context.Context,
	kind, text string,
	list func(ctx context.Context, cluster string) ([]string, error),
) (named, error) {
	if id, ok := diskname.ParseID(text); ok {
		return named{kind: kind, name: text, ids: []string{id}, typed: c.typed}, nil
	}
	cluster, err := c.cluster(ctx)
	if err != nil {
		return named{}, fmt.Errorf("%q is not a %s ID, and looking it up as a name failed: %w", text, kind, err)
	}
	ids, err := list(ctx, cluster)
	return named{kind: kind, name: text, cluster: cluster, ids: ids, typed: c.typed}, err
}

// cluster returns the controller's cluster ID, which the names of disks are made from.
func (c *Client) cluster(ctx context.Context) (string, error) {
	info, err := c.identity.GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
	if err != nil {
		return "", err
	}
	cluster := info.GetManifest()[rpc.ManifestClusterID]
	if cluster == "" {
		return "", failed(codes.Unimplemented,
			"the plugin at %s is no controller: name the socket of one with --controller-endpoint, or use an ID",
			c.opts.Controller)
	}
	return cluster, nil
}

// findVolumes finds the volumes with a name by the name of their disk, which is made from it.
func (c *Client) findVolumes(ctx context.Context, text string) (named, error) {
	found, err := c.find(ctx, "volume", text, func(ctx context.Context, cluster string) (ids []string, err error) {
		disk := diskname.ForVolume(cluster, text)
		for page, err := range c.volumePages(ctx) {
			if err != nil {
				return nil, err
			}
			for _, entry := range page.GetEntries() {
				if entry.GetVolume().GetVolumeContext()[rpc.KeyDiskName] == disk {
					ids = append(ids, entry.GetVolume().GetVolumeId())
				}
			}
		}
		return ids, nil
	})
	if len(found.ids) == 1 {
		c.volume = found.ids[0]
	}
	return found, err
}

// volumeID returns the ID of a volume from its ID or its name.
func (c *Client) volumeID(ctx context.Context, text string) (string, error) {
	found, err := c.findVolumes(ctx, text)
	if err != nil {
		return "", err
	}
	return found.id()
}

// findSnapshots finds the snapshots with a name by their name on the rack, which is made from it.
func (c *Client) findSnapshots(ctx context.Context, text string) (named, error) {
	return c.find(ctx, "snapshot", text, func(ctx context.Context, cluster string) (ids []string, err error) {
		snapshots, err := c.ListSnapshots(ctx, "")
		for _, snapshot := range snapshots {
			if snapshot.RackName == diskname.ForSnapshot(cluster, text) {
				ids = append(ids, snapshot.ID)
			}
		}
		return ids, err
	})
}

// snapshotID returns the ID of a snapshot from its ID or its name.
func (c *Client) snapshotID(ctx context.Context, text string) (string, error) {
	found, err := c.findSnapshots(ctx, text)
	if err != nil {
		return "", err
	}
	return found.id()
}

// nodeText is a node for an error of a volume: the name of its instance and its ID, or the ID alone if the controller
// tells no names.
func (c *Client) nodeText(ctx context.Context, volumeID, nodeID string) string {
	return NodeText(c.nodeNames(ctx, volumeID)[nodeID], nodeID)
}

// nodeNames returns the names of all instances by their IDs, as far as the controller tells them.
func (c *Client) nodeNames(ctx context.Context, volumeID string) map[string]string {
	asking, option, decode := ask(ctx, wantNames)
	_, _ = c.getVolume(asking, volumeID, option) // also an error's answer has the names
	answered, _ := decode()
	return answered.nodeNames
}

// NodeText is a node for people: the name of its instance and its ID, or the ID alone if the name is empty.
func NodeText(name, id string) string {
	if name == "" {
		return "node " + id
	}
	return "node " + name + " (" + id + ")"
}

// thisNode returns the ID of this node, which its node plugin knows.
func (c *Client) thisNode(ctx context.Context) (string, error) {
	info, err := c.node.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	return info.GetNodeId(), err
}

// usableName returns a name of this cluster, unless it has the form of an ID and so would be taken for one.
func usableName(name, cluster string) string {
	if _, isID := diskname.ParseID(name); isID || cluster != "" {
		return ""
	}
	return name
}

// nodeID returns the ID of a node from its ID or the name of its instance, or the ID of this node if none is given. It
// asks for names together with the volume. The controller answers the names also if the volume or its disk is missing.
func (c *Client) nodeID(ctx context.Context, volumeID, text string) (string, error) {
	if text == "" {
		node, err := c.thisNode(ctx)
		if err != nil {
			err = fmt.Errorf("%w; or name the node with --node", err)
		}
		return node, err
	}
	if id, ok := diskname.ParseID(text); ok {
		return id, nil
	}
	asking, option, decode := ask(ctx, wantNames)
	_, lookUp := c.getVolume(asking, volumeID, option)
	answered, err := decode()
	switch {
	case err != nil && lookUp != nil && !isNotFound(lookUp):
		return "", lookUp
	case err != nil:
		return "", err
	}
	var found []string
	for id, name := range answered.nodeNames {
		if name == text {
			found = append(found, id)
		}
	}
	switch len(found) {
	case 0:
		return "", failed(codes.NotFound,
			"no instance in the controller's projects is named %q: check the name, or use the instance's ID", text)
	case 1:
		c.typed[found[0]] = text
		return found[0], nil
	}
	slices.Sort(found)
	return "", failed(codes.FailedPrecondition, "several racks have an instance named %q: use its ID, one of %s", text,
		strings.Join(found, ", "))
}

// withNodeNames writes "node NAME (ID)" for each "instance ID" in a controller's text. The texts have only IDs, because
// records and metrics have them, too.
func withNodeNames(text string, names map[string]string) string {
	for id, name := range names {
		text = strings.ReplaceAll(text, "instance "+id, NodeText(name, id))
	}
	return text
}
