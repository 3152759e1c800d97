// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/core/buckets"
)

// TestTutorial runs the script of the tutorial's pod with granted keys: it writes an object, reads it and deletes it.
func TestTutorial(t *testing.T) {
	if _, err := exec.LookPath("curl"); err != nil {
		t.Skip("needs curl")
	}
	page, err := os.ReadFile("../../docs/tutorials/first-bucket.md")
	must(t, err)
	match := regexp.MustCompile(`(?s)        - \|\n(.*?)      volumeMounts:`).FindSubmatch(page)
	if match == nil {
		t.Fatal("the page has no script")
	}
	r := newRig(t, false)
	id := r.mustCreate(t, "class-1", nil)
	g := r.mustGrant(t, id, "access", buckets.ReadWrite)
	// As COSI's sidecar v0.2.2 writes it.
	info, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"name": "bc-1", "creationTimestamp": nil},
		"spec": map[string]any{
			"bucketName": "class-1", "authenticationType": "Key", "secretAzure": nil, "protocols": []string{"s3"},
			"secretS3": map[string]string{
				"endpoint": r.gateway.Endpoint, "region": "us-east-1", "accessKeyID": g.accessKey, "accessSecretKey": g.secretKey,
			},
		},
	})
	must(t, err)
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "BucketInfo"), info, 0o600))
	script := strings.ReplaceAll(string(match[1]), "/bucket/BucketInfo", filepath.Join(dir, "BucketInfo"))
	shell := exec.CommandContext(t.Context(), "sh", "-euc", script)
	output, err := shell.CombinedOutput()
	if err != nil || string(output) != "hello, bucket" {
		t.Errorf("the script prints %q, %v", output, err)
	}
	must(t, r.remove(t, id)) // the object is deleted
}
