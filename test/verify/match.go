// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package verify

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	"github.com/oxidecomputer/oxide.go/oxide"
)

// want is an expected answer. A message that ends in "…" is compared as a prefix. One that begins with "…" must be
// contained.
type want struct {
	status        int
	code, message string
}

func (w want) String() string {
	if w.status < 300 {
		return strconv.Itoa(w.status)
	}
	return fmt.Sprintf("%d %s %q", w.status, w.code, w.message)
}

// matches compares an answer with what is expected. onlyWords means that nothing but the message differs.
func (w want) matches(a answer) (ok, onlyWords bool) {
	if a.err != nil || a.status != w.status || a.code() != w.code {
		return false, false
	}
	if w.status < 300 {
		return true, false
	}
	message := a.message()
	if prefix, is := strings.CutSuffix(w.message, "…"); is {
		ok = strings.HasPrefix(message, prefix)
	} else if part, is := strings.CutPrefix(w.message, "…"); is {
		ok = strings.Contains(message, part)
	} else {
		ok = message == w.message
	}
	return ok, !ok
}

// get returns the value at a path such as "items.0.name". Of a list, "#" is the length, and "key:value" the first
// element that has this value. It returns nil for null, and missing if there is no such value.
func get(v any, path string) any {
	for step := range strings.SplitSeq(path, ".") {
		switch at := v.(type) {
		case map[string]any:
			inner, has := at[step]
			if !has {
				return missing{}
			}
			v = inner
		case []any:
			if v = element(at, step); v == (missing{}) {
				return v
			}
		default:
			return missing{}
		}
	}
	return v
}

type missing struct{}

func element(list []any, step string) any {
	if step == "#" {
		return json.Number(strconv.Itoa(len(list)))
	}
	if key, value, is := strings.Cut(step, ":"); is {
		for _, one := range list {
			if show(get(one, key)) == value {
				return one
			}
		}
		return missing{}
	}
	if n, err := strconv.Atoi(step); err == nil && n < len(list) {
		return list[n]
	}
	return missing{}
}

// show is a value as a condition of [ask.has] writes it.
func show(v any) string {
	switch v := v.(type) {
	case nil:
		return "null"
	case missing:
		return "absent"
	case string:
		return v
	}
	text, err := json.Marshal(v)
	if err != nil {
		panic(err) // it was decoded from JSON
	}
	return string(text)
}

// holds checks a condition "path=value" or "path!=value".
func holds(body any, condition string) bool {
	path, value, _ := strings.Cut(condition, "=")
	path, not := strings.CutSuffix(path, "!")
	return (show(get(body, path)) == value) != not
}

// sdkReads decodes a successful answer as the plugin's SDK does. A state that the SDK does not know makes it fail.
func sdkReads(q request, a answer) error {
	path, _, _ := strings.Cut(q.path, "?")
	parts := strings.Split(strings.Trim(path, "/"), "/")
	one, page := len(parts) > 1 || q.method == "POST", any(nil)
	switch {
	case a.status > 299 || len(a.raw) == 0:
		return nil
	case len(parts) > 2 && parts[2] == "disks":
		parts[0], one = "disks", len(parts) > 3
	case len(parts) > 2 && q.method == "GET":
		return nil // nothing that the plugin reads
	}
	into := map[string][2]any{
		"disks":                {new(oxide.Disk), new(oxide.DiskResultsPage)},
		"instances":            {new(oxide.Instance), new(oxide.InstanceResultsPage)},
		"snapshots":            {new(oxide.Snapshot), new(oxide.SnapshotResultsPage)},
		"anti-affinity-groups": {new(oxide.AntiAffinityGroup), new(oxide.AntiAffinityGroupResultsPage)},
		"utilization":          {nil, new(oxide.Utilization)},
	}[parts[0]]
	if page = into[1]; one {
		page = into[0]
	}
	if page == nil {
		return nil
	}
	return json.Unmarshal(a.raw, page)
}
