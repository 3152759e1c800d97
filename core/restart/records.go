// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
)

// Names of records. They are permanent: a newer version must find what an older one has left behind.
const (
	restartPrefix = "csi-restart-"
	detachPrefix    = "csi-detach-"
)

// restartRecord is the text of a record of a restart. Its fields are permanent; together they have at most 512 bytes.
type restartRecord struct {
	Version int    `json:"v"`
	Cluster string `json:"cluster"`
	// ID names the restart, through all its epochs.
	ID       string `json:"id"`
	Instance string `json:"instance"`
	// Holder is the process that works on it.
	Holder string `json:"by"`
	// Beat changes as long as the holder lives.
	Heartbeat int `json:"beat"`
	// Asked says that the instance may go down because of it.
	MayStop bool `json:"mayStop,omitempty"`
	// Handover says that somebody else is to do it: the holder runs on this very instance, or has ended.
	Handover bool `json:"handover,omitempty"`
	// Disks are to be attached, so that whoever takes over knows them, each as 16 bytes in base64.
	Disks []string `json:"disks,omitempty"`
	// Frees is a disk that the instance holds for nobody and another one waits for, written alike. Only who hands the restart over
	// says so: whoever takes it over has no such wish.
	Frees string `json:"frees,omitempty"`

	slot, epoch  int
	recordID     string
	recordedText string
}

// lazyRecord is the text of a record of a volume that was unpublished and whose disk is still attached.
type deferredDetach struct {
	Version  int    `json:"v"`
	Cluster  string `json:"cluster"`
	Disk     string `json:"disk"`
	Instance string `json:"instance"`

	recordID string
}

func restartName(cluster string, slot, epoch int) string {
	return fmt.Sprintf("%s%s-%d-%d", restartPrefix, diskname.ForCluster(cluster), slot, epoch)
}

func detachName(disk string) string { return detachPrefix + disk }

func encode(record any) string {
	text, err := json.Marshal(record)
	if err != nil {
		panic(fmt.Sprintf("a record of strings and numbers always encodes: %v", err))
	}
	return string(text)
}

// book is what the records of one cluster say.
type recordSet struct {
	// restarts are the restarts that count: one for each slot at most, sorted by slot.
	restarts []restartRecord
	// outbid are records of restarts with a higher epoch beside them.
	outbid []restartRecord
	// lazy are the volumes that are unpublished and attached, by disk.
	deferred map[string]deferredDetach
}

// handOver has somebody else do it, who is told of a disk that it frees, or of none. There is room for that beside two disks less.
func (r *restartRecord) handOver(frees string) {
	r.Handover = true
	if short := encodeDisks([]string{frees}); len(short) > 0 {
		r.Frees, r.Disks = short[0], r.Disks[:min(len(r.Disks), maxRecordedDisks-2)]
	}
}

// frees reports whether the disk that a restart was handed over for is still to be freed.
func (b recordSet) stillFrees(r restartRecord) bool {
	disks := decodeDisks([]string{r.Frees})
	return len(disks) > 0 && b.detachDeferred(disks[0], r.Instance)
}

func (b recordSet) slotTaken(slot int) bool {
	return slices.ContainsFunc(b.restarts, func(r restartRecord) bool { return r.slot == slot })
}

// restartOf is the record of an instance's restart, with another ID than the given one.
func (b recordSet) restartOf(instance, except string) (restartRecord, bool) {
	for _, r := range b.restarts {
		if r.Instance == instance && r.ID != except {
			return r, true
		}
	}
	return restartRecord{}, false
}

// lazyOn reports whether the disk is attached to that instance for nobody any more.
func (b recordSet) detachDeferred(disk, instance string) bool {
	l, ok := b.deferred[disk]
	return ok && l.Instance == instance
}

