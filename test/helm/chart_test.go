// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build helm

package helm_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
)

const namespace = "oxide-csi"

// sets are the files of values in testdata.
var sets = []string{"racks", "everything", "guest", "auto", "buckets", "strings"}

func values(set string) string { return filepath.Join("testdata", set+".values.yaml") }

// TestKustomize checks that chart and manifests are equal.
func TestKustomize(t *testing.T) {
	kustomize := program(t, "kustomize", "helm")
	for _, tc := range []struct {
		name, folder string
		components   []string
		args         []string
	}{
		{"base", "base", nil, nil},
		{"with snapshots", ".", nil, []string{"--set=snapshots.enabled=true"}},
		{"registration", "base", []string{"registration"}, []string{"--set=node.registration=plugin"}},
		{"startup taint", "base", []string{"startup-taint"}, []string{"--set=node.startupTaint=csi.oxide.computer/agent-not-ready"}},
		{"await detach", "base", []string{"await-detach"}, []string{"--set=node.registration=plugin,node.awaitDetachSeconds=300"}},
		{"pod monitor", ".", []string{"pod-monitor"}, []string{"--set=snapshots.enabled=true,metrics.podMonitor.enabled=true"}},
		{"service monitor", ".", []string{"service-monitor"}, []string{"--set=snapshots.enabled=true,metrics.serviceMonitor.enabled=true"}},
		{"twelve disks", "base", []string{"twelve-disks"}, []string{"--set=maxDisks=12"}},
		{"capacity", "base", []string{"capacity"}, []string{"--set=csiDriver.storageCapacity=true"}},
		{"wait for the plugin", "base", []string{"wait-for-plugin"}, []string{"--set=csiDriver.preventPodSchedulingIfMissing=true"}},
		{"event about the token", "base", []string{"token-event"}, []string{"--set=controller.tokenEvent=true"}},
		{"planned restarts", "base", []string{"restart"}, []string{"--set=attachMode=restart"}},
		{"buckets", "base buckets", nil, []string{"--set=buckets.enabled=true"}},
		{"all of it", ".", []string{"startup-taint", "await-detach", "restart", "restart-drain", "capacity"}, []string{
			"--set=csiDriver.storageCapacity=true",
			"--set=snapshots.enabled=true,attachMode=restart,restartDrain=true,node.startupTaint=csi.oxide.computer/agent-not-ready,node.registration=plugin,node.awaitDetachSeconds=300"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			// kustomize adds a hash to the name of the COSI driver's file of stores, the chart an annotation to its pod.
			manifests := storesHash.ReplaceAll(
				run(t, kustomize, "build", overlay(t, tc.folder, tc.components)),
				[]byte("oxide-cosi"),
			)
			want := parse(t, manifests)
			// A release does not own its namespace.
			delete(want, "Namespace/"+namespace)
			got := parse(t, render(t, tc.args...))
			delete(got, "ConfigMap/"+namespace+"/oxide-csi-uninstall") // a hook, which only Helm has
			removeReleaseLabels(t, got)
			if pod, ok := lookup(got["Deployment/oxide-csi/oxide-cosi"], strings.Fields("spec template metadata")).(object); ok {
				if lookup(pod, []string{"annotations", "checksum/stores"}) == nil {
					t.Error("a change of the stores does not replace the COSI driver's pod")
				}
				delete(pod, "annotations")
			}
			// kustomize puts added items first. The order of these lists has no meaning.
			sortLists(t, want)
			sortLists(t, got)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("manifests (-) and chart (+):\n%s", diff)
			}
		})
	}
}

var storesHash = regexp.MustCompile(`oxide-cosi-[0-9a-z]{10}\b`)

// removeReleaseLabels checks that the chart's objects have the labels of their release, and removes them: manifests
// have no release.
func removeReleaseLabels(t *testing.T, objects map[string]object) {
	t.Helper()
	remove := func(labels object, key, want string) {
		if labels[key] != want {
			t.Errorf("the label %s is %v, want %q", key, labels[key], want)
		}
		delete(labels, key)
	}
	version, err := os.ReadFile("../../VERSION")
	must(t, err)
	pods := 0
	for _, o := range objects {
		labels := at[object](t, o, "metadata", "labels")
		remove(labels, "app.kubernetes.io/instance", "oxide-csi")
		remove(labels, "app.kubernetes.io/version", "v"+strings.TrimSpace(string(version)))
		remove(labels, "app.kubernetes.io/managed-by", "Helm")
		remove(labels, "helm.sh/chart", "oxide-csi-"+strings.TrimSpace(string(version)))
		if template, ok := lookup(o, []string{"spec", "template", "metadata", "labels"}).(object); ok {
			remove(template, "app.kubernetes.io/instance", "oxide-csi")
			pods++
		}
	}
	if pods < 2 {
		t.Errorf("%d objects make pods, want at least the controller's and the node's", pods)
	}
}

// TestKustomizeNamespace checks that both ways to another namespace are equal. A namespace of Kustomize does not reach
// into texts, such as the expressions of policies; one of Helm does. So no text may name the plugin's namespace.
func TestKustomizeNamespace(t *testing.T) {
	const other = "storage"
	inner, dir := overlay(t, ".", []string{"startup-taint", "restart"}), t.TempDir()
	relative, err := filepath.Rel(dir, inner)
	must(t, err)
	text := fmt.Sprintf("namespace: %s\nresources: [%s]\n", other, relative)
	must(t, os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(text), 0o600))
	want := parse(t, run(t, program(t, "kustomize", "helm"), "build", dir))
	delete(want, "Namespace/"+other)
	// kustomize does not know that these kinds have no namespace. The API server drops it: see test/identity.
	for _, kind := range []string{"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding", "VolumeSnapshotClass"} {
		for key, o := range want {
			if name, is := strings.CutPrefix(key, kind+"/"+other+"/"); is {
				delete(o["metadata"].(object), "namespace")
				delete(want, key)
				want[kind+"/"+name] = o
			}
		}
	}
	got := parse(t, render(t, "--namespace="+other,
		"--set=snapshots.enabled=true,attachMode=restart,node.startupTaint=csi.oxide.computer/agent-not-ready"))
	removeReleaseLabels(t, got)
	sortLists(t, want)
	sortLists(t, got)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("manifests (-) and chart (+):\n%s", diff)
	}
}

