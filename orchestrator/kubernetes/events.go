// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubernetes

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata/kubernetes"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// Self publishes events of the pod in which the plugin runs. It is a [orchestrator.SelfReporter]. It needs this right
// in the pod's namespace:
//
//	rules: [{apiGroups: [""], resources: [events], verbs: [create, patch]}]
//
// The events are the pod's and not the Deployment's, because that needs no more rights: kubectl describe shows an event
// only if the event has the UID of its object. The pod's name and UID are in the token that Kubernetes gives to the
// pod; the UID of the Deployment would have to be read.
type Self struct{ client }

// NewSelf makes a reporter. It does no I/O, and needs no NodeName.
func NewSelf(options kubernetes.Options) *Self { return &Self{client: newClient(options)} }

// ReportSelf implements [orchestrator.SelfReporter]. Without the service account's files, or with a kubeconfig, the
// plugin has no pod that it knows.
func (s *Self) ReportSelf(ctx context.Context, report orchestrator.Report) error {
	if s.Options.Kubeconfig != "" {
		return nil
	}
	file := filepath.Join(s.Options.ServiceAccount, "token")
	token, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the token of this pod: %w", err)
	}
	pod, err := podOf(token)
	if err != nil {
		return fmt.Errorf("the token in %s %w: check that it is the one that Kubernetes projects into the pod", file, err)
	}
	return s.publish(ctx, pod, report)
}

// podOf returns the pod to which Kubernetes has bound a token: KEP-1205, claim "kubernetes.io". The signature is not
// checked: the API server does so when it gets the token, and a wrong pod is only a misplaced event.
func podOf(token []byte) (eventObject, error) {
	parts := bytes.Split(bytes.TrimSpace(token), []byte("."))
	if len(parts) != 3 {
		return eventObject{}, errors.New("is no JSON Web Token")
	}
	claims := struct {
		Kubernetes struct {
			Namespace string
			Pod       struct{ Name, UID string }
		} `json:"kubernetes.io"`
	}{}
	payload, err := base64.RawURLEncoding.DecodeString(string(parts[1]))
	if err != nil || json.Unmarshal(payload, &claims) != nil {
		return eventObject{}, errors.New("is no JSON Web Token") // the decoder's error may quote it
	}
	pod := eventObject{
		APIVersion: "v1", Kind: "Pod", Namespace: claims.Kubernetes.Namespace,
		Name: claims.Kubernetes.Pod.Name, UID: claims.Kubernetes.Pod.UID,
	}
	if pod.Namespace == "" || pod.Name == "" || pod.UID == "" {
		return eventObject{}, errors.New("names no pod")
	}
	return pod, nil
}

// eventObject is the object of an event.
type eventObject struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Namespace  string `json:"namespace,omitempty"`
	Name       string `json:"name"`
	// UID may be unknown. Then kubectl describe does not show the event.
	UID string `json:"uid,omitempty"`
}

// publish publishes an event of an object. A repetition is not another event: its name is made from what it says, and
// only the time of the existing event changes. The API server deletes an event an hour after the last change.
func (c client) publish(ctx context.Context, of eventObject, report orchestrator.Report) error {
	// Events of objects without a namespace are in namespace default.
	namespace := of.Namespace
	if namespace == "" {
		namespace = "default"
	}
	kind := "Normal"
	if report.Event.Problem {
		kind = "Warning"
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%s\x00%s\x00%s\x00%s\x00%s",
		of.Kind, of.Name, of.UID, report.Event.Reason, report.Message))
	name := fmt.Sprintf("%s.%x", driver, sum[:12])
	stamp := time.Now().UTC().Format(time.RFC3339)
	what := fmt.Sprintf("report about %s %s", of.Kind, of.Name)
	path := namespaced(namespace, "events")
	status, err := c.Do(ctx, post(what, path, "events", map[string]any{
		"apiVersion": "v1", "kind": "Event",
		"metadata":       map[string]any{"namespace": namespace, "name": name},
		"involvedObject": of,
		"type":           kind, "reason": report.Event.Reason, "message": report.Message,
		"source": map[string]any{"component": driver}, "reportingComponent": driver,
		"firstTimestamp": stamp, "lastTimestamp": stamp, "count": 1,
	}), nil, http.StatusConflict)
	if err != nil || status != http.StatusConflict {
		return err
	}
	_, err = c.Do(ctx, kubernetes.Request{
		Method: http.MethodPatch, Path: path + "/" + name, What: what, Verb: "patch", Resource: "events",
		Patch: types.MergePatchType, In: map[string]any{"lastTimestamp": stamp},
	}, nil, http.StatusNotFound) // 404: it was deleted just now
	return err
}
