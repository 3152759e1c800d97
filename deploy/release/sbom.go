// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
)

// object is an object of JSON. Its keys are written sorted.
type object map[string]any

// writeLists writes the contents of an artefact as SPDX 2.3 and as CycloneDX 1.6. Both formats want a time and a random
// identifier. For equal lists these must be equal: the time is the epoch, the identifier a checksum of the components.
func (r release) writeLists(c contents) error {
	for suffix, list := range map[string]object{"spdx": c.spdx(), "cdx": c.cycloneDX()} {
		path := filepath.Join(r.folder, fmt.Sprintf("%s-%s.%s.json", c.name, c.version, suffix))
		if err := writeJSON(path, list); err != nil {
			return err
		}
	}
	return nil
}

func writeJSON(path string, content any) error {
	text, err := json.MarshalIndent(content, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(text, '\n'), 0o600)
}

const source = "https://github.com/oxidecomputer/oxide-csi-plugin"

var notOfSPDXID = regexp.MustCompile(`[^A-Za-z0-9.-]+`)

func (c contents) spdx() object {
	const root = "SPDXRef-artefact"
	item := func(id string, c component) object {
		licence := c.licence
		if licence == "" {
			licence = "NOASSERTION"
		}
		return object{
			"SPDXID":           id,
			"name":             c.name,
			"versionInfo":      c.version,
			"downloadLocation": "NOASSERTION",
			"filesAnalyzed":    false,
			"licenseConcluded": licence,
			"licenseDeclared":  licence,
			"copyrightText":    "NOASSERTION",
			"externalRefs": []object{
				{"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": c.url},
			},
		}
	}
	packages := []object{item(root, c.itself())}
	relations := []object{
		{"spdxElementId": "SPDXRef-DOCUMENT", "relationshipType": "DESCRIBES", "relatedSpdxElement": root},
	}
	for _, component := range c.components {
		id := "SPDXRef-" + notOfSPDXID.ReplaceAllString(component.url, "-")
		packages = append(packages, item(id, component))
		relations = append(relations, object{"spdxElementId": root, "relationshipType": "CONTAINS", "relatedSpdxElement": id})
	}
	return object{
		"spdxVersion": "SPDX-2.3", "dataLicense": "CC0-1.0", "SPDXID": "SPDXRef-DOCUMENT", "name": c.name,
		"documentNamespace": fmt.Sprintf("%s/releases/download/v%s/%s-%s", source, c.version, c.name, c.checksum()),
		"creationInfo":      object{"created": "1970-01-01T00:00:00Z", "creators": []string{"Tool: oxide-csi-release"}},
		"packages":          packages, "relationships": relations,
	}
}

func (c contents) cycloneDX() object {
	item := func(kind string, c component) object {
		o := object{"type": kind, "bom-ref": c.url, "name": c.name, "version": c.version, "purl": c.url}
		if c.licence != "" {
			o["licenses"] = []object{{"expression": c.licence}}
		}
		return o
	}
	components := []object{}
	for _, component := range c.components {
		components = append(components, item("library", component))
	}
	s := c.checksum()
	return object{
		"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1,
		// A UUID of version 8: the bits are ours to choose.
		"serialNumber": fmt.Sprintf("urn:uuid:%s-%s-8%s-8%s-%s", s[:8], s[8:12], s[12:15], s[15:18], s[18:30]),
		"metadata":     object{"component": item("application", c.itself())},
		"components":   components,
	}
}

func (c contents) itself() component {
	return component{name: c.name, version: c.version, licence: "MPL-2.0",
		url: fmt.Sprintf("pkg:github/oxidecomputer/oxide-csi-plugin@v%s#%s", c.version, c.name)}
}

func (c contents) checksum() string {
	text := c.name + " " + c.version
	for _, component := range c.components {
		text += "\n" + component.url
	}
	return sum([]byte(text))
}