// overlay returns a folder with a kustomization of some of the manifests' folders, separated by spaces, and components.
func overlay(t *testing.T, folder string, components []string) string {
	t.Helper()
	dir := t.TempDir()
	root, err := filepath.Abs(manifests)
	must(t, err)
	relative := func(name string) string {
		path, err := filepath.Rel(dir, filepath.Join(root, name))
		must(t, err)
		return path
	}
	text := "resources:\n"
	for _, resource := range strings.Fields(folder) {
		text += "  - " + relative(resource) + "\n"
	}
	text += "components:\n"
	for _, component := range components {
		text += "  - " + relative(component) + "\n"
	}
	must(t, os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(text), 0o600))
	return dir
}

// sortLists sorts containers, their variables and mounts, and volumes by name, and rules by their text.
func sortLists(t *testing.T, objects map[string]object) {
	byName := func(list any) []any {
		items, _ := list.([]any)
		slices.SortFunc(
			items,
			func(a, b any) int { return strings.Compare(at[string](t, a, "name"), at[string](t, b, "name")) },
		)
		return items
	}
	for name, o := range objects {
		if kind, _, _ := strings.Cut(name, "/"); kind != "Deployment" && kind != "DaemonSet" && kind != "StatefulSet" {
			continue
		}
		spec := at[object](t, o, "spec", "template", "spec")
		byName(spec["volumes"])
		for _, container := range byName(spec["containers"]) {
			for _, list := range []string{"env", "volumeMounts"} {
				byName(container.(object)[list])
			}
		}
	}
	for name, o := range objects {
		if strings.HasPrefix(name, "ClusterRole/") {
			slices.SortFunc(
				at[[]any](t, o, "rules"),
				func(a, b any) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) },
			)
		}
	}
}

// TestGolden compares the whole chart with golden files for the smallest and the largest set of values. TestKustomize
// compares the defaults with the manifests. Run it with -update to rewrite testdata.
func TestGolden(t *testing.T) {
	for _, set := range []string{"guest", "everything"} {
		t.Run(set, func(t *testing.T) {
			got := render(t, "--values="+values(set))
			file := filepath.Join("testdata", set+".golden.yaml")
			if *update {
				must(t, os.WriteFile(file, got, 0o644))
			}
			want, err := os.ReadFile(file)
			must(t, err)
			if diff := cmp.Diff(string(want), string(got)); diff != "" {
				t.Errorf("%s (-) and the rendered chart (+):\n%s", file, diff)
			}
		})
	}
}

const (
	controllerPods = "Deployment/oxide-csi/oxide-csi-controller"
	nodePods       = "DaemonSet/oxide-csi/oxide-csi-node"
)

