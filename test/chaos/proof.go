// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
)

// prove compares the rack with a volume after the answer OK to a create, publish, unpublish or delete. It reads all
// records and all disks of the project, whatever they are for. The controllers ask for the records of one volume by
// name instead, so this proof does not share their code.
func (w *worker) prove(ctx context.Context, v *volume) error {
	if !w.proofs {
		return nil
	}
	var problem string
	for range 3 { // a list takes several calls, and an expansion that was given up may end between two
		var err error
		for problem, err = w.disprove(ctx, v); err != nil; problem, err = w.disprove(ctx, v) {
			if err := pause(ctx, firstBackoff); err != nil {
				return err
			}
		}
		if problem == "" {
			w.results.count("proof by lists")
			return nil
		}
		if err := pause(ctx, maxBackoff); err != nil {
			return err
		}
	}
	return fmt.Errorf("%s: %s", problem, v.historyText())
}

// disprove says what is wrong with a volume's disks, or "".
func (w *worker) disprove(ctx context.Context, v *volume) (problem string, err error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	project := oxide.NameOrId(w.sim.Project)
	records, err := w.rack.AntiAffinityGroupListAllPages(ctx, oxide.AntiAffinityGroupListParams{Project: project})
	all, listErr := w.rack.DiskListAllPages(ctx, oxide.DiskListParams{Project: project})
	if err := errors.Join(err, listErr); err != nil {
		return "", err
	}
	expands := false
	for _, record := range records {
		name := string(record.Name)
		if !strings.HasPrefix(name, "csi-expand-") && !strings.HasPrefix(name, "csi-grown-") {
			continue
		}
		var fields struct {
			Volume string `json:"vol"`
		}
		if err := json.Unmarshal([]byte(record.Description), &fields); err != nil {
			return fmt.Sprintf("record %s cannot be read: %v", name, err), nil
		}
		expands = expands || fields.Volume == v.id && strings.HasPrefix(name, "csi-expand-")
	}
	disks, there := 0, 0
	for _, disk := range all {
		if volumeID(disk) != v.id {
			continue
		}
		disks++
		attached, _ := disk.State.AsAttached()
		switch {
		case attached == nil:
		case v.node == nil:
			return fmt.Sprintf("disk %s is attached to %s", disk.Id, attached.Instance), nil
		case attached.Instance == v.node.ID:
			there++
		default:
			return fmt.Sprintf("disk %s is attached to %s, not to %s", disk.Id, attached.Instance, v.node.ID), nil
		}
	}
	switch {
	case v.fate == gone && disks > 0:
		return fmt.Sprintf("%d disks are left", disks), nil
	case v.fate == lives && disks != 1 && !expands:
		return fmt.Sprintf("it has %d disks, and is not being expanded", disks), nil
	case v.node != nil && there != 1:
		return fmt.Sprintf("%d of its disks are attached to %s", there, v.node.ID), nil
	}
	return "", nil
}
