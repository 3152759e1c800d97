// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubernetes

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata/kubernetes"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// pluginContainer is the plugin's container in the manifests and in the chart.
const pluginContainer = "oxide-plugin"

// pluginPod has the fields of a pod of the plugin that are read.
type pluginPod struct {
	object
	Spec struct {
		Containers []struct{ Name, Image string }
	}
	Status struct{ Conditions []condition }
}

// rank orders pods by how interesting their logs are.
func (p pluginPod) rank() int {
	rank := 0
	if p.Labels[componentLabel] != "controller" {
		rank = 2
	}
	for _, c := range p.Status.Conditions {
		if c.Type == "Ready" && c.Status == "True" {
			rank++
		}
	}
	return rank
}

// isPlugin reports whether the pod has the plugin's container. Other programs use the label too.
func (p pluginPod) isPlugin() bool {
	for _, c := range p.Spec.Containers {
		if c.Name == pluginContainer {
			return true
		}
	}
	return false
}

// componentLabel tells the pods of the controller from those of nodes.
const componentLabel = "app.kubernetes.io/component"

// Logs implements [orchestrator.LogReader]. It needs the verb "list" on "pods" and "get" on "pods/log".
func (o *Operator) Logs(ctx context.Context) ([]orchestrator.Log, error) {
	pods, err := o.pluginPods(ctx)
	if err != nil {
		return nil, err
	}
	slices.SortFunc(pods, func(a, b pluginPod) int {
		return cmp.Or(a.rank()-b.rank(), strings.Compare(a.key(), b.key()))
	})
	var logs []orchestrator.Log
	for _, p := range pods[:min(len(pods), orchestrator.MaxLogs)] {
		one := orchestrator.Log{Name: fmt.Sprintf("%s_%s_%s", p.Namespace, p.Name, pluginContainer)}
		one.Text, one.Err = o.log(ctx, p)
		logs = append(logs, one)
	}
	return logs, nil
}

// logLines are about as many lines as [orchestrator.MaxLogBytes] hold.
const logLines = 300

func (o *Operator) log(ctx context.Context, p pluginPod) (string, error) {
	r := kubernetes.Request{
		Method: http.MethodGet, Path: namespaced(p.Namespace, "pods") + "/" + url.PathEscape(p.Name) + "/log",
		Query:  url.Values{"container": {pluginContainer}, "tailLines": {strconv.Itoa(logLines)}},
		Accept: "*/*", What: "read the log of pod " + p.key(), Verb: "get", Resource: "pods/log",
	}
	body, _, err := o.Read(ctx, r)
	if err != nil {
		return "", err
	}
	text := string(body)
	if over := len(text) - orchestrator.MaxLogBytes; over > 0 {
		_, text, _ = strings.Cut(text[over:], "\n") // whole lines
	}
	return text, nil
}

var _ orchestrator.LogReader = (*Operator)(nil)