// read lists the records of this cluster. Other clusters' are left alone, and so is what does not read as ours.
func (e *Engine) readRecords(ctx context.Context) (recordSet, error) {
	records, err := e.rack.Records(ctx)
	if err != nil {
		return recordSet{}, err
	}
	b := recordSet{deferred: map[string]deferredDetach{}}
	for _, record := range records {
		if l, ok := e.parseDetach(record); ok {
			b.deferred[l.Disk] = l
		} else if r, ok := e.parseRestart(record); ok {
			b.restarts = append(b.restarts, r)
		}
	}
	slices.SortFunc(b.restarts, func(x, y restartRecord) int {
		if x.slot != y.slot {
			return x.slot - y.slot
		}
		return y.epoch - x.epoch
	})
	counting := b.restarts[:0:0]
	for _, r := range b.restarts {
		if len(counting) > 0 && counting[len(counting)-1].slot == r.slot {
			b.outbid = append(b.outbid, r)
			continue
		}
		counting = append(counting, r)
	}
	b.restarts = counting
	return b, nil
}

func (e *Engine) parseDetach(record rack.Record) (deferredDetach, bool) {
	if !strings.HasPrefix(record.Name, detachPrefix) {
		return deferredDetach{}, false
	}
	l := deferredDetach{recordID: record.ID}
	if json.Unmarshal([]byte(record.Text), &l) != nil || l.Cluster != e.opts.Cluster || record.Name != detachName(l.Disk) {
		return deferredDetach{}, false
	}
	return l, true
}

func (e *Engine) parseRestart(record rack.Record) (restartRecord, bool) {
	rest, ok := strings.CutPrefix(record.Name, restartPrefix+diskname.ForCluster(e.opts.Cluster)+"-")
	slot, epoch, _ := strings.Cut(rest, "-")
	r := restartRecord{recordID: record.ID, recordedText: record.Text}
	if !ok || json.Unmarshal([]byte(record.Text), &r) != nil || r.Cluster != e.opts.Cluster {
		return restartRecord{}, false
	}
	var errSlot, errEpoch error
	r.slot, errSlot = strconv.Atoi(slot)
	r.epoch, errEpoch = strconv.Atoi(epoch)
	return r, errSlot == nil && errEpoch == nil
}

// create makes a record of a restart. False means that somebody else was faster.
func (e *Engine) createRestart(ctx context.Context, r restartRecord) (restartRecord, bool, error) {
	record, err := e.rack.CreateRecord(ctx, restartName(r.Cluster, r.slot, r.epoch), encode(r))
	if errors.Is(err, rack.ErrAlreadyExists) {
		return r, false, nil
	}
	r.recordID, r.recordedText = record.ID, record.Text
	return r, err == nil, err
}

// write puts the holder's state into its record; false means that it has no record any more.
func (e *Engine) updateRestart(ctx context.Context, r restartRecord) (bool, error) {
	err := e.rack.UpdateRecord(ctx, r.recordID, encode(r))
	if errors.Is(err, rack.ErrNotFound) {
		return false, e.rack.ConfirmProject(ctx)
	}
	return err == nil, err
}

// erase deletes a record; one that is gone already is as good.
func (e *Engine) deleteRecord(ctx context.Context, recordID string) error {
	err := e.rack.DeleteRecord(ctx, recordID)
	if errors.Is(err, rack.ErrNotFound) {
		return e.rack.ConfirmProject(ctx)
	}
	return err
}

// shorten writes disk IDs for a record, as many as an instance can take at most.
func encodeDisks(disks []string) []string {
	var short []string
	for _, disk := range disks {
		if id, err := uuid.Parse(disk); err == nil && len(short) < maxRecordedDisks {
			short = append(short, base64.RawURLEncoding.EncodeToString(id[:]))
		}
	}
	return short
}

// maxRecordedDisks is what a record has room for; an instance takes 12 disks at most, and one is its boot disk.
const maxRecordedDisks = 11

// lengthen reads what shorten wrote.
func decodeDisks(short []string) []string {
	var disks []string
	for _, text := range short {
		if raw, err := base64.RawURLEncoding.DecodeString(text); err == nil && len(raw) == len(uuid.UUID{}) {
			disks = append(disks, uuid.UUID(raw).String())
		}
	}
	return disks
}