// TestValues checks what the values of the other sets add to the chart, and what they leave out.
func TestValues(t *testing.T) {
	list := func(items ...any) []any { return items }
	rule := func(group, resource string, verbs ...any) object {
		return object{"apiGroups": list(group), "resources": list(resource), "verbs": verbs}
	}
	tokenOf := func(secret, rack string) object {
		return object{"secret": object{"name": secret, "items": list(object{"key": "token", "path": rack})}}
	}
	rendered := map[string]map[string]object{"auto alone": parse(t, render(t, "--set=node.identity=auto"))}
	for _, set := range []string{"racks", "auto", "strings"} {
		rendered[set] = parse(t, render(t, "--values="+values(set)))
	}
	const pod, plugin, hook = "spec template spec ", "spec template spec containers oxide-plugin ", "lifecycle preStop exec command"
	for _, tc := range []struct {
		set, object, path string
		want              any // nil: the path does not exist
	}{
		// The racks are in a configuration file. Only the controller has their tokens.
		{"racks", "ConfigMap/oxide-csi/oxide-csi", "data config.yaml", `racks:
- name: "east"
  host: "https://silo.sys.east.example.com"
  project: "kubernetes"
  tokenFile: "/etc/oxide-csi/token/east"
- name: "west"
  host: "https://silo.sys.west.example.com"
  project: "kubernetes"
  tokenFile: "/etc/oxide-csi/token/west"
  caFile: "/etc/oxide-csi/config/west.pem"
`},
		{"racks", "ConfigMap/oxide-csi/oxide-csi", "data east.pem", nil},
		{"racks", controllerPods, plugin + "env OXIDE_CSI_CONFIG value", "/etc/oxide-csi/config/config.yaml"},
		{"racks", controllerPods, plugin + "env OXIDE_HOST", nil},
		{"racks", controllerPods, plugin + "env OXIDE_PROJECT", nil},
		{"racks", controllerPods, plugin + "env OXIDE_TOKEN_FILE", nil},
		{"racks", controllerPods, plugin + "env OXIDE_CSI_CLUSTER_ID value", "prod-1"},
		{"racks", controllerPods, plugin + "volumeMounts config mountPath", "/etc/oxide-csi/config"},
		{"racks", controllerPods, plugin + "volumeMounts token mountPath", "/etc/oxide-csi/token"},
		{"racks", controllerPods, plugin + "volumeMounts kubernetes", nil},
		{"racks", controllerPods, pod + "volumes config configMap name", "oxide-csi"},
		{"racks", controllerPods, pod + "volumes token projected sources",
			list(tokenOf("oxide-east", "east"), tokenOf("oxide-west", "west"))},
		{"racks", nodePods, plugin + "env OXIDE_CSI_CONFIG value", "/etc/oxide-csi/config/config.yaml"},
		{"racks", nodePods, plugin + "volumeMounts token", nil},
		{"racks", nodePods, pod + "volumes token", nil},
		{"racks", nodePods, pod + "volumes config configMap name", "oxide-csi"},
		// Nodes read their rack from a label that the values choose.
		{"racks", nodePods, pod + "initContainers metadata env OXIDE_CSI_CONFIG value", "/etc/oxide-csi/config/config.yaml"},
		{"racks", nodePods, pod + "initContainers metadata env OXIDE_CSI_RACK_LABEL value", "topology.kubernetes.io/zone"},
		{"racks", nodePods, pod + "initContainers metadata volumeMounts config mountPath", "/etc/oxide-csi/config"},
		{"racks", nodePods, pod + "initContainers metadata volumeMounts kubernetes readOnly", true},
		{"racks", nodePods, pod + "volumes metadata emptyDir", object{}},
		{"racks", nodePods, plugin + "volumeMounts kubernetes", nil},
		{"racks", nodePods, pod + "containers node-driver-registrar args --csi-address", "/csi/csi.sock"},
		{"racks", "ClusterRole/oxide-csi-node", "rules", list(rule("", "nodes", "get", "list", "watch"))},
		{"racks", "StorageClass/oxide-disk", "metadata annotations storageclass.kubernetes.io/is-default-class", "true"},
		{"racks", "StorageClass/oxide-disk", "parameters csi.storage.k8s.io/fstype", "ext4"},
		{"racks", "StorageClass/oxide-disk", "allowedTopologies", nil},
		{"racks", "StorageClass/oxide-disk-east", "metadata annotations", nil},
		{"racks", "StorageClass/oxide-disk-east", "parameters csi.storage.k8s.io/fstype", "xfs"},
		{"racks", "StorageClass/oxide-disk-east", "parameters encryption", "luks2"},
		{"racks", "StorageClass/oxide-disk-east", "parameters csi.storage.k8s.io/node-stage-secret-name", "${pvc.name}-luks"},
		{"racks", "StorageClass/oxide-disk-east", "allowedTopologies", list(object{"matchLabelExpressions": list(
			object{"key": "topology.csi.oxide.computer/rack", "values": list("east")})})},
		{"racks", "Service/oxide-csi/oxide-csi-node", "", nil},
		{"racks", "ServiceMonitor/oxide-csi/oxide-csi-node", "", nil},
		{"racks", "ValidatingAdmissionPolicy/oxide-csi-node", "", nil},

		// The plugin itself asks Kubernetes, so it has the token and the settings of the init container.
		{"auto", nodePods, pod + "initContainers", nil},
		{"auto", nodePods, pod + "volumes metadata", nil},
		{"auto", nodePods, plugin + "args --metadata", "auto"},
		{"auto", nodePods, plugin + "env OXIDE_CSI_CONFIG value", "/etc/oxide-csi/config/config.yaml"},
		{"auto", nodePods, plugin + "env OXIDE_CSI_NODE_NAME valueFrom fieldRef fieldPath", "spec.nodeName"},
		{"auto", nodePods, plugin + "env OXIDE_CSI_RACK_LABEL", nil},
		{"auto", nodePods, plugin + "volumeMounts kubernetes readOnly", true},
		{"auto alone", nodePods, plugin + "volumeMounts kubernetes readOnly", true},
		{"auto alone", nodePods, pod + "volumes kubernetes projected defaultMode", 0o444},
		{"auto alone", nodePods, plugin + "env OXIDE_CSI_STARTUP_TAINT", nil},
		// The plugin registers itself, so there is no sidecar for that.
		{"auto", nodePods, pod + "containers node-driver-registrar", nil},
		{"auto", nodePods, plugin + "env OXIDE_CSI_KUBELET_REGISTRATION_DIR value", "/var/lib/kubelet/plugins_registry"},
		{"auto", nodePods, plugin + "env CSI_ENDPOINT value",
			"unix:///var/lib/kubelet/plugins/csi.oxide.computer/csi.sock"},
		{"auto", nodePods, pod + "volumes registration-dir", nil},
		// Removing the taint and waiting for the last detach each need a right. The wait also needs its duration.
		{"auto", nodePods, plugin + "env OXIDE_CSI_STARTUP_TAINT value", "csi.oxide.computer/agent-not-ready"},
		{"auto", nodePods, plugin + hook, list("/oxide-csi", "await-detach", "--timeout=120s")},
		{"auto", nodePods, pod + "terminationGracePeriodSeconds", 750},
		{"auto", "ClusterRole/oxide-csi-node", "rules", list(rule("", "nodes", "get", "list", "watch"), rule("", "nodes", "patch"),
			rule("storage.k8s.io", "csinodes", "get", "list", "watch"), rule("storage.k8s.io", "volumeattachments", "list"))},
		{"auto", "ValidatingAdmissionPolicyBinding/oxide-csi-node", "spec policyName", "oxide-csi-node"},
		{"auto", "ValidatingAdmissionPolicyBinding/oxide-csi-node", "spec validationActions", list("Deny")},
		// A list with a single rack uses the configuration file too.
		{"auto", controllerPods, plugin + "env OXIDE_CSI_CONFIG value", "/etc/oxide-csi/config/config.yaml"},
		{"auto", controllerPods, pod + "volumes token projected sources", list(tokenOf("oxide-only", "only"))},
		{"auto", "Service/oxide-csi/oxide-csi-controller", "spec ports attacher port", 9810},
		{"auto", "ServiceMonitor/oxide-csi/oxide-csi-node", "spec endpoints 0", object{"port": "http", "interval": "30s"}},
		{"auto", "ServiceMonitor/oxide-csi/oxide-csi-controller", "spec endpoints 2 port", "attacher"},
		// A key that the chart has, too, is there once.
		{"strings", controllerPods, "spec template metadata annotations kubectl.kubernetes.io/default-container", "csi-attacher"},
		{"strings", "PodMonitor/oxide-csi/oxide-csi-node", "metadata labels 1", "true"},
	} {
		t.Run(tc.set+" "+tc.object+" "+tc.path, func(t *testing.T) {
			got := lookup(rendered[tc.set][tc.object], strings.Fields(tc.path))
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("want (-), got (+):\n%s", diff)
			}
		})
	}
}

