// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/detach"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
)

// restartPrefix begins the names of the records. It is permanent: a newer version must find the records of an older
// one.
const restartPrefix = "csi-restart-"

// restartRecord is the text of a restart's record. Its JSON names are permanent and short: the text has at most 512
// bytes.
type restartRecord struct {
	Version int    `json:"v"`
	Cluster string `json:"cluster"`
	// ID names the restart in all its epochs.
	ID       string `json:"id"`
	Instance string `json:"instance"`
	// Holder is the process that carries the restart out.
	Holder string `json:"by"`
	// Heartbeat changes with each renewal.
	Heartbeat int `json:"beat"`
	// MayStop says that the instance may be stopped for this restart from now on.
	MayStop bool `json:"mayStop,omitempty"`
	// Handover says that another process must take over: the holder runs on this instance, or has ended.
	Handover bool `json:"handover,omitempty"`
	// Stuck says that the node plugin of the running instance cannot be reached, that its guest does not halt, or that
	// the rack does not end the change of its run state. See [recordSet.count].
	Stuck bool `json:"stuck,omitempty"`
	// Volumes are the IDs of the volumes whose disks to attach, for a process that takes over: 16 bytes each, in base64.
	Volumes []string `json:"disks,omitempty"`
	// Frees is the ID of a volume in base64, whose unpublished disk is on the instance while another instance waits for
	// it. It is set only with Handover, because the process that takes over may have no request for that volume.
	Frees string `json:"frees,omitempty"`

	slot, epoch  int
	recordID     string
	recordedText string
}

func restartName(cluster string, slot, epoch int) string {
	return fmt.Sprintf("%s%s-%d-%d", restartPrefix, diskname.ForCluster(cluster), slot, epoch)
}

// recordSet is the content of one cluster's records.
type recordSet struct {
	// restarts are the records with the highest epoch of each restart, sorted by slot. A slot has one of them, except
	// after a record was created late, see [Engine.adopt].
	restarts []restartRecord
	// superseded are the records of restarts for which there is a higher epoch.
	superseded []restartRecord
	// all are the records as the rack lists them.
	all      []rack.Record
	deferred detach.Set
}

// handOver marks the record for a takeover. frees is the volume whose disk to free, or "". It takes the space of two
// volumes in the record.
func (r *restartRecord) handOver(frees string) {
	r.Handover = true
	if short := encodeVolumes([]string{frees}); len(short) > 0 {
		r.Frees, r.Volumes = short[0], r.Volumes[:min(len(r.Volumes), maxRecordedVolumes-2)]
	}
}

// frees reports whether the restart was handed over to free the disk of this volume.
func (r restartRecord) frees(volumeID string) bool {
	return slices.Contains(decodeVolumes([]string{r.Frees}), volumeID)
}

// stillFrees reports whether the disk for which a restart was handed over still has to be freed.
func (b recordSet) stillFrees(r restartRecord) bool {
	volumes := decodeVolumes([]string{r.Frees})
	return len(volumes) > 0 && b.detachDeferred(volumes[0], r.Instance)
}

// freeSlot returns the first slot without a restart. It returns false if maxDown restarts count.
func (b recordSet) freeSlot(maxDown int) (slot int, free bool) {
	for slices.ContainsFunc(b.restarts, func(r restartRecord) bool { return r.slot == slot }) {
		slot++
	}
	return slot, b.count("", maxDown) < maxDown
}

// count counts the restarts that limit further ones, without the one whose ID is except. Up to maxDown stuck restarts
// do not count. If more are stuck, the cause is hardly a single node, and more restarts would take more nodes down.
func (b recordSet) count(except string, maxDown int) int {
	running, stuck := 0, 0
	for _, r := range b.restarts {
		switch {
		case r.ID == except:
		case r.Stuck:
			stuck++
		default:
			running++
		}
	}
	return running + max(0, stuck-maxDown)
}

// restartOf returns the restart of an instance whose ID is not except.
func (b recordSet) restartOf(instance, except string) (restartRecord, bool) {
	for _, r := range b.restarts {
		if r.Instance == instance && r.ID != except {
			return r, true
		}
	}
	return restartRecord{}, false
}

// detachDeferred reports whether the detach of the volume's disk from that instance is deferred.
func (b recordSet) detachDeferred(volume, instance string) bool {
	_, ok := b.deferred.Of(volume, instance)
	return ok
}

// frees reports whether the next restart of the instance detaches the volume's disk. A restart for other volumes does
// not carry out an untimed deferred detach, because the volume may be in use.
func (b recordSet) frees(volume, instance string) bool {
	d, ok := b.deferred.Of(volume, instance)
	return ok && !d.Untimed
}

