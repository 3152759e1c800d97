// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package helm renders the chart of deploy/helm with helm, and compares it with the manifests of deploy/k8s, with the
// plugin's own parsing of its settings, and with a real API server.
//
// Tests that need helm have the build tag "helm", because building it takes minutes once: make test-helm.
package helm
