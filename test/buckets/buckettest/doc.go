// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package buckettest runs the real gateway and the real driver for buckets, and a proxy with faults between them. The
// tests of cmd/oxide-cosi, the demo and the chaos test use it.
package buckettest
