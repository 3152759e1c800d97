// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/core/buckets"
)

// audit compares the store with what the workers know. Nothing fails meanwhile.
func (w *world) audit(ctx context.Context, workers []*worker) {
	w.count("audits")
	wantBuckets, wantUsers := []string{foreign}, []string{}
	for _, worker := range workers {
		for _, b := range worker.buckets {
			wantBuckets = append(wantBuckets, b.name)
			for _, a := range b.accesses {
				wantUsers = append(wantUsers, a.account)
			}
			w.auditPolicy(ctx, b)
		}
		worker.tryAll(ctx)
	}
	w.compare("buckets", wantBuckets, w.folders())
	w.compare("users", wantUsers, w.users())
	if text, err := get(ctx, w.root, foreign, secret); err != nil || text != "text" {
		w.violation("bucket %s: its object has the text %q, %v", foreign, text, err)
	}
}

// tryAll tries all accesses and reads all objects.
func (w *worker) tryAll(ctx context.Context) {
	for _, b := range w.buckets {
		for _, a := range b.accesses {
			w.try(ctx, b, a)
		}
		for key, want := range b.objects {
			if text, err := get(ctx, w.root, b.name, key); err != nil || text != want {
				w.violation("bucket %s: object %s: %v, or another text", b.name, key, err)
			}
		}
	}
	for _, client := range w.revoked {
		if err := list(ctx, client, foreign); !refused(err) {
			w.violation("revoked keys: %v, want a refusal", err)
		}
	}
}

// auditPolicy checks that the policy of a bucket names its accesses and nothing else.
func (w *world) auditPolicy(ctx context.Context, b *bucket) {
	got := map[string]string{}
	err := ask(ctx, func(ctx context.Context) error {
		answer, err := w.root.GetBucketPolicy(ctx, &s3.GetBucketPolicyInput{Bucket: &b.name})
		if err != nil {
			return err
		}
		var policy struct {
			Statement []struct {
				Sid       string
				Principal struct{ AWS []string }
			}
		}
		if err := json.Unmarshal([]byte(aws.ToString(answer.Policy)), &policy); err != nil {
			return err
		}
		for _, statement := range policy.Statement {
			for _, account := range statement.Principal.AWS {
				got[account] = statement.Sid
			}
		}
		return nil
	})
	if err != nil && code(err) != "NoSuchBucketPolicy" {
		w.violation("policy of bucket %s: %v", b.name, err)
	}
	want := map[string]string{}
	for _, a := range b.accesses {
		want[a.account] = map[string]string{
			buckets.ReadOnly: "OxideCosiReadOnly", buckets.ReadWrite: "OxideCosiReadWrite",
		}[a.kind]
	}
	if diff := cmp.Diff(want, got); diff != "" {
		w.violation("policy of bucket %s: want (-), got (+):\n%s", b.name, diff)
	}
}

// folders returns the names of all buckets, as the gateway keeps them.
func (w *world) folders() []string {
	entries, err := os.ReadDir(filepath.Join(w.dir, "buckets"))
	if err != nil {
		w.violation("%v", err)
	}
	var names []string
	for _, entry := range entries {
		if !strings.HasPrefix(entry.Name(), ".") { // the gateway's own
			names = append(names, entry.Name())
		}
	}
	return names
}

// users returns the access keys of all users.
func (w *world) users() []string {
	text, err := w.gateway.Users()
	var file struct {
		AccessAccounts map[string]json.RawMessage `json:"accessAccounts"`
	}
	if err == nil {
		err = json.Unmarshal([]byte(text), &file)
	}
	if err != nil {
		w.violation("the gateway's users: %v", err)
	}
	return slices.Collect(maps.Keys(file.AccessAccounts))
}

func (w *world) compare(what string, want, got []string) {
	slices.Sort(want)
	slices.Sort(got)
	if diff := cmp.Diff(append([]string{}, want...), append([]string{}, got...)); diff != "" { // nil is no difference
		w.violation("%s that the workers know (-) and that the store has (+):\n%s", what, diff)
	}
}

// auditLog searches the driver's log for panics and secrets.
func (w *world) auditLog() {
	text, err := os.ReadFile(w.log.Name())
	if err != nil || !bytes.Contains(text, []byte("serving")) {
		w.violation("the driver's log: %v, or it is empty", err)
	}
	if bytes.Contains(text, []byte("panic")) {
		w.violation("the driver panicked: see %s", w.log.Name())
	}
	for secret := range w.secrets {
		if bytes.Contains(text, []byte(secret)) {
			w.violation("the driver's log has a secret key")
			return
		}
	}
}
