// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package buckets

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestPolicyKeepsForeignStatements checks that statements of an operator stay as they are, in their order.
func TestPolicyKeepsForeignStatements(t *testing.T) {
	const foreign = `{"Sid":"public","Effect":"Allow","Principal":"*","Action":"s3:GetObject","Resource":"arn:aws:s3:::b/*"}`
	parsed, err := parsePolicy(`{"Version":"2008-10-17","Statement":[` + foreign + `]}`)
	if err != nil {
		t.Fatal(err)
	}
	parsed.accounts[ReadOnly] = []string{"R"}
	parsed.accounts[ReadWrite] = []string{"W1", "W2"}
	text, err := parsed.text("b")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(text, `{"Version":"2008-10-17","Statement":[`+foreign+`,`) {
		t.Errorf("the policy is %s", text)
	}
	again, err := parsePolicy(text)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(parsed.accounts, again.accounts); diff != "" {
		t.Error(diff)
	}
	if again.access("R") != ReadOnly || again.access("W2") != ReadWrite || again.access("X") != "" {
		t.Error("an account has the wrong access")
	}
	if again.keep(func(string) bool { return true }) || !again.keep(func(string) bool { return false }) {
		t.Error("keep does not tell whether it removed accounts")
	}
	if text, err = again.text("b"); err != nil || text != `{"Version":"2008-10-17","Statement":[`+foreign+`]}` {
		t.Errorf("the policy without accounts is %s, %v", text, err)
	}
}

func TestPolicyWithoutStatements(t *testing.T) {
	parsed, err := parsePolicy("")
	if err != nil {
		t.Fatal(err)
	}
	if text, err := parsed.text("b"); err != nil || text != "" {
		t.Errorf("the policy is %q, %v", text, err)
	}
}

// TestPolicyOfOneAccount checks the form in which a list of one principal is a plain string.
func TestPolicyOfOneAccount(t *testing.T) {
	parsed, err := parsePolicy(
		`{"Statement":[{"Sid":"OxideCosiReadOnly","Principal":{"AWS":"R"},"Action":["s3:GetObject"],"Resource":["r"]}]}`,
	)
	if err != nil {
		t.Fatal(err)
	}
	if parsed.access("R") != ReadOnly {
		t.Errorf("the accounts are %v", parsed.accounts)
	}
}

// TestPolicyOfUnknownForm checks that a policy which the driver does not understand is an error and is not rewritten.
func TestPolicyOfUnknownForm(t *testing.T) {
	for _, text := range []string{"no JSON", `{"Statement":[{"Sid":"OxideCosiReadOnly","Principal":"*"}]}`} {
		if _, err := parsePolicy(text); err == nil {
			t.Errorf("%s is accepted", text)
		}
	}
}

// TestReadActions checks that read-only keys have no action that changes anything.
func TestReadActions(t *testing.T) {
	for _, action := range readActions {
		if !strings.HasPrefix(action, "s3:Get") && !strings.HasPrefix(action, "s3:List") {
			t.Errorf("read-only keys may %s", action)
		}
	}
}
