// Package rack talks to one Oxide rack. It is the only importer of the Oxide SDK, and the only place where a volume is a
// disk: the rest of the plugin speaks the words of the CSI specification.
//
//   - rack.go: the calls, each one API request; what they return is what the rack said, settled by nobody
//   - wait.go: waiting for a disk to come to rest
//   - name.go: names and descriptions of the disks that we make: the only metadata a rack keeps for us
//   - errors.go: the SDK's errors in the words of this package
//   - transport.go: the HTTP client: credentials that may change, a pool that suits a hundred calls at once
//
// Nothing here repeats a request: who knows what a repetition may do is the RPC that wanted it.
package rack
