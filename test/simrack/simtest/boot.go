// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simtest

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// WriteBoot writes a program for oxide-sim serve --guest-boot into an existing folder and returns its path. Each guest
// is then a machine with shell scripts as services; services are their texts. In them $OXIDE_SIM_GUEST is the guest's
// folder, $OXIDE_SIM_INSTANCE the instance's name, and $OXIDE_SIM_INSTANCE_ID its ID.
//
// The services are started at each boot. When the guest halts, they get SIGTERM, and SIGKILL after the grace. Their
// output goes to the file console in the guest's folder.
func WriteBoot(dir, sim string, grace time.Duration, services ...string) (string, error) {
	boot := fmt.Sprintf("exec %s guest-init --grace=%s", Quote(sim), grace)
	for n, text := range services {
		path := filepath.Join(dir, fmt.Sprintf("service-%d", n))
		if err := writeScript(path, text); err != nil {
			return "", err
		}
		boot += " " + Quote(path)
	}
	path := filepath.Join(dir, "boot")
	return path, writeScript(path, boot)
}

func writeScript(path, text string) error {
	return os.WriteFile(path, []byte("#!/bin/sh\n"+strings.TrimSuffix(text, "\n")+"\n"), 0o755)
}

// Quote makes one word of a shell script from any text.
func Quote(text string) string { return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'" }
