// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubernetes

import (
	"context"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// sidecarVersions are the versions of the sidecars that the manifests name, by the container. Others are not tested
// (docs/reference/compatibility.md). A test compares them with the manifests.
var sidecarVersions = map[string]string{
	"csi-provisioner":       "v6.4.0",
	"csi-attacher":          "v4.13.0",
	"csi-resizer":           "v2.3.0",
	"csi-snapshotter":       "v8.7.0",
	"node-driver-registrar": "v2.16.0",
}

// pluginPods lists the pods of controllers and nodes.
func (c client) pluginPods(ctx context.Context) ([]pluginPod, error) {
	query := url.Values{"labelSelector": {componentLabel + " in (controller,node)"}}
	pods, err := listSelected[pluginPod](ctx, c, "/api/v1/pods", "pods", query)
	return slices.DeleteFunc(pods, func(p pluginPod) bool { return !p.isPlugin() }), err
}

// versions compares the sidecars with those that the manifests name, and the plugin's pods with each other.
func (e *examination) versions(ctx context.Context) {
	const looked = "versions"
	pods, err := e.pluginPods(ctx)
	if err != nil {
		e.unreadable(looked, err)
		return
	}
	if len(pods) == 0 {
		return // the node plugins and the sidecars are missing then, which has its own lines
	}
	plugins, others := map[string]bool{}, map[string]bool{}
	for _, p := range pods {
		for _, c := range p.Spec.Containers {
			version, isVersion := tag(c.Image)
			if c.Name == pluginContainer {
				plugins[version] = true
			}
			if want := sidecarVersions[c.Name]; want != "" && isVersion && version != want {
				others[fmt.Sprintf("%s %s, and not %s", c.Name, version, want)] = true
			}
		}
	}
	if len(others) > 0 {
		e.add(
			orchestrator.StatusWarning, looked,
			"not those that the plugin is tested with: "+orchestrator.Some(slices.Sorted(maps.Keys(others))),
			"apply the manifests or the chart of the plugin's own version: docs/reference/compatibility.md",
		)
	}
	e.add(orchestrator.StatusOK, looked, fmt.Sprintf("%d pods of the plugin, of image version %s", len(pods),
		strings.Join(slices.Sorted(maps.Keys(plugins)), " and ")), "")
}

// tag is the tag of an image. It returns false for a tag that is no version, as a mirror may give.
func tag(image string) (version string, isVersion bool) {
	image, _, _ = strings.Cut(image, "@")
	if at := strings.LastIndex(image, ":"); at > strings.LastIndex(image, "/") {
		version = image[at+1:]
	}
	return version, strings.HasPrefix(version, "v") && strings.Count(version, ".") == 2
}
