// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"k8s.io/klog/v2"
	mountutils "k8s.io/mount-utils"
	"k8s.io/utils/exec"
)

// mountUtilsLife does what other CSI drivers do in a node's four calls, with k8s.io/mount-utils as they use it:
// SafeFormatAndMount (stat, blkid, mkfs or fsck, mount) at the staging path, a bind, and umount of both.
func mountUtilsLife(device, fsType, staging, target string) error {
	klog.SetSlogLogger(slog.New(slog.DiscardHandler))
	mounter := mountutils.NewSafeFormatAndMount(mountutils.New(""), exec.New())
	for _, folder := range []string{staging, target} {
		if err := os.MkdirAll(folder, 0o750); err != nil {
			return err
		}
	}
	if err := mounter.FormatAndMount(device, staging, fsType, nil); err != nil {
		return err
	}
	if err := mounter.Mount(staging, target, "", []string{"bind"}); err != nil {
		return err
	}
	for _, folder := range []string{target, staging} {
		if err := mountutils.CleanupMountPoint(folder, mounter, true); err != nil {
			return err
		}
	}
	return nil
}

// device returns the device node of the only volume that is attached to the guest. Namespace 1 of controller 0 is the
// boot disk.
func (s *stagingRig) device() (string, error) {
	nodes, err := filepath.Glob(filepath.Join(s.node.Guest, "dev", "nvme*n*"))
	if err != nil {
		return "", err
	}
	var found []string
	for _, node := range nodes {
		if filepath.Base(node) != "nvme0n1" {
			found = append(found, node)
		}
	}
	if len(found) != 1 {
		return "", fmt.Errorf("the guest has the volumes %q, want one", found)
	}
	return found[0], nil
}
