// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Names of the images.
const (
	nodeImage       = "oxide-csi-plugin"
	controllerImage = "oxide-csi-controller"
	cosiImage       = "oxide-cosi"
)

func repository(image string) string { return "oxidecomputer/" + image }

// deploy writes the chart, the manifests and the job files, which name the images by digest, and the files for
// monitoring.
func (r release) deploy(digests map[string]string) error {
	chart, err := pinnedChart(digests)
	if err != nil {
		return err
	}
	if err := chart.writeTarGzip(filepath.Join(r.folder, fmt.Sprintf("oxide-csi-%s.tgz", r.version))); err != nil {
		return err
	}
	manifests, err := pinnedManifests(digests, r.tag)
	if err != nil {
		return err
	}
	if err := r.render(manifests); err != nil {
		return err
	}
	jobs, err := pinnedJobs(digests)
	if err != nil {
		return err
	}
	monitoring, err := readFolder("deploy/monitoring", "")
	if err != nil {
		return err
	}
	for kind, content := range map[string]files{"manifests": manifests, "nomad": jobs, "monitoring": monitoring} {
		name := fmt.Sprintf("oxide-csi-%s-%s", r.version, kind)
		if err := content.below(name + "/").writeTarGzip(filepath.Join(r.folder, name+".tar.gz")); err != nil {
			return err
		}
	}
	return nil
}

// pinnedChart returns the chart with digests of images, from the folder of the repository.
func pinnedChart(digests map[string]string) (files, error) {
	chart, err := readFolder("deploy/helm/oxide-csi", "oxide-csi/")
	if err != nil {
		return nil, err
	}
	for key, image := range map[string]string{
		"\n  digest: ": nodeImage, "\n  controllerDigest: ": controllerImage, "\n    digest: ": cosiImage,
	} {
		if err := chart.replace("oxide-csi/values.yaml", key+`""`, key+digests[image], 1); err != nil {
			return nil, err
		}
	}
	return chart, nil
}

// pinnedManifests returns the manifests for Kustomize with digests instead of the tag.
func pinnedManifests(digests map[string]string, tag string) (files, error) {
	manifests, err := readFolder("deploy/k8s", "")
	if err != nil {
		return nil, err
	}
	for image, folder := range map[string]string{nodeImage: "base", controllerImage: "base", cosiImage: "buckets"} {
		name := "  - name: " + repository(image)
		old, pinned := name+"\n    newTag: "+tag, name+"\n    digest: "+digests[image]
		if err := manifests.replace(folder+"/kustomization.yaml", old, pinned, 1); err != nil {
			return nil, err
		}
	}
	return manifests, nil
}

// pinnedJobs returns the Nomad job files with digests.
func pinnedJobs(digests map[string]string) (files, error) {
	jobs, err := readFolder("deploy/nomad", "")
	if err != nil {
		return nil, err
	}
	for job, image := range map[string]string{
		"node.nomad.hcl": nodeImage, "monolith.nomad.hcl": nodeImage, "controller.nomad.hcl": controllerImage,
	} {
		variable := `variable "image" {`
		if image == controllerImage {
			variable = `variable "controller_image" {`
		}
		old := variable + "\n  type        = string\n  default     = "
		pinned := fmt.Sprintf("%s%q", old, repository(image)+"@"+digests[image])
		if err := jobs.replace(job, old+"null", pinned, 1); err != nil {
			return nil, err
		}
	}
	return jobs, nil
}

// render writes the manifests as kubectl apply -f takes them: without and with snapshots, and those of buckets.
func (r release) render(manifests files) error {
	folder := filepath.Join(r.build, "k8s")
	for name, content := range manifests {
		path := filepath.Join(folder, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			return err
		}
		if err := os.WriteFile(path, content, 0o600); err != nil {
			return err
		}
	}
	for file, kustomization := range map[string]string{
		"kubernetes": "base", "kubernetes-snapshots": ".", "kubernetes-buckets": "buckets",
	} {
		text, err := exec.Command(r.kustomize, "build", filepath.Join(folder, kustomization)).Output()
		if err != nil {
			return fmt.Errorf("%s build %s: %w", r.kustomize, kustomization, err)
		}
		text = []byte(strings.TrimSpace(string(text)) + "\n")
		path := filepath.Join(r.folder, fmt.Sprintf("oxide-csi-%s-%s.yaml", r.version, file))
		if err := os.WriteFile(path, text, 0o600); err != nil {
			return err
		}
	}
	return nil
}