// lookup returns the value at a path in an object, or nil. A path finds an item of a list by its name or index, and
// the value of a flag in a list of arguments by the flag.
func lookup(value any, path []string) any {
	if o, ok := value.(object); ok && o == nil { // the object does not exist
		return nil
	}
	if len(path) == 0 {
		return value
	}
	switch value := value.(type) {
	case object:
		return lookup(value[path[0]], path[1:])
	case []any:
		for i, item := range value {
			if o, ok := item.(object); strconv.Itoa(i) == path[0] || ok && o["name"] == path[0] {
				return lookup(item, path[1:])
			}
			if arg, ok := item.(string); ok && strings.HasPrefix(arg, path[0]+"=") {
				return lookup(arg[len(path[0])+1:], path[1:])
			}
		}
	}
	return nil
}

// TestChangedRacksRestartPods: the plugin reads its configuration file only at start, so a change must replace the
// pods.
func TestChangedRacksRestartPods(t *testing.T) {
	checksum := func(key string, args ...string) any {
		o := parse(t, render(t, append(args, "--values="+values("racks"))...))[key]
		return lookup(o, strings.Fields("spec template metadata annotations checksum/config"))
	}
	for _, key := range []string{controllerPods, nodePods} {
		before := checksum(key)
		if before == nil || before != checksum(key) {
			t.Errorf("%s: the checksum of the same racks is %v, then %v", key, before, checksum(key))
		}
		for _, change := range []string{"racks[0].host=https://other.example.com", "racks[1].ca=-----BEGIN CERTIFICATE-----"} {
			if after := checksum(key, "--set="+change); after == nil || after == before {
				t.Errorf("%s: the checksum is %v both before and after %s", key, after, change)
			}
		}
	}
}

// TestPluginUnderstands parses the settings of the rendered containers with the plugin's own configuration code.
func TestPluginUnderstands(t *testing.T) {
	type want struct {
		racks        []string
		nodeMetadata string
		maxDisks     int
		// kubeletSocket is the socket for registration by the plugin. It is empty with the sidecar.
		kubeletSocket string
		taint         string
	}
	for _, tc := range []struct {
		name string
		args []string
		want want
	}{
		{"defaults", nil, want{[]string{"default"}, config.MetadataStatic, 8, "", ""}},
		{"racks", []string{"--values=" + values("racks")}, want{[]string{"east", "west"}, config.MetadataStatic, 12, "", ""}},
		{"everything", []string{"--values=" + values("everything")}, want{[]string{"default"}, config.MetadataStatic, 12, "", ""}},
		{"guest", []string{"--values=" + values("guest")}, want{[]string{"default"}, config.MetadataGuest, 8, "", ""}},
		{"planned restarts", []string{"--set=attachMode=restart"}, want{[]string{"default"}, config.MetadataStatic, 8, "", ""}},
		{"planned restarts of emptied nodes", []string{"--set=attachMode=restart,restartDrain=true"}, want{[]string{"default"}, config.MetadataStatic, 8, "", ""}},
		{"auto", []string{"--values=" + values("auto")}, want{[]string{"only"}, config.MetadataAuto, 8, "/var/lib/kubelet/plugins_registry/csi.oxide.computer-reg.sock", "csi.oxide.computer/agent-not-ready"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			objects := parse(t, render(t, tc.args...))
			controller := load(t, objects, controllerPods, "containers", config.Flags, config.Load)
			node := load(t, objects, nodePods, "containers", config.Flags, config.Load)
			wantCommands(t, objects, tc.want.racks)
			got := want{rackNames(controller.RackList()), node.Metadata, node.MaxDisks, node.KubeletSocket(), node.StartupTaint}
			if diff := cmp.Diff(tc.want, got, cmp.AllowUnexported(want{})); diff != "" {
				t.Errorf("want (-), got (+):\n%s", diff)
			}
			if controller.MaxDisks != node.MaxDisks {
				t.Errorf(
					"the controller attaches %d disks to an instance, and the node reports %d",
					controller.MaxDisks,
					node.MaxDisks,
				)
			}
			if controller.Mode != config.ModeController || node.Mode != config.ModeNode {
				t.Errorf("modes are %s and %s", controller.Mode, node.Mode)
			}
			if tc.want.nodeMetadata == config.MetadataStatic {
				load(t, objects, nodePods, "initContainers", identityFlags, config.LoadIdentity)
			}
		})
	}
}

// TestSeveralRacks follows the head of deploy/k8s/several-racks. Its nodes know the racks too: otherwise one without a
// label would join a rack named default for good.
func TestSeveralRacks(t *testing.T) {
	const folder = "../../deploy/k8s/several-racks"
	text, err := os.ReadFile(folder + "/kustomization.yaml")
	must(t, err)
	list := regexp.MustCompile(`(?m)^#   ((?:racks:|  - ).*)$`).FindAllSubmatch(text, -1)
	var racks strings.Builder
	for _, line := range list {
		fmt.Fprintf(&racks, "%s\n", line[1])
	}
	objects := parse(t, run(t, program(t, "kustomize", "helm"), "build", folder))
	objects["ConfigMap/oxide-csi/oxide-racks"] = object{"data": object{"racks.yaml": racks.String()}}
	objects["Secret/oxide-csi/oxide-secret"] = object{
		"stringData": object{"north": "oxide-token-1", "south": "oxide-token-2"},
	}
	want := []string{"north", "south"}
	for name, cfg := range map[string]config.Config{
		"controller": load(t, objects, controllerPods, "containers", config.Flags, config.Load),
		"node":       load(t, objects, nodePods, "containers", config.Flags, config.Load),
		"identity":   load(t, objects, nodePods, "initContainers", identityFlags, config.LoadIdentity),
	} {
		if got := rackNames(cfg.Racks); !slices.Equal(got, want) {
			t.Errorf("the racks of the %s are %q", name, got)
		}
	}
	wantCommands(t, objects, want)
}

