// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package buckets

import (
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/test/pages"
)

// TestAccountOf holds golden values: a CO keeps account IDs, and a repeated grant must find its user.
func TestAccountOf(t *testing.T) {
	const want = "OXS6IFB2TTITHT45V5UJYI"
	if got := accountOf("east", "main/class-1", "ba-1"); got != want {
		t.Errorf("%s, want %s", got, want)
	}
	pages.Shows(t, "../../docs/reference/formats.md", want)
	seen := map[string]bool{}
	for _, parts := range [][3]string{
		{"east", "main/class-1", "ba-1"}, {"east", "main/class-1", "ba-2"}, {"east", "main/class-2", "ba-1"},
		{"west", "main/class-1", "ba-1"}, {"east", "main/class-", "1ba-1"},
	} {
		account := accountOf(parts[0], parts[1], parts[2])
		if seen[account] || !accountID.MatchString(account) {
			t.Errorf("%v: %s is used twice or not valid", parts, account)
		}
		seen[account] = true
		if err := checkAccount(parts[0], parts[1], account); err != nil {
			t.Error(err)
		}
		if checkAccount("north", parts[1], account) == nil || checkAccount(parts[0], "main/other", account) == nil {
			t.Errorf("%v: the account is taken for one of another cluster or bucket", parts)
		}
	}
}

// TestClusterID checks that the driver takes each cluster ID that the plugin takes: both have the same in one cluster.
func TestClusterID(t *testing.T) {
	stores := []StoreOptions{{Name: "main", Endpoint: "http://127.0.0.1:1", Region: "r", AccessKey: "a", SecretKey: "s"}}
	for id, valid := range map[string]bool{
		"5f3c1f0e-6a51-4d43-9d2c-1f2a7d0f3b11": true, strings.Repeat("a", 63): true,
		"": false, "Prod": false, "a/b": false, strings.Repeat("a", 64): false,
	} {
		if _, err := New(Options{ClusterID: id, Stores: stores}); (err == nil) != valid {
			t.Errorf("cluster ID %q: %v", id, err)
		}
	}
}

func TestCheckBucketName(t *testing.T) {
	for _, name := range []string{"abc", "a.b-c", strings.Repeat("a", 63), "class-0a1b2c3d-0000-4000-8000-0123456789ab"} {
		if err := checkBucketName("name", name); err != nil {
			t.Error(err)
		}
	}
	for _, name := range []string{
		"", "ab", "-abc", "abc-", "Abc", "a_b", "a..b", "10.1.2.3", "xn--abc", "abc-s3alias", "..", "a/b", strings.Repeat("a", 64),
	} {
		if checkBucketName("name", name) == nil {
			t.Errorf("%q is accepted", name)
		}
	}
}
