// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build release

package release

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
)

// cycloneDX is a module that has the schemas of CycloneDX.
const cycloneDX = "github.com/CycloneDX/cyclonedx-go@v0.12.0"

// TestListsFollowTheSchema checks every list of contents in the format CycloneDX against the schema of version 1.6. No
// module of the proxy has the schema of SPDX 2.3.
func TestListsFollowTheSchema(t *testing.T) {
	schema := cycloneDXSchema(t)
	lists, err := filepath.Glob(path(t, "*.cdx.json"))
	must(t, err)
	if len(lists) < 4 {
		t.Errorf("only the lists %q", lists)
	}
	for _, list := range lists {
		document := readJSON(t, list)
		if err := schema.Validate(document); err != nil {
			t.Errorf("%s: %v", filepath.Base(list), err)
		}
		component := document.(map[string]any)["components"].([]any)[0].(map[string]any)
		component["type"] = "nonsense"
		if schema.Validate(document) == nil {
			t.Errorf("%s with a component of an unknown type follows the schema", filepath.Base(list))
		}
	}
}

func cycloneDXSchema(t *testing.T) *jsonschema.Schema {
	t.Helper()
	download := exec.Command("go", "mod", "download", "-json", cycloneDX)
	download.Dir = t.TempDir() // outside of a module
	answer, err := download.Output()
	var module struct{ Dir, Error string }
	if err := errors.Join(err, json.Unmarshal(answer, &module)); err != nil || module.Error != "" {
		t.Fatalf("%s: %v, %s", cycloneDX, err, module.Error)
	}
	const base = "http://cyclonedx.org/schema/"
	compiler := jsonschema.NewCompiler()
	compiler.AssertFormat()
	for name, file := range map[string]string{
		"bom-1.6.schema.json":  "bom-1.6.schema.json",
		"spdx.schema.json":     "spdx.schema.json", // the names of licences
		"jsf-0.82.schema.json": "jsf-0.82.schemax.json",
	} {
		must(t, compiler.AddResource(base+name, readJSON(t, filepath.Join(module.Dir, "schema", file))))
	}
	schema, err := compiler.Compile(base + "bom-1.6.schema.json")
	must(t, err)
	return schema
}

func readJSON(t *testing.T, path string) any {
	t.Helper()
	file, err := os.Open(path)
	must(t, err)
	defer file.Close()
	document, err := jsonschema.UnmarshalJSON(file)
	must(t, err)
	return document
}