func rackNames(racks []config.Rack) (names []string) {
	for _, rack := range racks {
		names = append(names, rack.Name)
	}
	return names
}

// wantCommands checks what an operator's commands know in the plugin's containers: nothing has to be set there.
func wantCommands(t *testing.T, objects map[string]object, racks []string) {
	t.Helper()
	for key, mode := range map[string]config.Mode{controllerPods: config.ModeController, nodePods: config.ModeNode} {
		_, environ := process(t, objects, key, "containers")
		cfg := parsed(t, key, nil, environ, config.OperatorFlags, config.LoadOperator)
		if cfg.Mode != mode {
			t.Errorf("commands in %s have the mode %q", key, cfg.Mode)
		}
		if got := rackNames(cfg.RackList()); mode.Controller() && !slices.Equal(got, racks) {
			t.Errorf("commands in %s know the racks %q, want %q", key, got, racks)
		}
	}
}

// identityFlags are the flags of oxide-csi metadata.
func identityFlags(fs *pflag.FlagSet) {
	config.IdentityFlags(fs)
	for _, name := range []string{"provider", "output", "timeout"} {
		fs.String(name, "", "")
	}
}

// load reads the settings of a pod's first container of this kind as the plugin does, with the files mounted there.
func load(
	t *testing.T,
	objects map[string]object,
	key, kind string,
	add func(*pflag.FlagSet),
	read func(*pflag.FlagSet, []string) (config.Config, []string, error),
) config.Config {
	t.Helper()
	args, environ := process(t, objects, key, kind)
	return parsed(t, key, args, environ, add, read)
}

// process returns the arguments and the environment of the plugin in a pod's first container of this kind. It makes the
// files that are mounted there.
func process(t *testing.T, objects map[string]object, key, kind string) (args, environ []string) {
	t.Helper()
	spec := at[object](t, objects[key], "spec", "template", "spec")
	container := at[[]any](t, spec, kind)[0].(object)
	root := t.TempDir()
	mount(t, root, objects, spec, container)

	environ = []string{"KUBERNETES_SERVICE_HOST=10.96.0.1"} // as in every pod
	for _, v := range at[[]any](t, container, "env") {
		name, value := v.(object)["name"].(string), "https://rack.example.com"
		switch literal := v.(object)["value"].(type) {
		case string:
			value = literal
		default:
			if name != "OXIDE_HOST" {
				value = "from-elsewhere"
			}
		}
		environ = append(environ, name+"="+strings.ReplaceAll(value, "/etc/oxide-", root+"/etc/oxide-"))
	}
	for _, a := range at[[]any](t, container, "args") {
		arg := strings.ReplaceAll(a.(string), "$(CSI_ENDPOINT)", "unix:///csi/csi.sock")
		if arg != "metadata" {
			args = append(args, strings.ReplaceAll(arg, "=/etc/oxide-csi", "="+root+"/etc/oxide-csi"))
		}
	}
	return args, environ
}

// parsed reads settings as the plugin does.
func parsed(
	t *testing.T,
	key string,
	args, environ []string,
	add func(*pflag.FlagSet),
	read func(*pflag.FlagSet, []string) (config.Config, []string, error),
) config.Config {
	t.Helper()
	fs := pflag.NewFlagSet(key, pflag.ContinueOnError)
	add(fs)
	must(t, fs.Parse(args))
	cfg, warnings, err := read(fs, environ)
	if err != nil || len(warnings) > 0 {
		t.Fatalf("%s: %v, warnings %q", key, err, warnings)
	}
	return cfg
}

// mount writes the files that a container sees of ConfigMaps and Secrets below /etc, under a root.
func mount(t *testing.T, root string, objects map[string]object, spec, container object) {
	t.Helper()
	for _, m := range at[[]any](t, container, "volumeMounts") {
		name, path := m.(object)["name"].(string), m.(object)["mountPath"].(string)
		if !strings.HasPrefix(path, "/etc/") {
			continue
		}
		files := map[string]string{}
		for _, v := range at[[]any](t, spec, "volumes") {
			v := v.(object)
			switch {
			case v["name"] != name:
			case v["configMap"] != nil:
				for file, text := range at[object](t, objects["ConfigMap/oxide-csi/"+at[string](t, v, "configMap", "name")], "data") {
					files[file] = strings.ReplaceAll(text.(string), "/etc/oxide-csi", root+"/etc/oxide-csi")
				}
			case lookup(v, []string{"secret", "items"}) == nil && v["secret"] != nil:
				for file, text := range at[object](t, objects["Secret/oxide-csi/"+at[string](t, v, "secret", "secretName")], "stringData") {
					files[file] = text.(string)
				}
			case v["secret"] != nil:
				secret(t, v, files)
			default:
				for _, source := range at[[]any](t, v, "projected", "sources") {
					secret(t, source.(object), files)
				}
			}
		}
		if len(files) == 0 {
			t.Fatalf("nothing is mounted at %s", path)
		}
		must(t, os.MkdirAll(root+path, 0o700))
		for file, text := range files {
			must(t, os.WriteFile(filepath.Join(root+path, file), []byte(text), 0o600))
		}
	}
}

// secret adds the files that a volume makes of a Secret.
func secret(t *testing.T, source object, files map[string]string) {
	t.Helper()
	for _, item := range at[[]any](t, source, "secret", "items") {
		files[item.(object)["path"].(string)] = "oxide-token-of-a-test"
	}
}

