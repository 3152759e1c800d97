// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build helm

package helm_test

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"
)

// TestBuckets renders deploy/k8s/buckets, and the chart with two stores. It checks that no container has rights that it
// does not need, that each workload is one pod, and that the driver's file of stores names Services and files that are
// mounted.
func TestBuckets(t *testing.T) {
	for _, tc := range []struct {
		name   string
		render func() []byte
		stores []string
	}{
		{"manifests", func() []byte {
			return run(t, program(t, "kustomize", "helm"), "build", filepath.Join(manifests, "buckets"))
		}, []string{"main"}},
		{"chart", func() []byte { return render(t, "--values="+values("buckets")) }, []string{"main", "archive"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			objects := parse(t, tc.render())
			mounts := checkWorkloads(t, objects, tc.stores)
			var names []string
			for _, store := range storesIn(t, objects) {
				names = append(names, store.Name)
				want := "https://oxide-buckets-" + store.Name + "." + namespace + ".svc:7070"
				if objects["Service/"+namespace+"/oxide-buckets-"+store.Name] == nil || store.Endpoint != want {
					t.Errorf("store %q has no Service, or the endpoint is %s, want %s", store.Name, store.Endpoint, want)
				}
				for _, folder := range []string{store.KeysFolder, filepath.Dir(store.CAFile)} {
					if !slices.Contains(mounts, folder) || !strings.Contains(folder, "/"+store.Name+"/") {
						t.Errorf("store %q: nothing of its own is mounted at %s", store.Name, folder)
					}
				}
			}
			if diff := cmp.Diff(tc.stores, names); diff != "" {
				t.Errorf("want the stores (-), got (+): %s", diff)
			}
			if class := objects["StorageClass/oxide-disk-buckets"]; class["allowVolumeExpansion"] != true {
				t.Errorf("a store cannot grow: allowVolumeExpansion is %v", class["allowVolumeExpansion"])
			}
			for key, o := range objects {
				// Another word reaches the driver as an unknown type.
				// Source: container-object-storage-interface v0.2.2, client/apis/objectstorage/v1alpha1/types.go.
				if strings.HasPrefix(key, "BucketAccessClass/") && o["authenticationType"] != "Key" {
					t.Errorf("%s has the authentication type %v, want Key", key, o["authenticationType"])
				}
			}
		})
	}
}

// checkWorkloads checks the pods of the driver and of the gateways, and returns the paths of all mounts.
func checkWorkloads(t *testing.T, objects map[string]object, stores []string) (mounts []string) {
	t.Helper()
	keys := []string{"Deployment/" + namespace + "/oxide-cosi"}
	for _, store := range stores {
		keys = append(keys, "StatefulSet/"+namespace+"/oxide-buckets-"+store)
	}
	for _, key := range keys {
		o := objects[key]
		if replicas := lookup(o, []string{"spec", "replicas"}); replicas != 1 {
			t.Errorf("%s has %v replicas, want 1", key, replicas)
		}
		mounts = append(mounts, checkConfined(t, key, at[object](t, o, "spec", "template", "spec"))...)
	}
	return mounts
}

// bucketStore is one store of the driver's file.
type bucketStore struct {
	Name, Endpoint string
	CAFile         string `yaml:"caFile"`
	KeysFolder     string `yaml:"keysFolder"`
}

// storesIn returns the stores of the driver's file.
func storesIn(t *testing.T, objects map[string]object) []bucketStore {
	t.Helper()
	for key, o := range objects {
		if strings.HasPrefix(key, "ConfigMap/"+namespace+"/oxide-cosi") {
			var file struct{ Stores []bucketStore }
			must(t, yaml.Unmarshal([]byte(at[string](t, o, "data", "stores.yaml")), &file))
			return file.Stores
		}
	}
	t.Fatal("there is no file of stores")
	return nil
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
