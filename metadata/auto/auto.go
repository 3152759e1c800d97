// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package auto is the metadata provider that asks several other providers.
//
// A value that the operator gives wins over a discovered one, with a warning if the two differ. Of the discovered
// sources, the first that knows the instance is used, in the given order. The others are compared with it: if one names
// another instance, that is an error.
//
// The rack is the first that a source names. If a source that could name the rack does not answer, that is an error: a
// node that started on a guessed rack would keep it. Without a name the rack is the configured one. If several are
// configured, a source must name one of them.
package auto

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
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

// instance returns what the source knows: possibly only the rack.
func (s Source) instance(ctx context.Context) (metadata.Instance, error) {
	if partial, ok := s.Provider.(metadata.PartialProvider); ok {
		return partial.PartialInstance(ctx)
	}
	return s.Provider.Instance(ctx)
}

// Options names the sources.
type Options struct {
	// Explicit holds the operator's values. If it returns an error, so does the provider.
	Explicit Source
	// Discovered are the other sources, the most trusted first.
	Discovered []Source
	// Racks are the names of the configured racks. With fewer than two, every name is accepted, and also none.
	Racks []string
	// Log gets a line when the answer comes from other sources than before, and when sources differ. Nil means no log.
	Log *slog.Logger
}

// compareTimeout is how long a source may take that is only asked for comparison.
const compareTimeout = time.Second

// Provider is a [metadata.Provider].
type Provider struct {
	options Options

	mu     sync.Mutex
	logged map[string]string // the last line in the log, by subject
}

// New makes a provider. It does no I/O.
func New(options Options) *Provider {
	if options.Log == nil {
		options.Log = slog.New(slog.DiscardHandler)
	}
	return &Provider{options: options, logged: map[string]string{}}
}

// result collects the answer, and the names of the sources that gave it.
type result struct {
	metadata.Instance
	idFrom, rackFrom string
	explicit         bool // the operator has given the ID
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
	if err == nil {
		err = p.checkRack(f)
	}
	if err != nil {
		return metadata.Instance{}, err
	}
	p.logSources(f)
	return f.Instance, nil
}

// Follow implements [metadata.Follower]. Sources that cannot be followed are read at each call.
func (p *Provider) Follow(ctx context.Context) <-chan struct{} {
	var changes []<-chan struct{}
	for _, source := range p.options.Discovered {
		if follower, ok := source.Provider.(metadata.Follower); ok {
			changes = append(changes, follower.Follow(ctx))
		}
	}
	return metadata.Merge(ctx, changes...)
}

// merge adds the values of a source that are not known yet.
func (f *result) merge(said metadata.Instance, source string) {
	if f.ID == "" && said.ID != "" {
		f.ID, f.idFrom = said.ID, source
	}
	if f.Rack == "" && said.Rack != "" {
		f.Rack, f.rackFrom = said.Rack, source
	}
}

// ask asks one source and compares its values with those already known. It records a failure of the source. It returns
// an error only if sources name different instances, unless the operator has given the ID.
func (p *Provider) ask(ctx context.Context, source Source, f *result) error {
	question := source.instance
	switch {
	case f.ID == "":
		question = source.Provider.Instance // its error says why there is no ID
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
		return metadata.Invalid(
			fmt.Sprintf("%s says that this is instance %s, and %s that it is %s", f.idFrom, f.ID, source.Name, said.ID),
			metadata.ErrConflict,
			"find out which is right (the rack lists its instances) and correct the other, or set --instance-id")
	}
	p.compare("instance ID", f.ID, f.idFrom, said.ID, source.Name)
	p.compare("rack", f.Rack, f.rackFrom, said.Rack, source.Name)
	f.merge(said, source.Name)
	return nil
}

// compare logs a warning if a source has another value than the one in use.
func (p *Provider) compare(what, used, from, said, by string) {
	if used != "" && said != "" && used != said && p.isNews(what+" of "+by, used+" "+said) {
		p.options.Log.Warn("metadata: two sources differ about the "+what, "used", used, "from", from, "not_used", said, "by",
			by)
	}
}

// noInstanceID is the error if no source knows the instance. It is the error of a single source, or has the reason of
// each source.
func (f *result) noInstanceID(ctx context.Context) error {
	if len(f.failed) == 1 {
		return f.failed[0].err
	}
	e := metadata.Invalid("", ctx.Err(), "repair one of the sources, or set --instance-id (OXIDE_INSTANCE_ID)")
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

// noRack is the error of the first source that failed and might have named the rack, or nil.
func (f *result) noRack() error {
	for _, failed := range f.failed {
		var reason *metadata.Error
		if _, partial := failed.Provider.(metadata.PartialProvider); partial && errors.As(failed.err, &reason) {
			return &metadata.Error{
				Kind: reason.Kind, Cause: reason.Cause, Next: reason.Next + ", or set --rack (OXIDE_RACK)",
				What: fmt.Sprintf("%s knows the instance, but %s, which may know the rack, failed: %s",
					f.idFrom, failed.Name, reason.What),
			}
		}
	}
	return nil
}

// checkRack returns an error if several racks are configured and the sources name none of them.
func (p *Provider) checkRack(f result) error {
	switch {
	case len(p.options.Racks) < 2 || slices.Contains(p.options.Racks, f.Rack):
		return nil
	case f.Rack == "":
		return metadata.NotReady(
			fmt.Sprintf("%s knows the instance, but no source names its rack, and the configuration has several (%s)",
				f.idFrom, strings.Join(p.options.Racks, ", ")),
			nil,
			"name the rack where a source reads it, such as the Node's label, or set --rack (OXIDE_RACK)",
		)
	}
	return metadata.NotReady(
		fmt.Sprintf("%s says that this node is on rack %q, and the configuration has only %s",
			f.rackFrom, f.Rack, strings.Join(p.options.Racks, ", ")),
		nil,
		"correct the name there, or add the rack to the configuration",
	)
}

// logSources logs which sources answered, and why the others did not.
func (p *Provider) logSources(f result) {
	rackFrom := f.rackFrom
	if rackFrom == "" {
		rackFrom = "configuration"
	}
	if p.isNews("identity", f.ID+" "+f.idFrom+" "+f.Rack+" "+rackFrom) {
		p.options.Log.Info("metadata: sources", "instance_id_from", f.idFrom, "rack_from", rackFrom)
	}
	for _, failed := range f.failed {
		if p.isNews(failed.Name, failed.err.Error()) {
			p.options.Log.Info("metadata: a source did not respond and is not needed", "source", failed.Name, "reason",
				failed.err)
		}
	}
}

// isNews reports whether the line about a subject differs from the last one.
func (p *Provider) isNews(subject, line string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	last, seen := p.logged[subject]
	p.logged[subject] = line
	return !seen || last != line
}