// TestHungPluginIsRestarted checks how long a plugin that does not answer is left alone. It is killed without an answer
// to its signal, so the time to end counts too.
func TestHungPluginIsRestarted(t *testing.T) {
	objects := parse(t, render(t, "--values="+values("everything")))
	for _, pods := range []string{controllerPods, nodePods} {
		probe := lookup(objects[pods], strings.Fields("spec template spec containers oxide-plugin livenessProbe"))
		if got := at[string](t, probe, "httpGet", "path"); got != "/livez" {
			t.Errorf("%s: liveness asks %s", pods, got)
		}
		number := func(key string) int { return at[int](t, probe, key) }
		// The plugin hangs right after it answered a probe.
		most := number("periodSeconds")*number("failureThreshold") + number("timeoutSeconds") +
			number("terminationGracePeriodSeconds")
		if most > 120 {
			t.Errorf("%s: a plugin that hangs is restarted after up to %d s", pods, most)
		}
		if number("failureThreshold") < 3 {
			t.Errorf("%s: a busy node has its plugin restarted", pods)
		}
	}
}

// TestConfined checks that containers have no privileges and a read-only root. The node plugin alone is privileged: it
// mounts filesystems for other pods.
func TestConfined(t *testing.T) {
	objects := parse(t, render(t, "--values="+values("everything")))
	confined := object{
		"allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "capabilities": object{"drop": []any{"ALL"}},
	}
	found := 0
	for _, pods := range []string{controllerPods, nodePods} {
		spec := at[object](t, objects[pods], "spec", "template", "spec")
		if got := lookup(spec, []string{"securityContext", "seccompProfile", "type"}); got != "RuntimeDefault" {
			t.Errorf("%s: the seccomp profile is %v", pods, got)
		}
		initContainers, _ := spec["initContainers"].([]any)
		for _, container := range slices.Concat(initContainers, at[[]any](t, spec, "containers")) {
			found++
			name, context := pods+" "+at[string](t, container, "name"), at[object](t, container, "securityContext")
			if pods == nodePods && at[string](t, container, "name") == "oxide-plugin" {
				if context["privileged"] != true || context["readOnlyRootFilesystem"] != true {
					t.Errorf("%s: %v", name, context)
				}
				if limit := lookup(container, []string{"resources", "limits"}); limit != nil {
					t.Errorf("%s: a check of a filesystem may be killed: %v", name, limit)
				}
				continue
			}
			for key, want := range confined {
				if diff := cmp.Diff(want, context[key]); diff != "" {
					t.Errorf("%s: %s: %s", name, key, diff)
				}
			}
			root := context["runAsUser"] == 0
			nonRoot := context["runAsNonRoot"] == true || lookup(spec, []string{"securityContext", "runAsNonRoot"}) == true
			// The registrar's and kubelet's sockets belong to root.
			wantRoot := at[string](t, container, "name") == "node-driver-registrar"
			if root != wantRoot || nonRoot == wantRoot {
				t.Errorf("%s: root %t, not root %t", name, root, nonRoot)
			}
		}
	}
	if found != 8 {
		t.Errorf("%d containers, want 8", found)
	}
}

func TestRefused(t *testing.T) {
	for _, tc := range []struct {
		name, want string
		args       []string
	}{
		{"racks without a cluster ID", "set clusterID", []string{"--values=" + values("racks"), "--set=clusterID="}},
		{"a rack without a Secret", "/racks/0", []string{"--set=racks[0].name=a,racks[0].host=a,racks[0].project=a,clusterID=a"}},
		{"a rack with a token", "/racks/0", []string{"--set=racks[0].name=a,racks[0].host=a,racks[0].project=a,racks[0].secretName=a,racks[0].token=a,clusterID=a"}},
		{"a rack's name that is no segment", "/racks/0/name", []string{"--set=racks[0].name=a/b,racks[0].host=a,racks[0].project=a,racks[0].secretName=a,clusterID=a"}},
		{"a CA that is no certificate", "/racks/0/ca", []string{"--set=racks[0].name=a,racks[0].host=a,racks[0].project=a,racks[0].secretName=a,racks[0].ca=ca.pem,clusterID=a"}},
		{"a token among the variables", "invalid propertyName 'OXIDE_TOKEN'", []string{"--set=controller.env.OXIDE_TOKEN=a"}},
		{"a cluster ID among the variables", "invalid propertyName 'OXIDE_CSI_CLUSTER_ID'", []string{"--set=controller.env.OXIDE_CSI_CLUSTER_ID=a"}},
		{"a cluster ID that the plugin refuses", "/clusterID", []string{"--set=clusterID=Prod_1"}},
		{"another source of the identity", "/node/identity", []string{"--set=node.identity=nomad"}},
		{"several racks without a source of the rack", "is for one rack", []string{"--values=" + values("racks"), "--set=node.identity=guest"}},
		{"a wait without the registration that it needs", "needs node.registration plugin", []string{"--set=node.awaitDetachSeconds=300"}},
		{"a drain without restarts", "restartDrain needs attachMode restart", []string{"--set=restartDrain=true"}},
		{"a taint that is none", "/node/startupTaint", []string{"--set=node.startupTaint=a/b/c"}},
		{"a folder of kubelet with a socket too long", "/csi.oxide.computer-reg.sock, and the path of a socket has at most 107 bytes; this one has 108", []string{"--set=node.kubeletDir=/" + strings.Repeat("k", 62)}},
		{"a folder of kubelet with a socket too long in bytes", "this one has 109", []string{"--set=node.kubeletDir=/" + strings.Repeat("é", 31) + "k"}},
		{"disabled without a parent chart", "/enabled", []string{"--set=enabled=false"}},
		{"another way to attach", "/attachMode", []string{"--set=attachMode=cold"}},
		{"one disk", "/maxDisks", []string{"--set=maxDisks=1"}},
		{"no controller", "/controller/replicas", []string{"--set=controller.replicas=0"}},
		{"a digest that is none", "/image/digest", []string{"--set=image.digest=v1"}},
		{"a pod's label that the chart sets", "invalid propertyName 'app'", []string{"--set=controller.podLabels.app=a"}},
		{"a label that the chart sets", "invalid propertyName 'helm.sh/chart'", []string{`--set=commonLabels.helm\.sh/chart=a`}},
		{"an unknown filesystem", "/storageClasses/0/fsType", []string{"--set=storageClasses[0].name=a,storageClasses[0].fsType=ext2"}},
		{"a store without a size", "/buckets/stores/0", []string{"--set=buckets.stores[0].name=a"}},
		{"a store's name that the driver refuses", "/buckets/stores/0/name", []string{"--set=buckets.stores[0].name=a.b,buckets.stores[0].size=1Gi"}},
		{"a bucket class whose buckets have no valid name", "/buckets/classes/0/name", []string{"--set=buckets.classes[0].name=a-class-with-a-name-too-long"}},
		{"a bucket class with a quota", "/buckets/classes/0/parameters", []string{"--set=buckets.classes[0].name=a,buckets.classes[0].parameters.quota=1Gi"}},
		{"an unknown parameter", "/storageClasses/0/parameters", []string{"--set=storageClasses[0].name=a,storageClasses[0].parameters.blocksize=512"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if message := refused(t, tc.args...); !strings.Contains(message, tc.want) {
				t.Errorf("helm's error is %q, want %q in it", message, tc.want)
			}
		})
	}
}

