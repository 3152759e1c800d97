// Package rpc has what the Controller and the Node service both say in RPCs: errors with gRPC codes, checks of requests,
// the keys of contexts and parameters, the topology, and how long an RPC may wait.
package rpc
