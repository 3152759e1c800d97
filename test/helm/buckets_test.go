// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build helm

package helm_test

import (
	"path/filepath"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// TestBucketsManifests renders deploy/k8s/buckets. It checks that no container has rights that it does not need, that
// each workload is one pod, and that the driver's file of stores names the Service and files that are mounted.
func TestBucketsManifests(t *testing.T) {
	objects := parse(t, run(t, program(t, "kustomize", "helm"), "build", filepath.Join(manifests, "buckets")))
	pods := 0
	var mounts []string
	stores := ""
	for key, o := range objects {
		switch kind, _, _ := strings.Cut(key, "/"); kind {
		case "ConfigMap":
			stores, _ = lookup(o, []string{"data", "stores.yaml"}).(string)
		case "StatefulSet", "Deployment":
			pods++
			if replicas := lookup(o, []string{"spec", "replicas"}); replicas != 1 {
				t.Errorf("%s has %v replicas, want 1", key, replicas)
			}
			mounts = append(mounts, checkConfined(t, key, at[object](t, o, "spec", "template", "spec"))...)
		}
	}
	if pods != 2 {
		t.Errorf("%d workloads were found, want the gateway and the driver", pods)
	}
	var file struct {
		Stores []struct{ Name, Endpoint, CAFile, KeysFolder string }
	}
	must(
		t,
		yaml.Unmarshal([]byte(strings.NewReplacer("caFile", "cafile", "keysFolder", "keysfolder").Replace(stores)), &file),
	)
	if len(file.Stores) != 1 {
		t.Fatalf("the file of stores is %q", stores)
	}
	store := file.Stores[0]
	if _, exists := objects["Service/"+namespace+"/oxide-buckets-"+store.Name]; !exists {
		t.Errorf("store %q has no Service", store.Name)
	}
	if want := "https://oxide-buckets-" + store.Name + "." + namespace + ".svc:7070"; store.Endpoint != want {
		t.Errorf("the endpoint is %s, want %s", store.Endpoint, want)
	}
	for _, folder := range []string{store.KeysFolder, filepath.Dir(store.CAFile)} {
		if !strings.Contains(strings.Join(mounts, "\n")+"\n", folder+"\n") {
			t.Errorf("nothing is mounted at %s", folder)
		}
	}
}

// checkConfined checks the containers of a pod and returns the paths of their mounts.
func checkConfined(t *testing.T, key string, pod object) (mounts []string) {
	t.Helper()
	if lookup(pod, []string{"securityContext", "runAsNonRoot"}) != true || pod["automountServiceAccountToken"] != false {
		t.Errorf("%s may run as root or has a token in each container", key)
	}
	for _, field := range []string{"initContainers", "containers"} {
		containers, _ := pod[field].([]any)
		for _, c := range containers {
			container := c.(object)
			security := at[object](t, container, "securityContext")
			if security["readOnlyRootFilesystem"] != true || security["allowPrivilegeEscalation"] != false ||
				lookup(container, []string{"resources", "limits", "memory"}) == nil {
				t.Errorf("%s: container %v is not confined", key, container["name"])
			}
			for _, mount := range container["volumeMounts"].([]any) {
				mounts = append(mounts, mount.(object)["mountPath"].(string))
			}
		}
	}
	return mounts
}