// The longest folder of kubelet whose sockets can be reached is taken.
func TestLongestKubeletDir(t *testing.T) {
	dir := "/" + strings.Repeat("k", 61)
	objects := parse(t, render(t, "--set=node.registration=plugin,node.kubeletDir="+dir))
	node := load(t, objects, nodePods, "containers", config.Flags, config.Load)
	if got := len(node.KubeletSocket()); got != 107 {
		t.Errorf("the socket for kubelet has %d bytes", got)
	}
}

// TestDependency renders a parent chart with this chart as a dependency that can be switched off. Helm passes the
// switch and global values on.
func TestDependency(t *testing.T) {
	parent := t.TempDir()
	must(t, os.CopyFS(filepath.Join(parent, "charts", "oxide-csi"), os.DirFS(chart)))
	definition, err := os.ReadFile(filepath.Join(chart, "Chart.yaml"))
	must(t, err)
	version := regexp.MustCompile(`(?m)^version: (.*)$`).FindSubmatch(definition)[1]
	must(t, os.WriteFile(filepath.Join(parent, "Chart.yaml"), fmt.Appendf(
		nil,
		"{apiVersion: v2, name: platform, version: 1.0.0,\ndependencies: [{name: oxide-csi, version: %s, condition: oxide-csi.enabled}]}\n",
		version,
	), 0o600))
	from := func(path string, args ...string) map[string]object {
		args = append([]string{"template", "oxide-csi", path, "--namespace=" + namespace, "--kube-version=1.36.0"}, args...)
		return parse(t, run(t, program(t, "helm", "helm"), args...))
	}
	const globals = "--set=global.imageRegistry=registry.example.com,global.storageClass=oxide-disk"
	alone := from(chart, "--set=maxDisks=12")
	if diff := cmp.Diff(alone, from(parent, globals, "--set=oxide-csi.enabled=true,oxide-csi.maxDisks=12")); diff != "" {
		t.Errorf("alone (-), as a dependency (+):\n%s", diff)
	}
	if got := from(parent, globals, "--set=oxide-csi.enabled=false"); len(got) > 0 {
		t.Errorf("switched off, it has %d objects", len(got))
	}
}

// open are the values that the chart passes on without a schema.
var open = []string{
	"controller.affinity",
	"controller.nodeSelector",
	"controller.annotations",
	"controller.podAnnotations",
	"controller.podLabels",
	"controller.env",
	"controller.resources.limits",
	"controller.resources.requests",
	"node.affinity",
	"node.nodeSelector",
	"node.annotations",
	"node.podAnnotations",
	"node.podLabels",
	"node.env",
	"node.resources.requests",
	"sidecars.provisioner.resources.limits",
	"sidecars.provisioner.resources.requests",
	"sidecars.attacher.resources.limits",
	"sidecars.attacher.resources.requests",
	"sidecars.resizer.resources.limits",
	"sidecars.resizer.resources.requests",
	"sidecars.snapshotter.resources.limits",
	"sidecars.snapshotter.resources.requests",
	"sidecars.registrar.resources.limits",
	"sidecars.registrar.resources.requests",
	"buckets.driver.affinity",
	"buckets.driver.nodeSelector",
	"buckets.driver.env",
	"buckets.driver.resources.limits",
	"buckets.driver.resources.requests",
	"buckets.sidecar.resources.limits",
	"buckets.sidecar.resources.requests",
	"buckets.gateway.affinity",
	"buckets.gateway.nodeSelector",
	"buckets.gateway.resources.limits",
	"buckets.gateway.resources.requests",
	"metrics.serviceMonitor.labels",
	"metrics.podMonitor.labels",
	"commonLabels",
}

// TestUnknownKeys adds an unknown key to every map of values.yaml. The chart must refuse it.
func TestUnknownKeys(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(chart, "values.yaml"))
	must(t, err)
	var defaults object
	must(t, yaml.Unmarshal(text, &defaults))
	paths := pathsOf("", defaults)
	if len(paths) < 15 {
		t.Fatalf("values.yaml has only the maps %q", paths)
	}
	for _, path := range paths {
		t.Run(path, func(t *testing.T) {
			if message := refused(
				t,
				"--set="+strings.TrimPrefix(path+".unknownKey", ".")+"=1",
			); !strings.Contains(
				message,
				"unknownKey",
			) {
				t.Errorf("helm's error is %q", message)
			}
		})
	}
}

