// Package identity asks a real Kubernetes API server and a real Nomad agent which instance a node is: the same conformance
// suite that the providers run against fakes, and what only a real one can show, which is who may ask what.
//
// It has the build tag "identity", since building those programs takes minutes: make test-identity.
package identity
