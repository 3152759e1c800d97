// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package identity reads a node's instance ID from a real Kubernetes API server and a real Nomad agent. It runs the
// conformance suite that the providers also run against fakes, and tests what only the real programs can show: which
// credentials have which rights.
//
// The tests have the build tag "identity", because building those programs takes minutes: make test-identity.
package identity
