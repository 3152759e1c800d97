// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package verify

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"
	"time"
)

// inGuest is the request of an ask that looks into the guest of [Options.Instance]. Its conditions are about what
// oxide-csi verify-guest prints there.
const inGuest = "in the guest"

// guestTimeout is how long the command may take that looks into the guest.
const guestTimeout = time.Minute

// askGuest looks into the guest until all conditions hold: the guest may still be booting.
func (r *run) askGuest(ctx context.Context, c testCase, a ask, result *Result) (ok bool, err error) {
	wanted := strings.Join(a.has, ", ")
	deadline := time.Now().Add(r.o.Wait)
	for {
		seen, fits := r.lookIntoGuest(ctx), true
		for _, condition := range a.has {
			fits = fits && seen.err == nil && holds(seen.body, r.fill(condition))
		}
		r.record.add(r.at, request{method: inGuest}, seen)
		if seen.err == nil {
			r.report.Guest = r.record.scrubJSON(seen.raw)
		}
		if fits {
			return true, nil
		}
		if time.Now().After(deadline) {
			r.differs(result, c, "oxide-csi verify-guest, "+inGuest, r.fill(wanted), seen, false)
			return false, nil
		}
		if err := sleep(ctx, r.o.Pause); err != nil {
			return false, err
		}
	}
}

func (r *run) lookIntoGuest(ctx context.Context) (a answer) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), guestTimeout)
	defer cancel()
	begin := time.Now()
	cmd := exec.CommandContext(ctx, "sh", "-c", r.o.GuestCommand)
	cmd.WaitDelay = time.Second // a child of the shell may hold its output open
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		// What it says may name hosts: it is for the user, and not for the report.
		fmt.Fprintf(r.o.Progress, "verify: --guest-command: %v: %s\n", err, bytes.TrimSpace(stderr.Bytes()))
		return answer{err: fmt.Errorf("the command failed: %w", err)}
	}
	a = answer{status: 200, raw: stdout.Bytes(), took: time.Since(begin)}
	d := json.NewDecoder(&stdout)
	d.UseNumber()
	if err := d.Decode(&a.body); err != nil {
		a.err = fmt.Errorf("the command did not print what oxide-csi verify-guest prints: %w", err)
	}
	return a
}
