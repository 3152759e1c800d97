// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package auto makes one answer of several metadata providers.
//
// What the operator says wins over what is discovered, with a warning where the
// two differ. Of what is discovered, the first source that knows the instance is
// believed, in the order in which they are given. The others are witnesses: one
// that names another instance makes an error, not a choice.
//
// The rack is the first that any source names. Where a source that could name it
// does not answer, there is no answer: a node that came up on a guessed rack would
// keep it.
package auto

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// Source is a provider and its name.
type Source struct {
	Name     string
	Provider metadata.Provider
}

// instance asks the source for whatever it knows.
func (s Source) instance(ctx context.Context) (metadata.Instance, error) {
	if partial, ok := s.Provider.(metadata.PartialProvider); ok {
		return partial.PartialInstance(ctx)
	}
	return s.Provider.Instance(ctx)
}

// Options says whom to ask.
type Options struct {
	// Explicit is what the operator says. An error of it is the answer.
	Explicit Source
	// Discovered are the sources to ask after it, the most trusted first.
	Discovered []Source
	// Log gets a line when the answer comes from other sources than the last time,
	// and when they differ. Nil is no log.
	Log *slog.Logger
}

// compareTimeout is how long a source may take that is asked only to be compared.
const compareTimeout = time.Second

// Provider is a [metadata.Provider].
type Provider struct {
	options Options

	mu     sync.Mutex
	logged map[string]string // what was logged last, by subject
}

// New makes a provider. It reads nothing.
func New(options Options) *Provider {
	if options.Log == nil {
		options.Log = slog.New(slog.DiscardHandler)
	}
	return &Provider{options: options, logged: map[string]string{}}
}

// result is an answer in the making: what is known, and from whom.
type result struct {
	metadata.Instance
	idFrom, rackFrom string
	explicit         bool // the ID is the operator's
	failed           []failure
}

// failure is why a source did not answer.
type failure struct {
	Source
	err error
}

// Instance implements [metadata.Provider].
func (p *Provider) Instance(ctx context.Context) (metadata.Instance, error) {
	explicit := p.options.Explicit
	said, err := explicit.instance(ctx)
	if err != nil {
		return metadata.Instance{}, err
	}
	f := result{explicit: said.ID != ""}
	f.merge(said, explicit.Name)
	for _, source := range p.options.Discovered {
		if err := p.ask(ctx, source, &f); err != nil {
			return metadata.Instance{}, err
		}
	}
	switch {
	case f.ID == "" && len(f.failed) == 0:
		return explicit.Provider.Instance(ctx)
	case f.ID == "":
		return metadata.Instance{}, f.noInstanceID(ctx)
	case f.Rack == "":
		err = f.noRack()
	}
	if err != nil {
		return metadata.Instance{}, err
	}
	p.logSources(f)
	return f.Instance, nil
}

// Follow implements [metadata.Follower] for the sources that can be followed. The
// others are read when the provider is asked.
func (p *Provider) Follow(ctx context.Context) <-chan struct{} {
	var changes []<-chan struct{}
	for _, source := range p.options.Discovered {
		if follower, ok := source.Provider.(metadata.Follower); ok {
			changes = append(changes, follower.Follow(ctx))
		}
	}
	return metadata.Merge(ctx, changes...)
}

// merge adds what a source says that nobody has said before.
func (f *result) merge(said metadata.Instance, source string) {
	if f.ID == "" && said.ID != "" {
		f.ID, f.idFrom = said.ID, source
	}
	if f.Rack == "" && said.Rack != "" {
		f.Rack, f.rackFrom = said.Rack, source
	}
}

// ask asks one source and compares what it says with what is known. A source that
// does not answer is noted; only one that says that nobody is to be believed ends
// the search.
func (p *Provider) ask(ctx context.Context, source Source, f *result) error {
	question := source.instance
	switch {
	case f.ID == "":
		question = source.Provider.Instance // whose error says why there is no ID
	case f.Rack != "":
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, compareTimeout)
		defer cancel()
	}
	said, err := question(ctx)
	switch {
	case errors.Is(err, metadata.ErrConflict) && !f.explicit:
		return err
	case err != nil:
		f.failed = append(f.failed, failure{source, err})
		return nil
	case said.ID != "" && f.ID != "" && said.ID != f.ID && !f.explicit:
		return &metadata.Error{
			Kind: metadata.ErrInvalid, Cause: metadata.ErrConflict,
			What: fmt.Sprintf("%s says that this is instance %s, and %s that it is %s", f.idFrom, f.ID, source.Name, said.ID),
			Next: "find out which is true (the rack lists its instances) and correct the other, or set --instance-id",
		}
	}
	p.compare("instance ID", f.ID, f.idFrom, said.ID, source.Name)
	p.compare("rack", f.Rack, f.rackFrom, said.Rack, source.Name)
	f.merge(said, source.Name)
	return nil
}

// compare warns that something is not used because something else wins.
func (p *Provider) compare(what, used, from, said, by string) {
	if used != "" && said != "" && used != said && p.isNews(what+" of "+by, used+" "+said) {
		p.options.Log.Warn(
			"metadata: two sources differ about the "+what,
			"used",
			used,
			"from",
			from,
			"not_used",
			said,
			"by",
			by,
		)
	}
}

// noInstanceID is the error where no source knows the instance. A single one speaks for
// itself; of several, each one's reason is given.
func (f *result) noInstanceID(ctx context.Context) error {
	if len(f.failed) == 1 {
		return f.failed[0].err
	}
	e := &metadata.Error{
		Kind:  metadata.ErrInvalid,
		Cause: ctx.Err(),
		Next:  "make one of them answer, or set --instance-id (OXIDE_INSTANCE_ID)",
	}
	reasons := make([]string, len(f.failed))
	for i, failed := range f.failed {
		reasons[i] = failed.Name + ": " + failed.err.Error()
		if errors.Is(failed.err, metadata.ErrNotReady) {
			e.Kind = metadata.ErrNotReady
		}
	}
	e.What = "no source knows which instance this is: " + strings.Join(reasons, "; ")
	return e
}

// noRack is the error of the first source that did not answer and might have
// named the rack, or nil.
func (f *result) noRack() error {
	for _, failed := range f.failed {
		var reason *metadata.Error
		if _, partial := failed.Provider.(metadata.PartialProvider); partial && errors.As(failed.err, &reason) {
			return &metadata.Error{
				Kind: reason.Kind, Cause: reason.Cause, Next: reason.Next + ", or set --rack (OXIDE_RACK)",
				What: fmt.Sprintf("%s knows the instance, and the rack is asked of %s: %s", f.idFrom, failed.Name, reason.What),
			}
		}
	}
	return nil
}

// logSources logs who answered, and why the others did not.
func (p *Provider) logSources(f result) {
	rackFrom := f.rackFrom
	if rackFrom == "" {
		rackFrom = "nobody, so the configured name holds"
	}
	if p.isNews("answer", f.ID+" "+f.idFrom+" "+f.Rack+" "+rackFrom) {
		p.options.Log.Info("metadata: sources", "instance_id_from", f.idFrom, "rack_from", rackFrom)
	}
	for _, failed := range f.failed {
		if p.isNews(failed.Name, failed.err.Error()) {
			p.options.Log.Info(
				"metadata: a source did not answer, and is not needed",
				"source",
				failed.Name,
				"reason",
				failed.err,
			)
		}
	}
}

// isNews reports whether this is the first line about its subject, or another than
// the last one.
func (p *Provider) isNews(subject, line string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	last, seen := p.logged[subject]
	p.logged[subject] = line
	return !seen || last != line
}
