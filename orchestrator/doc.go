// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package orchestrator defines what the plugin asks of an orchestrator:
//
//   - planned restarts: [RestartRequester], [Drainer], [ClaimReporter] and [RestartListener];
//   - which nodes may use a volume: [Claims];
//   - a node's life: [StartupTaint] and [Departure];
//   - events about the plugin's own process: [SelfReporter];
//   - for the commands of oxide-csi: [Tracer], [Inventorist], [Examiner], [ClassLister] and [LogReader].
//
// [Adapter] has one field for each.
//
// The package contains contracts, and the words that their implementations share: events and conditions. Texts for
// operators name Kubernetes and Nomad, but the package talks to no orchestrator and imports no CSI. How a node learns
// which instance it is, package metadata defines.
package orchestrator
