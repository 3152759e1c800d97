// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubernetes

import (
	"encoding/json"
	"fmt"
	"net/http"

	"k8s.io/apimachinery/pkg/types"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata/kubernetes"
)

// client calls the API server as the metadata provider does.
type client struct{ *kubernetes.Client }

func newClient(options kubernetes.Options) client { return client{kubernetes.NewClient(options)} }

// watchNode makes a watch of the Node. The watch begins when it has a follower.
func (c client) watchNode() *kubernetes.Watch[node] {
	return &kubernetes.Watch[node]{Client: c.Client, Collection: kubernetes.Nodes, Resource: "nodes", Kind: "Node"}
}

const (
	csiNodes          = "/apis/storage.k8s.io/v1/csinodes"
	volumeAttachments = "/apis/storage.k8s.io/v1/volumeattachments"
)

// getCSINode is the request that reads a CSINode.
func getCSINode(name string) kubernetes.Request {
	return kubernetes.Request{
		Method: http.MethodGet, Path: csiNodes + "/" + name, What: fmt.Sprintf("get CSINode %q", name),
		Verb: "get", Resource: "csinodes",
	}
}

// patchNode is the request that changes a Node.
func patchNode(what, name string, patchType types.PatchType, patch any) kubernetes.Request {
	return kubernetes.Request{
		Method: http.MethodPatch, Path: kubernetes.Nodes + "/" + name, What: what, Verb: "patch", Resource: "nodes",
		Patch: patchType, In: patch,
	}
}

// post is the request that creates an object.
func post(what, path, resource string, in any) kubernetes.Request {
	return kubernetes.Request{Method: http.MethodPost, Path: path, What: what, Verb: "create", Resource: resource, In: in}
}

// object is the part that all objects have.
type object struct{ kubernetes.Object }

// node has the fields of a Node that are read.
type node struct {
	object
	Spec struct {
		ProviderID    string
		Unschedulable bool
		Taints        []taint
	}
	Status struct {
		Conditions []struct{ Type, Message string }
	}
}

// taint is a taint of a Node. It keeps the whole text, to write the taint back unchanged.
type taint struct {
	key  string
	text json.RawMessage
}

// UnmarshalJSON implements [json.Unmarshaler].
func (t *taint) UnmarshalJSON(text []byte) error {
	var read struct{ Key string }
	if err := json.Unmarshal(text, &read); err != nil {
		return err
	}
	*t = taint{key: read.Key, text: append(json.RawMessage(nil), text...)}
	return nil
}

// MarshalJSON implements [json.Marshaler].
func (t taint) MarshalJSON() ([]byte, error) { return t.text, nil }