// readRecords lists the records of this cluster. It ignores other clusters' records and unreadable ones.
func (e *Engine) readRecords(ctx context.Context) (recordSet, error) {
	records, err := e.rack.Records(ctx)
	if err != nil {
		return recordSet{}, err
	}
	b := recordSet{all: records, deferred: detach.Parse(records, e.opts.Cluster)}
	for _, record := range records {
		if r, ok := parseRestart(record, e.opts.Cluster); ok {
			b.restarts = append(b.restarts, r)
		}
	}
	slices.SortFunc(b.restarts, func(x, y restartRecord) int {
		return cmp.Or(x.slot-y.slot, y.epoch-x.epoch)
	})
	counting := b.restarts[:0:0]
	for _, r := range b.restarts {
		if slices.ContainsFunc(counting, func(other restartRecord) bool { return other.ID == r.ID }) {
			b.superseded = append(b.superseded, r)
			continue
		}
		counting = append(counting, r)
	}
	b.restarts = counting
	return b, nil
}

// Restarting returns a function that reports whether a restart of an instance is under way. records are all records of
// a rack.
func Restarting(records []rack.Record, cluster string) func(instanceID string) bool {
	instances := map[string]bool{}
	for _, record := range records {
		if r, ok := parseRestart(record, cluster); ok {
			instances[r.Instance] = true
		}
	}
	return func(instanceID string) bool { return instances[instanceID] }
}

func parseRestart(record rack.Record, cluster string) (restartRecord, bool) {
	rest, ok := strings.CutPrefix(record.Name, restartPrefix+diskname.ForCluster(cluster)+"-")
	slot, epoch, _ := strings.Cut(rest, "-")
	r := restartRecord{recordID: record.ID, recordedText: record.Text}
	if !ok || json.Unmarshal([]byte(record.Text), &r) != nil || r.Cluster != cluster {
		return restartRecord{}, false
	}
	var errSlot, errEpoch error
	r.slot, errSlot = strconv.Atoi(slot)
	r.epoch, errEpoch = strconv.Atoi(epoch)
	return r, errSlot == nil && errEpoch == nil
}

// createRestart creates a restart's record. It returns false if another process has created it first.
func (e *Engine) createRestart(ctx context.Context, r restartRecord) (restartRecord, bool, error) {
	record, err := e.rack.CreateRecord(ctx, restartName(r.Cluster, r.slot, r.epoch), rack.RecordText(r))
	if errors.Is(err, rack.ErrAlreadyExists) {
		return r, false, nil
	}
	r.recordID, r.recordedText = record.ID, record.Text
	return r, err == nil, err
}

// updateRestart writes a restart's record. It returns false if the record was deleted.
func (e *Engine) updateRestart(ctx context.Context, r restartRecord) (bool, error) {
	err := e.rack.UpdateRecord(ctx, r.recordID, rack.RecordText(r))
	if errors.Is(err, rack.ErrNotFound) {
		return false, e.rack.ConfirmProject(ctx)
	}
	return err == nil, err
}

// deleteRecord deletes a record. It succeeds if the record was deleted before.
func (e *Engine) deleteRecord(ctx context.Context, recordID string) error {
	err := e.rack.DeleteRecord(ctx, recordID)
	if errors.Is(err, rack.ErrNotFound) {
		return e.rack.ConfirmProject(ctx)
	}
	return err
}

// encodeVolumes encodes volume IDs for a record, at most maxRecordedVolumes.
func encodeVolumes(volumes []string) []string {
	var short []string
	for _, volume := range volumes {
		if id, err := uuid.Parse(volume); err == nil && len(short) < maxRecordedVolumes {
			short = append(short, base64.RawURLEncoding.EncodeToString(id[:]))
		}
	}
	return short
}

// maxRecordedVolumes is how many volumes fit into a record. An instance has at most 12 disks, one of them its boot
// disk.
const maxRecordedVolumes = 11

// decodeVolumes is the inverse of encodeVolumes.
func decodeVolumes(short []string) []string {
	var volumes []string
	for _, text := range short {
		if raw, err := base64.RawURLEncoding.DecodeString(text); err == nil && len(raw) == len(uuid.UUID{}) {
			volumes = append(volumes, uuid.UUID(raw).String())
		}
	}
	return volumes
}

// RecordedInstance returns the instance whose restart this record holds for the cluster, or "".
func RecordedInstance(record rack.Record, cluster string) (instanceID string) {
	r, _ := parseRestart(record, cluster)
	return r.Instance
}
