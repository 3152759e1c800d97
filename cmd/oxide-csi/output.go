// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"io"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// printable is a terminal or a log that gets only printable text, see [rpc.Printable]. Each write must hold whole
// characters, as those of fmt, text/tabwriter and slog do.
type printable struct{ io.Writer }

func (p printable) Write(text []byte) (int, error) {
	if _, err := io.WriteString(p.Writer, rpc.Printable(string(text))); err != nil {
		return 0, err
	}
	return len(text), nil
}
