// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package helm renders the chart of deploy/helm with helm, and holds it equal to the manifests of deploy/k8s, to what the plugin
// understands, and to what an API server takes.
//
// What needs helm has the build tag "helm", since building it takes minutes once: make test-helm.
package helm