// pathsOf returns the paths of a map and of the maps in it, without the open ones.
func pathsOf(path string, m object) []string {
	if slices.Contains(open, path) {
		return nil
	}
	paths := []string{path}
	for _, key := range slices.Sorted(maps.Keys(m)) {
		if inner, ok := m[key].(object); ok {
			paths = append(paths, pathsOf(strings.TrimPrefix(path+"."+key, "."), inner)...)
		}
	}
	return paths
}

// TestReadme renders the chart as the quick start of README.md installs it, and compares what the quick start shows:
// the ready containers of each pod, the images that it pushed, and the claim of the example.
func TestReadme(t *testing.T) {
	text, err := os.ReadFile("../../README.md")
	must(t, err)
	_, block, _ := strings.Cut(string(text), "## Quick start")
	_, block, _ = strings.Cut(block, "```sh\n")
	block, _, _ = strings.Cut(block, "```")
	lines := strings.Split(strings.ReplaceAll(block, "\\\n", ""), "\n")
	const install = "helm install oxide-csi deploy/helm/oxide-csi --namespace oxide-csi "
	i := slices.IndexFunc(lines, func(line string) bool { return strings.HasPrefix(line, install) })
	if i < 0 {
		t.Fatalf("the quick start has no line %q", install)
	}
	objects := parse(t, render(t, strings.Fields(strings.TrimPrefix(lines[i], install))...))
	for pods, image := range map[string]string{
		"Deployment/oxide-csi/oxide-csi-controller": "controller", "DaemonSet/oxide-csi/oxide-csi-node": "plugin",
	} {
		containers := at[[]any](t, objects[pods], "spec", "template", "spec", "containers")
		shown := fmt.Sprintf("%s-…  %d/%d  Running", pods[strings.LastIndex(pods, "/")+1:], len(containers), len(containers))
		if !strings.Contains(block, shown) {
			t.Errorf("the quick start does not show %q", shown)
		}
		pulled := at[string](t, containers[0], "image")
		if pushed := strings.Replace(pulled, "oxide-csi-"+image+":", "oxide-csi-$i:", 1); pushed == pulled ||
			!strings.Contains(block, "docker://"+pushed) {
			t.Errorf("the quick start does not push %s, the image of %s", pulled, pods)
		}
	}
	_, file, _ := strings.Cut(block, "kubectl apply -f ")
	file, _, _ = strings.Cut(file, "\n")
	example, err := os.ReadFile(filepath.Join("../..", file))
	must(t, err)
	for key := range parse(t, example) {
		kind, name, _ := strings.Cut(key, "/")
		if kind == "PersistentVolumeClaim" && !(strings.Contains(block, "kubectl get pvc "+name+" ") &&
			strings.Contains(block, "oxide-csi explain default/"+name)) {
			t.Errorf("the quick start does not look at the claim %s of %s", name, file)
		}
	}
}

func TestLint(t *testing.T) {
	run(t, program(t, "helm", "helm"), "lint", "--strict", chart)
}

// render returns the chart with values, rendered without a cluster.
func render(t *testing.T, args ...string) []byte {
	t.Helper()
	return run(t, program(t, "helm", "helm"), append(template, args...)...)
}

var template = []string{"template", "oxide-csi", chart, "--namespace=" + namespace, "--kube-version=1.36.0"}

// refused returns helm's error for values that the chart refuses.
func refused(t *testing.T, args ...string) string {
	t.Helper()
	var stderr bytes.Buffer
	cmd := exec.Command(program(t, "helm", "helm"), append(template, args...)...)
	cmd.Stderr = &stderr
	if err := cmd.Run(); err == nil {
		t.Fatalf("%q is taken", args)
	}
	return stderr.String()
}

func run(t *testing.T, path string, args ...string) []byte {
	t.Helper()
	var stdout, stderr bytes.Buffer
	cmd := exec.Command(path, args...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("%s %q: %v: %s", filepath.Base(path), args, err, &stderr)
	}
	return stdout.Bytes()
}

// program returns the path of a program that test/programs/build.sh has built.
func program(t *testing.T, name, target string) string {
	t.Helper()
	dir := os.Getenv("OXIDE_CSI_PROGRAMS")
	if dir == "" {
		cache, err := os.UserCacheDir()
		must(t, err)
		dir = filepath.Join(cache, "oxide-csi-plugin", "programs")
	}
	path := filepath.Join(dir, name)
	if _, err := os.Stat(path); err != nil {
		t.Skipf("needs %s, which is not in %s; run test/programs/build.sh %s", name, dir, target)
	}
	return path
}

// parse returns the objects by kind/namespace/name.
func parse(t *testing.T, text []byte) map[string]object {
	t.Helper()
	objects := map[string]object{}
	for decoder := yaml.NewDecoder(bytes.NewReader(text)); ; {
		var o object
		if err := decoder.Decode(&o); errors.Is(err, io.EOF) {
			return objects
		} else if err != nil {
			t.Fatal(err)
		}
		if o == nil {
			continue
		}
		meta := o["metadata"].(object)
		key := fmt.Sprint(o["kind"], "/", meta["name"])
		if ns, ok := meta["namespace"]; ok {
			key = fmt.Sprint(o["kind"], "/", ns, "/", meta["name"])
		}
		if objects[key] != nil {
			t.Fatalf("%s is there twice", key)
		}
		objects[key] = o
	}
}

// at returns the value at a path of an object. It must exist.
func at[T any](t *testing.T, o any, path ...string) T {
	t.Helper()
	for _, key := range path {
		m, ok := o.(object)
		if !ok || m[key] == nil {
			t.Fatalf("there is no %s of %q", key, path)
		}
		o = m[key]
	}
	value, ok := o.(T)
	if !ok {
		t.Fatalf("%q is a %T", path, o)
	}
	return value
}
