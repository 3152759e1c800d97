// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package static is the metadata provider for an identity that is already known: an operator sets it, a job file fills
// it in, or an init container writes it into a file.
//
// # The file
//
// Lines of KEY=VALUE as a shell or systemd reads them:
//
//	# written by oxide-csi metadata
//	OXIDE_INSTANCE_ID=6f3a1c9e-2b7d-4e58-9a41-0d5c8e7f1a23
//	export OXIDE_RACK="default"
//
// Empty lines and comments are skipped. "export " before a key, quotes around a value and Windows line ends are
// removed. Two lines with the same key and different values are an error: either could be right. Other keys are logged
// once and ignored.
//
// The program that writes the file should replace it by a rename, so that the plugin never sees half of it. A file that
// is written in place is accepted once it has not changed for a tenth of a second.
package static

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"sync"
	"syscall"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// Keys of the file.
const (
	keyInstanceID = "OXIDE_INSTANCE_ID"
	keyRack       = "OXIDE_RACK"
)

// Options says where the identity comes from. InstanceID or File is required.
type Options struct {
	// InstanceID is the instance's UUID in any notation, or empty. It wins over the file.
	InstanceID string
	// Rack is the rack's name, or empty if it is not known. It wins over the file.
	Rack string
	// File is the path of an env file, or empty. It is read at every call that needs a value from it. It may appear,
	// change and disappear at any time.
	File string
	// Log gets a line for each entry of the file that is not used. Nil means no log.
	Log *slog.Logger
}

// Provider is a [metadata.Provider].
type Provider struct {
	options Options

	mu     sync.Mutex
	warned map[string]bool // subjects that were logged
}

// New makes a provider. It does no I/O.
func New(options Options) *Provider {
	if options.Log == nil {
		options.Log = slog.New(slog.DiscardHandler)
	}
	return &Provider{options: options, warned: map[string]bool{}}
}

// Instance implements [metadata.Provider].
func (p *Provider) Instance(ctx context.Context) (metadata.Instance, error) {
	instance, err := p.PartialInstance(ctx)
	switch {
	case err != nil || instance.ID != "":
		return instance, err
	case p.options.File == "":
		return metadata.Instance{}, metadata.Invalid("neither an instance ID nor a metadata file is configured", nil,
			"set --instance-id or --metadata-file")
	}
	return metadata.Instance{}, metadata.Invalid(fmt.Sprintf("%s has no line %s", p.options.File, keyInstanceID), nil,
		"add "+keyInstanceID+"=<UUID of this instance>")
}

// PartialInstance implements [metadata.PartialProvider].
func (p *Provider) PartialInstance(ctx context.Context) (metadata.Instance, error) {
	o := p.options
	if err := ctx.Err(); err != nil {
		return metadata.Instance{}, metadata.NotReady("the instance's identity was not read", err, "try again")
	}
	id, rack := value{text: o.InstanceID, from: "--instance-id"}, value{text: o.Rack, from: "--rack"}
	if o.File != "" && (id.text == "" || rack.text == "") {
		found, err := p.read(ctx)
		if err != nil {
			return metadata.Instance{}, err
		}
		id = p.choose("instance ID", id, found[keyInstanceID])
		rack = p.choose("rack", rack, found[keyRack])
	}
	return check(id, rack)
}

// value is a text and its origin. Line is 0 if it is not from the file.
type value struct {
	text, from string
	line       int
}

// choose returns the explicit value, or the file's value if there is none. It logs once if the two differ.
func (p *Provider) choose(what string, explicit, file value) value {
	if explicit.text == "" {
		return file
	}
	if file.text != "" && !sameValue(explicit.text, file.text) {
		p.warnOnce("hidden "+what, "metadata: the file's "+what+" is not used, because a setting overrides it",
			"file", p.options.File, "used", explicit.from)
	}
	return explicit
}

// sameValue reports whether two texts are equal, or are the same instance ID in two notations.
func sameValue(a, b string) bool {
	idA, errA := metadata.ParseInstanceID(a)
	idB, errB := metadata.ParseInstanceID(b)
	return a == b || errA == nil && errB == nil && idA == idB
}

// check returns the identity if both values are valid. A value that was not found is empty. An ID that is empty in the
// file is an error.
func check(id, rack value) (instance metadata.Instance, err error) {
	if id.text != "" || id.line > 0 {
		if instance.ID, err = metadata.ParseInstanceID(id.text); err != nil {
			return metadata.Instance{}, metadata.Invalid(id.from, err, "set it to the UUID of this instance")
		}
	}
	if rack.text != "" {
		if err := metadata.CheckRack(rack.text); err != nil {
			return metadata.Instance{}, metadata.Invalid(rack.from, err,
				"set it to the name that the controller uses for this rack, or remove it")
		}
	}
	return metadata.Instance{ID: instance.ID, Rack: rack.text}, nil
}

// read returns the two values of the file.
func (p *Provider) read(ctx context.Context) (map[string]value, error) {
	file := p.options.File
	text, err := readSettled(ctx, file)
	if err != nil {
		return nil, explain(file, err)
	}
	if len(text) == 0 {
		return nil, metadata.NotReady("wait for "+file+": it is empty", nil,
			"check that the program that writes it (an init container, cloud-init) has finished")
	}
	found, unknown, err := parse(file, text)
	if err != nil {
		return nil, err
	}
	for _, key := range unknown {
		p.warnOnce("key "+key, "metadata: unknown key is ignored", "file", file, "key", key)
	}
	return found, nil
}

// warnOnce logs one warning per subject.
func (p *Provider) warnOnce(subject, message string, args ...any) {
	p.mu.Lock()
	seen := p.warned[subject]
	p.warned[subject] = true
	p.mu.Unlock()
	if !seen {
		p.options.Log.Warn(message, args...)
	}
}

// explain turns an error of reading the file into a [metadata.Error].
func explain(file string, err error) error {
	e := metadata.NotReady("read "+file, err, "")
	if path := (*fs.PathError)(nil); errors.As(err, &path) {
		e.Cause = path.Err // The path is in What.
	}
	switch {
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		e.What = "wait until " + file + " is no longer being written"
		e.Next = "try again"
	case errors.Is(err, errChanging):
		e.Next = "replace the file by a rename, or stop the program that keeps writing to it"
	case errors.Is(err, fs.ErrNotExist):
		e.What = "wait for " + file
		e.Next = "check the path, and that the program that writes the file (an init container, cloud-init) has run"
	case errors.Is(err, fs.ErrPermission):
		e.Kind, e.Next = metadata.ErrInvalid, "make it readable for the plugin's user"
	case errors.Is(err, errNotAFile),
		errors.Is(err, errTooLarge),
		errors.Is(err, syscall.ENOTDIR),
		errors.Is(err, syscall.ELOOP),
		errors.Is(err, syscall.ENAMETOOLONG):
		e.Kind, e.Next = metadata.ErrInvalid, "name the file that holds "+keyInstanceID+"="
	default:
		e.Next = "check the filesystem that the file is on"
	}
	return e
}

var _ metadata.PartialProvider = (*Provider)(nil)
