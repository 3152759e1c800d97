// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package verify plays the cases of docs/reference/rack.md on a rack, and says where the rack answers otherwise. The
// command oxide-sim verify runs it. docs/how-to/verify-a-rack.md is for people who have a rack.
//
// A case is a row of a table: what must be there, requests, their expected answers, and what the plugin builds on them.
// Before each case the run looks at the objects that the case names, and brings them into the given state. So a case
// does not depend on the case before it, and a case that met a failure of the rack can be repeated.
//
// # What it may touch
//
// The run works in one project, which must hold nothing but what an earlier run left behind. All that it makes has a
// name that begins with csi-verify-, and a description that no one else writes. It changes and deletes only objects
// that have both, and addresses them by ID. The one exception is the instance of [Options.Instance], which it stops and
// starts.
//
//   - cases.go: the table, and the cases that cannot be played from outside
//   - fixture.go: the objects of the cases, and what a case is given
//   - run.go: a run: the guards, the cases, their results
//   - clean.go: removes what a run has made
//   - client.go: requests, answers, and the times that they take
//   - match.go: compares an answer with what is expected
//   - guest.go: what oxide-csi verify-guest prints in a guest
//   - record.go: recordings without secrets, and how two of them differ
//   - report.go: the report for people and programs
package verify
