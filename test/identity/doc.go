// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package identity asks a real Kubernetes API server and a real Nomad agent which instance a node is: the same conformance
// suite that the providers run against fakes, and what only a real one can show, which is who may ask what.
//
// It has the build tag "identity", since building those programs takes minutes: make test-identity.
package identity
